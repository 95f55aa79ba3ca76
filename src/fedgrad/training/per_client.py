"""The distribution of a metric over clients."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.handles import handles
from fedgrad.core.errors import ArgumentError

# Names in a history, such as `eval.test.per_client.loss.mean`.
PREFIX, KINDS = "per_client", ("mean", "lowest_tenth", "highest_tenth", "percentiles")
# Each value stands for this fraction of the clients, so a histogram of them is in percent.
PERCENTILES = 100


def names(metrics: Mapping[str, Any]) -> list[str]:
    """Return the names of what `spread` computes for these metrics."""
    return [f"{PREFIX}.{metric}.{kind}" for metric in metrics for kind in KINDS]


def is_for_a_histogram(name: str) -> bool:
    """Return whether a metric holds percentiles, which are only shown as a histogram."""
    return f".{PREFIX}." in f".{name}" and name.endswith(f".{KINDS[-1]}")


def require_here(each: Any) -> None:
    """Refuse per-client numbers of clients on nodes, which must not leave them."""
    if handles(each):
        raise ArgumentError.here(
            "fg.Evaluation(per_client=True): these clients are on nodes, and only sums leave them. "
            "Leave per_client out, or evaluate clients that are here."
        )


def spread(each: Mapping[str, tuple[Any, Any]], sharding: Any = None) -> dict[str, Any]:
    """Describe the distribution of each metric over clients.

    Computes the mean (in which every client counts equally), the means of the tenths of clients
    with the lowest and with the highest values, and the values of a hundred clients in ascending
    order, each of which stands for one percent of all.

    Args:
        each: For each metric, the two sums whose quotient it is: clients along the first axis,
            trials along a second one. Clients whose denominator is 0 are left out.
        sharding: The sharding of the results, if the data are on several devices.
    """
    return _compiled(sharding)(dict(each))


def quotients(each: Mapping[str, tuple[Any, Any]]) -> dict[str, np.ndarray]:
    """Return the metrics of each client; NaN if the denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            name: np.where(np.asarray(bottom) != 0, np.asarray(top) / np.asarray(bottom), np.nan)
            for name, (top, bottom) in each.items()
        }


@functools.cache
def _compiled(sharding: Any) -> Any:
    # If the data are on several devices, the results are replicated to all of them.
    place = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(_spread, **place)


def _spread(each: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (top, bottom) in each.items():
        values = jnp.where(bottom != 0, top / jnp.where(bottom != 0, bottom, 1), jnp.nan)
        there = jnp.sum(bottom != 0, axis=0)
        # NaN sorts last, including that of clients without data.
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

    middle = jnp.arange(PERCENTILES) * 2 + 1  # the midpoint of each percent, in units of 1/200
    chosen = ordered[middle * there // (2 * PERCENTILES)]
    return mean(0, there), mean(0, tenth), mean(there - tenth, there), chosen
