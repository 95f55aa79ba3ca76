"""Derivatives carried forward: values that know how they depend on what came before.

    S_{t+1} = (d state_{t+1} / d state_t) S_t + d state_{t+1} / dh

is the derivative with respect to h of a round that starts from a state which depends on h by S_t.
So this is no new kind of derivative, only such a state; and, for an approximation that sends
nothing more, a round whose clients receive a state that does not depend on h.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.evaluate import run_apart
from fedgrad.core.primitives import promoting
from fedgrad.core.trace import one_view


def carried(values: Sequence[jax.Array], slopes: Sequence[Sequence[Any]], at: Sequence[Any]) -> Any:
    """Return the values unchanged, with the derivative `slopes` with respect to `at`.

    `slopes[i][j]`, of shape values[i] + at[j], is the derivative of values[i] with respect to
    at[j].
    """
    return list(_carried(list(values), [list(row) for row in slopes], list(at)))


@jax.custom_jvp
def _carried(values: list[Any], slopes: list[list[Any]], at: list[Any]) -> list[Any]:
    return values


def _rule(primals: Any, tangents: Any) -> Any:
    values, slopes, _ = primals
    own, _, moves = tangents

    def moved(value: Any, mine: Any, row: list[Any]) -> Any:
        total = jnp.zeros_like(value) if _is_zero(mine) else mine
        for slope, move in zip(row, moves, strict=True):
            if not _is_zero(move):
                with promoting():
                    term = jnp.tensordot(slope, move, axes=move.ndim)
                total = total + term.astype(value.dtype)
        return total

    return values, [moved(*one) for one in zip(values, own, slopes, strict=True)]


_carried.defjvp(_rule, symbolic_zeros=True)


def apart(fun: Callable[[Any], Any], told: Any, kept: Any, placements: Sequence[str]) -> Any:
    """Return `fun(kept)`, but with the sums of clients that were sent the values of `fun(told)`.

    `told` and `kept` are pytrees of the same structure: the server continues with `kept`, and
    clients are sent `told`. `fun` is a part of a program that has these placements. apart(fun, x,
    x) is fun(x).
    """
    first, tree = jax.tree.flatten(told)
    jaxpr, result = one_view(lambda *xs: fun(jax.tree.unflatten(tree, xs)), placements, *first)
    pairs = list(zip(first, jax.tree.leaves(kept), strict=True))
    outputs = [second for _, second in run_apart(jaxpr, pairs)]
    return jax.tree.unflatten(result, outputs)


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)
