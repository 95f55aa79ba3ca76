"""Rules for clients of different sizes that run together: loops that end when their client is done,
and reading the batches of several clients from one store.

`fg.Examples.fold` is traced as a scan of static length whose steps beyond the client's own number
do nothing, because this form can be differentiated in every mode. Run directly, every client would
take as long as the largest one. So a scan that only carries values (and that is not differentiated
in reverse) runs as a loop with a dynamic trip count instead.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.control import cond_of, scan_of
from fedgrad.core.evaluate import Rule, Rules, run
from fedgrad.core.graph import Equation
from fedgrad.core.primitives import JaxprEqn, Literal, inner_jaxprs, jax_primitives


def early_exit(inside: Rules) -> Rule:
    """Return the rule for scans; `inside` are the rules for the equations in their bodies."""

    def rule(eqn: Equation | JaxprEqn, inputs: Sequence[Any]) -> list[Any] | None:
        form = _masked(eqn.params)
        if form is None:
            return None
        counter, times, cond = form
        scan = scan_of(eqn.params)
        outer, step = scan.bodies[0].jaxpr, cond_of(cond.params).bodies[1]
        consts, carry, _ = scan.split(inputs)
        end = carry[counter] + scan.length
        last = jnp.minimum(consts[times], end)

        def body(carry: list[Any]) -> list[Any]:
            env = dict(zip(outer.invars, [*consts, *carry], strict=True))
            operands = [v.val if isinstance(v, Literal) else env[v] for v in cond.invars[1:]]
            env.update(zip(cond.outvars, run(step, operands, inside), strict=True))
            after = [env.get(v) for v in outer.outvars]
            after[counter] = carry[counter] + 1
            return after

        done = jax.lax.while_loop(lambda carry: carry[counter] < last, body, carry)
        done[counter] = end  # as the scan would have left it
        return done

    return rule


def ends_early(equations: Iterable[Equation | JaxprEqn]) -> bool:
    """Whether the rule applies to any loop, including nested ones."""
    return any(
        (e.primitive is jax_primitives.scan_p and _masked(e.params) is not None)
        or any(ends_early(jaxpr.eqns) for jaxpr in inner_jaxprs(e.params))
        for e in equations
    )


def _masked(params: dict[str, Any]) -> tuple[int, int, JaxprEqn] | None:
    """Return (position of the counter, position of the number of steps, the cond) if a scan's body
    is exactly `carry = cond(i < times, step, identity)(carry); i = i + 1`, else None."""
    scan = scan_of(params)
    jaxpr = scan.bodies[0].jaxpr
    if scan.reverse or scan.bodies[0].consts:
        return None
    consts, before, rows = scan.split(jaxpr.invars)
    after, written = scan.split_outputs(jaxpr.outvars)
    if rows or written:
        return None  # it reads or writes one row per step
    names = sorted(eqn.primitive.name for eqn in jaxpr.eqns)
    if names != ["add", "cond", "convert_element_type", "lt"]:
        return None
    add, cond, cast, less = sorted(jaxpr.eqns, key=lambda eqn: eqn.primitive.name)
    i, times = less.invars
    if i not in before or times not in consts:
        return None
    counter = before.index(i)
    counts = (
        add.invars[0] is i
        and isinstance(add.invars[1], Literal)
        and add.invars[1].val == 1
        and after[counter] is add.outvars[0]
    )
    decides = cast.invars[0] is less.outvars[0] and cond.invars[0] is cast.outvars[0]
    if not (counts and decides and _idles(cond, before, after, counter)):
        return None
    return counter, consts.index(times), cond


def _idles(cond: JaxprEqn, before: list[Any], after: list[Any], counter: int) -> bool:
    """Whether the cond's false branch returns the carry, and nothing else changes it."""
    branches = cond_of(cond.params).bodies
    idle = branches[0].jaxpr
    if len(branches) != 2 or idle.eqns:
        return False
    operands = dict(zip(idle.invars, cond.invars[1:], strict=True))
    outputs = dict(zip(cond.outvars, idle.outvars, strict=True))
    for position, (old, new) in enumerate(zip(before, after, strict=True)):
        if position == counter or old is new:
            continue
        if isinstance(new, Literal) or new not in outputs:
            return False
        given = outputs[new]
        if isinstance(given, Literal) or operands[given] is not old:
            return False
    return True


# Under vmap, slices with a different start per client become a gather, which on CPU takes XLA about
# four times as long as slicing client by client. With few clients, do the latter.
MOST = 16  # clients at a time; with more, there would be too many slice operations


def one_by_one(eqn: Equation | JaxprEqn, inputs: Sequence[Any]) -> list[Any] | None:
    """Apply the rule for `dynamic_slice`."""
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
