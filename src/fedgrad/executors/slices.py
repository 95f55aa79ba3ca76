"""Reading batches of several clients from one store.

Under vmap, a slice that starts elsewhere for each client becomes a gather, which takes XLA on a CPU
about four times as long as slicing client by client. With few clients at a time, do the latter.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.graph import Equation
from fedgrad.core.primitives import JaxprEqn

MOST = 16  # clients at a time; above that the slices are too many operations


def one_by_one(eqn: Equation | JaxprEqn, inputs: Sequence[Any]) -> list[Any] | None:
    """The rule for `dynamic_slice`."""
    sizes = eqn.params["slice_sizes"]

    @jax.custom_batching.custom_vmap
    def cut(operand: jax.Array, *starts: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(operand, starts, sizes)

    @cut.def_vmap
    def _(n: int, batched: Sequence[bool], operand: jax.Array, *starts: jax.Array) -> Any:
        if batched[0] or n > MOST:
            axes = [0 if b else None for b in batched]
            plain = jax.vmap(lambda x, *at: jax.lax.dynamic_slice(x, at, sizes), in_axes=axes)
            return plain(operand, *starts), True
        rows = [
            jax.lax.dynamic_slice(
                operand, [s[i] if b else s for s, b in zip(starts, batched[1:], strict=True)], sizes
            )
            for i in range(n)
        ]
        return jnp.stack(rows), True

    return [cut(*inputs)]
