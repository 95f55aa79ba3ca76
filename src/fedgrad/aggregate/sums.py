"""The arithmetic of sums over clients, for every executor.

Nothing is accumulated in a dtype narrower than float32, and sums of many parts compensate for
rounding errors. How partial sums travel between devices or nodes is up to the executor.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.primitives import wide

Array = jax.Array
Sum = tuple[Array, Array]  # the sum so far, and the rounding error lost from it

FEW = 64  # number of parts whose rounding errors are harmless


def in_order(parts: Sequence[Any]) -> Any:
    """Sum what clients sent, one after another, so that the same answers give the same digits."""
    dtype = parts[0].dtype
    total = parts[0].astype(wide(dtype))  # a copy, so that NumPy can add in place
    with np.errstate(over="ignore", invalid="ignore"):  # as on the device
        for part in parts[1:]:
            total += part.astype(wide(dtype))
        return total.astype(dtype)


def stacked(x: Array, counts: Array | None = None) -> Array:
    """Sum over the first axis, in groups, so that the rounding error grows with log n instead of n.
    `counts` selects the rows that are summed."""
    if counts is not None:
        x = jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))
    x = x.astype(wide(x.dtype))
    while x.shape[0] > FEW:
        full = x.shape[0] // 16 * 16
        grouped = x[:full].reshape(full // 16, 16, *x.shape[1:]).sum(1, dtype=x.dtype)
        x = jnp.concatenate([grouped, x[full:]]) if full < x.shape[0] else grouped
    return x.sum(0, dtype=x.dtype)


def zero(aval: Any) -> Sum:
    """Return an empty sum."""
    nothing = jnp.zeros(aval.shape, wide(aval.dtype))
    return nothing, nothing


def add(so_far: Sum, x: Array, parts: int) -> Sum:
    """Add one of `parts` parts. Rounding errors of a few parts are harmless; those of many are
    compensated."""
    total, lost = so_far
    new = total + x
    if parts <= FEW or not jnp.issubdtype(x.dtype, jnp.inexact):
        return new, lost
    shown = new - total
    return new, lost + ((total - (new - shown)) + (x - shown))


def finish(so_far: Sum) -> Array:
    """Return the sum with its compensation. Where the sum is infinite, the compensation is NaN (inf
    - inf) and is not applied."""
    total, lost = so_far
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total
    return total + jnp.nan_to_num(lost, nan=0.0, posinf=0.0, neginf=0.0)
