"""The amount of a client's work in a round: a number, or a function of the round number."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms.hyper import LOOKED_AT, Scaled, Schedule, with_schedules
from fedgrad.core.errors import ArgumentError
from fedgrad.core.types import Hyper

Amount = int | Callable[[Any], Any]


def how_much(name: str, amount: Amount, hyper: Hyper) -> Any:
    """Return the amount in this round: a schedule's value is rounded, and at least 1."""
    if not callable(amount):
        return amount
    return jnp.maximum(jnp.round(hyper[name]), 1).astype(jnp.int32)


def most(name: str, amount: Any) -> int:
    """Return the maximum of a number, a schedule or a factor times one, over as many rounds as can
    be checked quickly."""
    found = with_schedules({name: amount})[name]
    factor, found = (found.factor, found.schedule) if isinstance(found, Scaled) else (1, found)
    values = found.values(LOOKED_AT) if isinstance(found, Schedule) else found
    largest = np.max(np.multiply.outer(np.asarray(factor), np.asarray(values)))
    if not np.isfinite(largest):
        raise ArgumentError.here(
            f"{name!r} asks for {largest}. Give a finite number for each round."
        )
    return max(1, int(np.round(largest)))


def require_bounded(name: str, found: Any, bound: int) -> None:
    """Refuse an amount beyond the bound that the loops were made for. One that is only known when a
    round runs makes that round's model and loss NaN (`Examples.fold`)."""
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(found))
    if not traced and most(name, found) > bound:
        raise ArgumentError.here(
            f"{name!r} asks for {most(name, found)}, but what clients do was made for a schedule "
            f"of at most {bound}. Give the longer one when the algorithm is made: "
            f"client=fg.local_training(..., {name}=schedule)."
        )
