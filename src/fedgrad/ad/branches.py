"""A cond that is pulled back through.

JAX's own way back hands over what the branches remember in slots that they share, in which one
branch's value of a client can meet the other's of the server. Here a branch has slots of its own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.ad.rules import is_float

Branch = Callable[[list[Any]], list[Any]]


def pulled_cond(
    index: Any, operands: list[Any], branches: Sequence[Branch], remember: bool
) -> list[Any]:
    """`branches[index](operands)`. `remember`: what the way back needs is kept; if not, the way
    back runs the branch again, and so asks again whom the branch asks."""
    halves = [partial(_halves, branch) for branch in branches]

    @jax.custom_vjp
    def cond(index: Any, operands: list[Any]) -> list[Any]:
        return list(jax.lax.switch(index, branches, operands))

    def again(index: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        return list(jax.lax.switch(index, branches, operands)), operands

    def back_again(half: Any, operands: list[Any], cotangents: list[Any]) -> list[Any]:
        return list(half(operands)[1](cotangents)[0])

    # How each branch pulls back: what it remembers, and constants, which everybody has.
    pulls: list[tuple[Any, list[Any]]] = []

    def remembered(half: Any, operands: list[Any]) -> list[Any]:
        leaves, structure = jax.tree.flatten(half(operands)[1])
        pulls.append((structure, [None if _traced(x) else x for x in leaves]))
        return [x for x in leaves if _traced(x)]

    slots = [jax.eval_shape(partial(remembered, h), operands) for h in halves] if remember else []

    def keeping(index: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        def run(k: int, operands: list[Any]) -> tuple[list[Any], Any]:
            outputs, pull = halves[k](operands)
            kept = [[jnp.zeros(s.shape, s.dtype) for s in own] for own in slots]
            kept[k] = [x for x in jax.tree.leaves(pull) if _traced(x)]
            return outputs, kept

        runs = [partial(run, k) for k in range(len(halves))]
        return jax.lax.switch(index, runs, operands)

    def back_kept(k: int, kept: Any, cotangents: list[Any]) -> list[Any]:
        (structure, constants), rest = pulls[k], iter(kept[k])
        leaves = [next(rest) if x is None else x for x in constants]
        return list(jax.tree.unflatten(structure, leaves)(cotangents)[0])

    def forward(index: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        outputs, kept = (keeping if remember else again)(index, operands)
        return outputs, (index, kept)

    def backward(saved: Any, cotangents: list[Any]) -> Any:
        index, kept = saved
        slopes = [ct for ct in cotangents if ct.dtype != jax.dtypes.float0]
        if remember:
            ways = [partial(back_kept, k) for k in range(len(halves))]
        else:
            ways = [partial(back_again, half) for half in halves]
        pulled = iter(jax.lax.switch(index, ways, kept, slopes))
        return _zero(index), [next(pulled) if is_float(x) else _zero(x) for x in operands]

    cond.defvjp(forward, backward)
    return cond(index, operands)


def _halves(branch: Branch, operands: list[Any]) -> tuple[list[Any], Any]:
    """The outputs of a branch, and how cotangents of the floating ones are pulled back to the
    floating operands."""

    def run(xs: list[Any]) -> tuple[list[Any], list[Any]]:
        rest = iter(xs)
        outputs = branch([next(rest) if is_float(x) else x for x in operands])
        return [y for y in outputs if is_float(y)], outputs

    _, pull, outputs = jax.vjp(run, [x for x in operands if is_float(x)], has_aux=True)
    return outputs, pull


def _traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _zero(x: Any) -> Any:
    return np.zeros(jnp.shape(x), jax.dtypes.float0)
