"""Evaluating equations with some of them replaced, also deep inside of loops and calls.

A rule is a function of an equation and its inputs that gives the outputs, or None to leave the
equation as it is. Executors use rules for what a backend does badly and for the client's index.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from fedgrad.core.graph import Equation, Value, read
from fedgrad.core.primitives import (
    CALLS,
    CUSTOM_DERIVATIVES,
    ClosedJaxpr,
    Literal,
    Primitive,
    at_source,
    bind,
    closed,
    jax_primitives,
    primitives_inside,
)

Rule = Callable[[dict[str, Any], Sequence[Any]], list[Any] | None]
Rules = Mapping[Primitive, Rule]


def evaluate(equations: Iterable[Equation], env: dict[Value, Any], rules: Rules = {}) -> None:
    """Like `fedgrad.core.graph.evaluate`, under rules."""
    for equation in equations:
        inputs = [read(env, v) for v in equation.inputs]
        here = rules
        if equation.indexed:
            *inputs, index = inputs
            here = {**rules, jax_primitives.axis_index_p: functools.partial(_answer, index)}
        with at_source(equation.source):
            outputs = apply(equation.primitive, equation.params, inputs, here)
        env.update(zip(equation.outputs, outputs, strict=True))


def _answer(index: Any, params: dict[str, Any], inputs: Sequence[Any]) -> list[Any]:
    return [index]


def apply(
    primitive: Primitive, params: dict[str, Any], inputs: Sequence[Any], rules: Rules
) -> list[Any]:
    """One equation under rules."""
    if primitive in rules:
        outputs = rules[primitive](params, inputs)
        if outputs is not None:
            return outputs
    if not primitives_inside(params) & rules.keys():
        return bind(primitive, params, inputs)
    return _rebuild(primitive, params, list(inputs), rules)


def run(jaxpr: ClosedJaxpr, inputs: Sequence[Any], rules: Rules) -> list[Any]:
    """Evaluate a jaxpr under rules."""
    env = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    env.update(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.jaxpr.eqns:
        with at_source(eqn.source_info):
            values = [value(v) for v in eqn.invars]
            outputs = apply(eqn.primitive, eqn.params, values, rules)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [value(v) for v in jaxpr.jaxpr.outvars]


def _rebuild(
    primitive: Primitive, params: dict[str, Any], inputs: list[Any], rules: Rules
) -> list[Any]:
    """The same control flow around rewritten bodies."""
    if primitive in CUSTOM_DERIVATIVES and jax_primitives.axis_index_p not in rules:
        return bind(primitive, params, inputs)  # its derivative is worth more than a faster body
    if primitive in CALLS:
        return run(closed(params[CALLS[primitive]]), inputs, rules)
    if primitive is jax_primitives.scan_p:
        return _scan(params, inputs, rules)
    if primitive is jax_primitives.while_p:
        return _while(params, inputs, rules)
    if primitive is jax_primitives.cond_p:
        branches = [
            lambda *xs, b=branch: run(closed(b), xs, rules) for branch in params["branches"]
        ]
        return list(jax.lax.switch(inputs[0], branches, *inputs[1:]))
    return bind(primitive, params, inputs)


def _scan(params: dict[str, Any], inputs: list[Any], rules: Rules) -> list[Any]:
    n, m = params["num_consts"], params["num_carry"]
    body, consts = closed(params["jaxpr"]), inputs[:n]

    def step(carry: Any, xs: Any) -> Any:
        out = run(body, [*consts, *carry, *xs], rules)
        return out[:m], out[m:]

    carry, ys = jax.lax.scan(
        step,
        inputs[n : n + m],
        inputs[n + m :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(params: dict[str, Any], inputs: list[Any], rules: Rules) -> list[Any]:
    n, m = params["cond_nconsts"], params["body_nconsts"]
    cond, body = closed(params["cond_jaxpr"]), closed(params["body_jaxpr"])
    return list(
        jax.lax.while_loop(
            lambda carry: run(cond, [*inputs[:n], *carry], rules)[0],
            lambda carry: run(body, [*inputs[n : n + m], *carry], rules),
            inputs[n + m :],
        )
    )
