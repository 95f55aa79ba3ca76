"""Wrappers around the round of an algorithm, with the same arguments and placements."""

from collections.abc import Callable
from typing import Any

from fedgrad.core.program import Program


def wrapped(inner: Program, around: Callable[..., Any], name: str) -> Program:
    """Return a round with the function `around`, which calls `inner` with the same arguments.

    It is named `name(...)`, unless `name` is complete already, and keeps the inner executor.
    """
    around.__name__ = name if name.endswith(")") else f"{name}({inner.name})"
    around.__signature__ = inner.signature  # type: ignore[attr-defined]
    return Program(around, dict(inner.placements), inner.executor)
