"""Reverse-mode differentiation of a cond.

JAX stores the residuals of all branches in shared slots, in which a client value of one branch can
meet a server value of another. Here every branch has slots of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.ad.rules import is_float
from fedgrad.core.evaluate import run
from fedgrad.core.primitives import ClosedJaxpr, broadcast_p, part, primitives_of, sum_p

Branch = Callable[[list[Any]], list[Any]]


def pulled_cond(
    index: Any,
    operands: list[Any],
    branches: Sequence[Branch],
    values: Sequence[Branch],
    constant: Sequence[bool],
    remember: bool,
) -> list[Any]:
    """Return `branches[index](operands)`, with a reverse-mode derivative.

    Args:
        index: The branch to run.
        operands: Its inputs.
        branches: The branches, in a form that is differentiated.
        values: The same branches, in a form that is not differentiated.
        constant: For each operand, whether it is a constant that everybody has.
        remember: Whether the residuals are kept. If not, the backward pass runs the branch again,
            and so addresses the same clients again.
    """
    captured = _captured(values, operands)
    if captured:  # a custom_vjp in a scan must not: JAX would put them into the scan as constants
        branches, values = (
            [_explicit(b, operands, captured) for b in x] for x in (branches, values)
        )
        operands, constant = [*operands, *captured], [*constant, *[False] * len(captured)]
    halves = [partial(_halves, branch) for branch in branches]

    @jax.custom_vjp
    def cond(index: Any, operands: list[Any]) -> list[Any]:
        return list(jax.lax.switch(index, values, operands))

    def again(index: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        return list(jax.lax.switch(index, values, operands)), operands

    def back_again(half: Any, operands: list[Any], cotangents: list[Any]) -> list[Any]:
        return list(half(operands)[1](cotangents)[0])

    ways = [_way_back(half, operands, constant) for half in halves] if remember else []

    def keeping(index: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        def forth(k: int, operands: list[Any]) -> tuple[list[Any], Any]:
            outputs, pull = halves[k](operands)
            kept = [[jnp.zeros(s.shape, s.dtype) for s in way.slots] for way in ways]
            kept[k] = ways[k].kept(pull)
            return outputs, kept

        runs = [partial(forth, k) for k in range(len(halves))]
        outputs, kept = jax.lax.switch(index, runs, operands)
        return outputs, (kept, list(compress(operands, constant)))

    def back_kept(k: int, saved: Any, cotangents: list[Any]) -> list[Any]:
        kept, constants = saved
        return list(ways[k].pull(kept[k], constants)(cotangents)[0])

    def forward(index: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        outputs, kept = (keeping if remember else again)(index, operands)
        return outputs, (index, kept)

    def backward(saved: Any, cotangents: list[Any]) -> Any:
        index, kept = saved
        slopes = [ct for ct in cotangents if ct.dtype != jax.dtypes.float0]
        if remember:
            backs = [partial(back_kept, k) for k in range(len(halves))]
        else:
            backs = [partial(back_again, half) for half in halves]
        pulled = iter(_switch(index, backs, kept, slopes))
        return _zero(index), [next(pulled) if is_float(x) else _zero(x) for x in operands]

    cond.defvjp(forward, backward)
    return cond(index, operands)


def _captured(branches: Sequence[Branch], operands: list[Any]) -> list[Any]:
    """Return the traced values that branches capture from an outer program, besides their
    operands."""
    jaxprs = [jax.make_jaxpr(branch)(operands) for branch in branches]
    return list({id(c): c for jaxpr in jaxprs for c in jaxpr.consts if _traced(c)}.values())


def _explicit(branch: Branch, operands: list[Any], captured: list[Any]) -> Branch:
    """Return the branch as a function of its operands followed by its captured values."""
    jaxpr = jax.make_jaxpr(branch)(operands)

    def explicit(xs: list[Any]) -> list[Any]:
        own, given = xs[: len(operands)], xs[len(operands) :]
        by_id = {id(c): x for c, x in zip(captured, given, strict=True)}
        consts = [by_id.get(id(c), c) for c in jaxpr.consts]
        return run(ClosedJaxpr(jaxpr.jaxpr, consts), own, {})

    return explicit


def _halves(branch: Branch, operands: list[Any]) -> tuple[list[Any], Any]:
    """Return the outputs of a branch, and a function that pulls cotangents of its floating outputs
    back to its floating operands."""

    def run(xs: list[Any]) -> tuple[list[Any], list[Any]]:
        rest = iter(xs)
        outputs = branch([next(rest) if is_float(x) else x for x in operands])
        return [y for y in outputs if is_float(y)], outputs

    _, pull, outputs = jax.vjp(run, [x for x in operands if is_float(x)], has_aux=True)
    return outputs, pull


def _switch(index: Any, backs: Sequence[Any], kept: Any, slopes: list[Any]) -> list[Any]:
    """Return `backs[index](kept, slopes)`, which is linear in the slopes. An output that is zero in
    all branches is left out of the cond, which would otherwise place the zero at the server."""
    inputs = [*jax.tree.leaves(kept), *slopes]
    jaxprs = [jax.make_jaxpr(back)(kept, slopes) for back in backs]
    avals = jaxprs[0].out_avals

    def moves(i: int) -> bool:
        only = [j == i for j in range(len(avals))]
        return any(any(part(jaxpr, only)[1][len(inputs) - len(slopes) :]) for jaxpr in jaxprs)

    moved = [moves(i) for i in range(len(avals))]
    parts = [part(jaxpr, moved) for jaxpr in jaxprs]
    ways = [lambda xs, p=p: run(p[0], list(compress(xs, p[1])), {}) for p in parts]
    pulled = iter(jax.lax.switch(index, ways, inputs))
    zeros = [jnp.zeros(a.shape, a.dtype) for a in avals]
    return [next(pulled) if m else zero for m, zero in zip(moved, zeros, strict=True)]


@dataclass(frozen=True, eq=False)
class _WayBack:
    """The backward pass of a branch, from the values it keeps and the constants that everybody has.
    Constants are recomputed on the way back: one that a client received as an output of the cond
    would tell it which branch the server took."""

    tree: Any  # the structure of the pull function
    known: list[Any]  # its leaves: known arrays, and None for those that are computed
    made: list[bool]  # for each computed one: whether it is computed from constants alone
    constants: ClosedJaxpr  # computes those
    needs: list[bool]  # which constant operands it needs
    slots: list[Any]  # shapes of the other computed ones, which are kept

    def kept(self, pull: Any) -> list[Any]:
        computed = [x for x, a in zip(jax.tree.leaves(pull), self.known, strict=True) if a is None]
        return list(compress(computed, [not made for made in self.made]))

    def pull(self, kept: list[Any], constants: list[Any]) -> Any:
        again = iter(run(self.constants, list(compress(constants, self.needs)), {}))
        rest = iter(kept)
        computed = iter([next(again if made else rest) for made in self.made])
        leaves = [next(computed) if x is None else x for x in self.known]
        return jax.tree.unflatten(self.tree, leaves)


def _way_back(half: Any, operands: list[Any], constant: Sequence[bool]) -> _WayBack:
    known: list[Any] = []
    trees: list[Any] = []

    def computed(operands: list[Any]) -> list[Any]:
        leaves, tree = jax.tree.flatten(half(operands)[1])
        trees.append(tree)
        known[:] = [None if _traced(x) else x for x in leaves]
        return [x for x in leaves if _traced(x)]

    jaxpr = jax.make_jaxpr(computed)(operands)
    avals = jaxpr.out_avals

    def is_made(i: int) -> bool:
        """Whether output `i` is computed from constants alone, without communication."""
        this, used = part(jaxpr, [j == i for j in range(len(avals))])
        everywhere = all(c for c, u in zip(constant, used, strict=True) if u)
        silent = primitives_of(this.jaxpr.eqns).isdisjoint((broadcast_p, sum_p))
        return everywhere and silent and not any(map(_traced, this.consts))

    made = [is_made(i) for i in range(len(avals))]
    constants, used = part(jaxpr, made)
    slots = list(compress(avals, [not m for m in made]))
    return _WayBack(trees[0], known, made, constants, list(compress(used, constant)), slots)


def _traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _zero(x: Any) -> Any:
    return np.zeros(jnp.shape(x), jax.dtypes.float0)
