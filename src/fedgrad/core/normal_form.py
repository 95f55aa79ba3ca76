"""Rewrites a traced program to the form that everything else expects.

Clients that do not count are cut off from derivatives (uncounted.py). A while_loop under `vmap` may
have one predicate per row: it becomes a loop that continues while any row does, and leaves finished
rows unchanged.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.control import While, control
from fedgrad.core.primitives import (
    CALLS,
    CUSTOM_DERIVATIVES,
    ClosedJaxpr,
    JaxprEqn,
    at_source,
    bind,
    closed,
    communicates,
    counted_p,
    interpret,
    jax_primitives,
    make_jaxpr,
)
from fedgrad.core.uncounted import Key, Line, marked, masks, upstream

# Primitives that may need to be rewritten.
MENDED = {counted_p, jax_primitives.while_p}


def in_normal_form(jaxpr: ClosedJaxpr, placements: Sequence[str], *args: Any) -> ClosedJaxpr:
    """Return the same function in normal form."""
    if not any(map(_is_odd, jaxpr.jaxpr.eqns)):
        return jaxpr
    return make_jaxpr(lambda *flat: _run(jaxpr, flat), placements, *args)[0]


def _is_odd(eqn: JaxprEqn) -> bool:
    """Whether this equation must be rewritten."""
    if eqn.primitive is counted_p:
        return not eqn.params["seen"]
    if not communicates(eqn.params):
        return False  # only means, and loops around communication, matter
    return _by_rows(eqn) or any(_is_odd(e) for body in _bodies(eqn) for e in body.jaxpr.eqns)


def _by_rows(eqn: JaxprEqn) -> bool:
    loop = control(eqn.primitive, eqn.params)
    return isinstance(loop, While) and bool(loop.bodies[0].out_avals[0].shape)


def _bodies(eqn: JaxprEqn) -> Sequence[ClosedJaxpr]:
    loop = control(eqn.primitive, eqn.params)
    if loop is not None:
        return loop.bodies
    # Functions with a custom derivative are left unchanged.
    inner = eqn.primitive in CALLS and eqn.primitive not in CUSTOM_DERIVATIVES
    return (closed(eqn.params[CALLS[eqn.primitive]]),) if inner else ()


def _run(jaxpr: ClosedJaxpr, inputs: Sequence[Any], inner: bool = False) -> list[Any]:
    """Evaluate a jaxpr in normal form. `inner`: it is the body of a loop or the like."""
    keys = [Key(v.aval) for v in jaxpr.jaxpr.invars]
    lines: list[Line] = []
    outputs = _lines(jaxpr, keys, lines)
    who = masks(lines, keys, outputs if inner else [])
    env: dict[Key, Any] = dict(zip(keys, inputs, strict=True))
    touched: set[Key] = set()  # values that a mark has replaced

    def value(x: Any) -> Any:
        return env[x] if isinstance(x, Key) else x

    def compute(line: Line) -> None:
        with at_source(line.eqn.source_info):
            results = _mended(line.eqn, [value(x) for x in line.inputs])
        env.update(zip(line.outputs, results, strict=True))

    # Who counts is computed first; it is integers and comparisons, so no derivative is lost.
    first = upstream(lines, [c for counts in who.values() for c in counts])
    for line in first:
        compute(line)
    done = set(first)
    counts = {key: [env[c] for c in wanted] for key, wanted in who.items()}

    def mark(candidates: Sequence[Key]) -> None:
        for key in candidates:
            if key in counts:
                env[key] = marked(env[key], counts[key])
                touched.add(key)

    mark(keys)
    for line in lines:
        changed = any(isinstance(x, Key) and x in touched for x in line.inputs)
        if changed or line not in done:
            compute(line)
            touched.update(line.outputs if changed else ())
        mark(line.outputs)
    return [value(x) for x in outputs]


def _lines(jaxpr: ClosedJaxpr, inputs: Sequence[Any], lines: list[Line]) -> list[Any]:
    """Record the equations of a jaxpr and return its outputs. A call with a mean inside is inlined,
    so that the mean and its inputs are seen together (a checkpoint has to stay whole)."""

    def step(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        call = eqn.primitive in CALLS and eqn.primitive is not jax_primitives.remat_p
        if call and _is_odd(eqn):
            return _lines(_bodies(eqn)[0], values, lines)
        outputs = [Key(v.aval) for v in eqn.outvars]
        lines.append(Line(eqn, values, outputs))
        return outputs

    return interpret(jaxpr, inputs, step)


def _mended(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    if not _is_odd(eqn):
        return bind(eqn.primitive, eqn.params, values)
    if eqn.primitive is counted_p:
        return [counted_p.bind(*values, seen=True)]
    bodies = [lambda xs, b=body: _run(b, xs, inner=True) for body in _bodies(eqn)]
    loop = control(eqn.primitive, eqn.params)
    if loop is None:
        again = jax.checkpoint(
            lambda *xs: bodies[0](list(xs)),
            policy=eqn.params["policy"],
            prevent_cse=eqn.params["prevent_cse"],
        )
        return list(again(*values))
    if isinstance(loop, While) and _by_rows(eqn):
        return _while_any(loop, values, bodies)
    return loop.rebuilt(values, bodies)


def _while_any(loop: While, inputs: Sequence[Any], bodies: Sequence[Any]) -> list[Any]:
    """Run a while loop while any row continues. The predicate is carried along: it may communicate,
    and so is evaluated only once per iteration."""
    of_cond, of_body, start = loop.split(inputs)
    cond, body = bodies

    def goes_on(carry: list[Any]) -> Any:
        return cond([*of_cond, *carry])[0]

    def step(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        rows, carry = state
        new = body([*of_body, *carry])
        after = [_select(rows, a, b) for a, b in zip(new, carry, strict=True)]
        return goes_on(after), after

    _, carry = jax.lax.while_loop(lambda state: jnp.any(state[0]), step, (goes_on(start), start))
    return list(carry)


def _select(rows: Any, new: Any, old: Any) -> Any:
    """Select `new` in these rows, `old` in the others. JAX gives every carry of such a loop all
    rows."""
    return jax.lax.select(jax.lax.broadcast_in_dim(rows, new.shape, range(rows.ndim)), new, old)
