"""A traced program in the form that everything else expects.

Two things are mended right after tracing, so that nobody has to think of them later:

A client that does not count (`fg.mean` with weight 0) has no part in a derivative. Its value is
left out of the mean, but on the way back a cotangent of zero would meet whatever its computation
made of bad data, and zero times infinity is not zero. So what it computed its value from is cut
off, too: the value is computed from sources through which no derivative passes where the client
does not count. The value itself stays what it is.

A while_loop under `vmap` may have a predicate for each row. It becomes one that goes on while any
row does, and keeps the rows that are done as they are.
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
    broadcast_p,
    closed,
    communicates,
    counted_p,
    has_effects,
    interpret,
    make_jaxpr,
)


def traced(fun: Any, placements: Sequence[str], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """Trace one client's view of a function of flat values. Gives the tree of its result, too."""
    jaxpr, shape = make_jaxpr(fun, placements, *args)
    if any(map(_is_odd, jaxpr.jaxpr.eqns)):
        jaxpr, _ = make_jaxpr(lambda *flat: _run(jaxpr, flat), placements, *args)
    return jaxpr, shape


def _is_odd(eqn: JaxprEqn) -> bool:
    """Is there something to mend in this equation?"""
    if eqn.primitive is counted_p:
        return bool(eqn.params["role"] == "mean")
    if not communicates(eqn.params):
        return False  # only means and loops around communication are of interest
    loop = control(eqn.primitive, eqn.params)
    if isinstance(loop, While) and loop.bodies[0].out_avals[0].shape:
        return True
    return any(_is_odd(inner) for body in _bodies(eqn) for inner in body.jaxpr.eqns)


def _bodies(eqn: JaxprEqn) -> Sequence[ClosedJaxpr]:
    loop = control(eqn.primitive, eqn.params)
    if loop is not None:
        return loop.bodies
    # What has a derivative of its own is left as it is.
    inner = eqn.primitive in CALLS and eqn.primitive not in CUSTOM_DERIVATIVES
    return (closed(eqn.params[CALLS[eqn.primitive]]),) if inner else ()


def _run(jaxpr: ClosedJaxpr, inputs: Sequence[Any], tape: "_Tape | None" = None) -> list[Any]:
    """Evaluate a jaxpr, mended. What it does is noted on the tape."""
    tape = _Tape() if tape is None else tape
    return interpret(jaxpr, inputs, lambda eqn, values: _mended(eqn, values, tape))


def _mended(eqn: JaxprEqn, values: list[Any], tape: "_Tape") -> list[Any]:
    if not _is_odd(eqn):
        return tape.done(eqn, values, bind(eqn.primitive, eqn.params, values))
    if eqn.primitive is counted_p:
        x, counts = values
        again = counted_p.bind(tape.from_sources(x, counts), counts, role="cut")
        return tape.done(eqn, values, [again])
    loop = control(eqn.primitive, eqn.params)
    if loop is None:  # a call is opened: a mean and what it is the mean of are seen together
        return _run(_bodies(eqn)[0], values, tape)
    bodies = [lambda xs, b=body: _run(b, xs) for body in loop.bodies]
    if isinstance(loop, While) and loop.bodies[0].out_avals[0].shape:
        return tape.done(eqn, values, _while_any(loop, values, bodies))
    return tape.done(eqn, values, loop.rebuilt(values, bodies))


def _while_any(loop: While, inputs: Sequence[Any], bodies: Sequence[Any]) -> list[Any]:
    """The predicate is carried along: it may communicate, and so is asked once an iteration."""
    of_cond, of_body, start = loop.split(inputs)
    cond, body = bodies

    def goes_on(carry: list[Any]) -> Any:
        return cond([*of_cond, *carry])[0]

    def step(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
        rows, carry = state
        after = [
            _select(rows, new, old)
            for new, old in zip(body([*of_body, *carry]), carry, strict=True)
        ]
        return goes_on(after), after

    _, carry = jax.lax.while_loop(lambda state: jnp.any(state[0]), step, (goes_on(start), start))
    return list(carry)


def _select(rows: Any, new: Any, old: Any) -> Any:
    """`new` in these rows, `old` in the others. JAX gives every carry of such a loop all rows."""
    return jax.lax.select(jax.lax.broadcast_in_dim(rows, new.shape, range(rows.ndim)), new, old)


class _Tape:
    """What has been evaluated so far, so that it can be evaluated again from other inputs."""

    def __init__(self) -> None:
        self.entries: list[tuple[JaxprEqn, list[Any], list[Any]]] = []
        self.made: dict[int, int] = {}  # by the identity of a value: the entry that made it
        self.again: dict[int, dict[int, Any]] = {}  # by who counts: values computed from sources

    def done(self, eqn: JaxprEqn, inputs: list[Any], outputs: list[Any]) -> list[Any]:
        for x in outputs:
            self.made.setdefault(id(x), len(self.entries))
        self.entries.append((eqn, inputs, outputs))
        return outputs

    def from_sources(self, x: Any, counts: Any) -> Any:
        """`x` computed again from what this client was sent and what it has, through which no
        derivative passes where the client does not count."""
        again = self.again.setdefault(id(counts), {})
        for number in self._upstream(x, again):
            eqn, inputs, outputs = self.entries[number]
            if _is_source(eqn):
                results = [_source(y, counts) for y in outputs]
            else:
                with at_source(eqn.source_info):
                    values = [self._seen(again, y, counts) for y in inputs]
                    results = bind(eqn.primitive, eqn.params, values)
            again.update(zip(map(id, outputs), results, strict=True))
        return self._seen(again, x, counts)

    def _seen(self, again: dict[int, Any], x: Any, counts: Any) -> Any:
        if id(x) not in again and id(x) not in self.made:
            again[id(x)] = _source(x, counts)
        return again.get(id(x), x)

    def _upstream(self, x: Any, known: dict[int, Any]) -> list[int]:
        """The entries that `x` comes from, back to what a client was sent, in order."""
        found: set[int] = set()
        waiting = [x]
        while waiting:
            number = self.made.get(id(waiting[-1]))
            if id(waiting.pop()) in known or number is None or number in found:
                continue
            found.add(number)
            eqn, inputs, _ = self.entries[number]
            waiting += [] if _is_source(eqn) else inputs
        return sorted(found)


def _is_source(eqn: JaxprEqn) -> bool:
    """Is this not to be done again, because it communicates or does something besides computing?"""
    return eqn.primitive is broadcast_p or communicates(eqn.params) or has_effects(eqn)


def _source(x: Any, counts: Any) -> Any:
    """`x`; its derivative is zero where the client does not count."""
    known = not isinstance(x, jax.core.Tracer)
    if known or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return x
    # A value that several rows share counts if any of them does.
    return counted_p.bind(x, jnp.any(counts) if jnp.ndim(counts) else counts, role="source")
