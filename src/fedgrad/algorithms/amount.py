"""The amount of a client's work in a round: a number, or a function of the round number."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms.hyper import LOOKED_AT, schedules, with_schedules
from fedgrad.core.errors import ArgumentError
from fedgrad.core.types import Hyper

Amount = int | Callable[[Any], Any]


def how_much(name: str, amount: Amount, hyper: Hyper) -> Any:
    """Return the amount in this round: a schedule's value is rounded, and at least 1."""
    if not callable(amount):
        return amount
    return jnp.maximum(jnp.round(hyper[name]), 1).astype(jnp.int32)


def most(name: str, schedule: Any) -> int:
    """Return the maximum of a schedule over as many rounds as can be checked quickly."""
    checked = schedules(with_schedules({name: schedule})).get(name)
    values = schedule if checked is None else checked.values(LOOKED_AT)
    return max(1, int(np.round(np.max(values))))


def require_bounded(name: str, found: Any, bound: int) -> None:
    """Refuse an amount beyond the bound that the loops were made for."""
    if not isinstance(found, jax.core.Tracer) and most(name, found) > bound:
        raise ArgumentError.here(
            f"{name!r} asks for {most(name, found)}, but what clients do was made for a schedule "
            f"of at most {bound}. Give the longer one when the algorithm is made: "
            f"client=fg.local_training(..., {name}=schedule)."
        )
