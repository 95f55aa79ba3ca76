"""The round of an algorithm with something around it: the same arguments, the same clients."""

from collections.abc import Callable
from typing import Any

from fedgrad.core.program import Program


def wrapped(inner: Program, around: Callable[..., Any], name: str) -> Program:
    """A round whose function is `around`, which calls `inner` and takes what that takes. It is
    called `name(...)`, unless that is a whole name already, and runs where the inner one does."""
    around.__name__ = name if name.endswith(")") else f"{name}({inner.name})"
    around.__signature__ = inner.signature  # type: ignore[attr-defined]
    return Program(around, dict(inner.placements), inner.executor)
