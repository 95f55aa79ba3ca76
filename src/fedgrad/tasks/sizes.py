"""`size=` of a task: a model with which to try things, or the paper's."""

from collections.abc import Mapping
from typing import TypeVar

from fedgrad.core.errors import nearest
from fedgrad.tasks.contract import Defaults, TaskError

T = TypeVar("T")


def of_size(sizes: Mapping[str, T], size: str) -> T:
    """What a size means for a task."""
    if not isinstance(size, str) or size not in sizes:
        raise TaskError.here(f"There is no size {size!r}.{nearest(str(size), list(sizes))}")
    return sizes[size]


def defaults(size: str, clients: int, batch_size: int, rates: Mapping[str, float]) -> Defaults:
    """The paper's rounds of 50 clients, or a few small ones, with the learning rate of this size;
    never more clients than there are."""
    cohort, rounds = (50, 1500) if size == "paper" else (10, 100)
    return Defaults(min(cohort, clients), batch_size, rates[size], rounds)
