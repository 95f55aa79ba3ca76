"""How a metric is spread over clients: numbers about many numbers, one of each client."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.handles import handles
from fedgrad.core.errors import ArgumentError

# In a history: `eval.test.per_client.loss.mean`.
PREFIX, KINDS = "per_client", ("mean", "lowest_tenth", "highest_tenth", "percentiles")
# Each stands for one in so many clients, so a histogram of them is in percent.
PERCENTILES = 100


def names(metrics: Mapping[str, Any]) -> list[str]:
    """What `spread` gives for metrics of these names."""
    return [f"{PREFIX}.{metric}.{kind}" for metric in metrics for kind in KINDS]


def is_for_a_histogram(name: str) -> bool:
    """Whether a metric is a hundred numbers that nobody reads one by one."""
    return f".{PREFIX}." in f".{name}" and name.endswith(f".{KINDS[-1]}")


def require_here(each: Any) -> None:
    """Refuse what is not to be seen: the numbers of clients that are on nodes."""
    if handles(each):
        raise ArgumentError.here(
            "fg.Evaluation(per_client=True): these clients are on nodes, and only sums leave them. "
            "Leave per_client out, or evaluate clients that are here."
        )


def spread(each: Mapping[str, tuple[Any, Any]], sharding: Any = None) -> dict[str, Any]:
    """Of each metric its mean over clients (where each counts alike), the means of the tenth with
    the lowest and of the tenth with the highest values, and the values of a hundred clients from
    the lowest to the highest, each of which stands for one percent of all.

    `each`: the two sums of a client whose quotient the metric is, clients along the first axis and
    trials along a second one. Who has nothing to divide by is left out.
    """
    return _compiled(sharding)(dict(each))


def quotients(each: Mapping[str, tuple[Any, Any]]) -> dict[str, np.ndarray]:
    """The metrics of each client; NaN where it has nothing to divide by."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            name: np.where(np.asarray(bottom) != 0, np.asarray(top) / np.asarray(bottom), np.nan)
            for name, (top, bottom) in each.items()
        }


@functools.cache
def _compiled(sharding: Any) -> Any:
    # Where the data are on several devices, all of them get the numbers.
    place = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(_spread, **place)


def _spread(each: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (top, bottom) in each.items():
        values = jnp.where(bottom != 0, top / jnp.where(bottom != 0, bottom, 1), jnp.nan)
        there = jnp.sum(bottom != 0, axis=0)
        # What is not a number comes last, and so does who is not there.
        ordered = jnp.sort(values, axis=0)
        one = _described if values.ndim == 1 else jax.vmap(_described, in_axes=(1, 0))
        numbers = zip(KINDS, one(ordered, there), strict=True)
        found |= {f"{PREFIX}.{name}.{kind}": value for kind, value in numbers}
    return found


def _described(ordered: jax.Array, there: jax.Array) -> tuple[jax.Array, ...]:
    place = jnp.arange(len(ordered))
    tenth = (there + 9) // 10

    def mean(begin: Any, end: Any) -> jax.Array:
        within = (place >= begin) & (place < end)
        return jnp.sum(jnp.where(within, ordered, 0)) / (end - begin).astype(ordered.dtype)

    middle = jnp.arange(PERCENTILES) * 2 + 1  # of each percent, in two hundredths
    chosen = ordered[middle * there // (2 * PERCENTILES)]
    return mean(0, there), mean(0, tenth), mean(there - tenth, there), chosen
