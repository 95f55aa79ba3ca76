"""Evaluating equations with some of them replaced, also deep inside of loops and calls.

A rule is a function of an equation and its inputs that gives the outputs, or None to leave the
equation as it is. Executors use rules for what a backend does badly and for the client's index.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedgrad.core.control import control
from fedgrad.core.graph import Equation, Value, read
from fedgrad.core.primitives import (
    CALLS,
    CUSTOM_DERIVATIVES,
    ClosedJaxpr,
    Primitive,
    at_source,
    bind,
    closed,
    interpret,
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
    return interpret(
        jaxpr, inputs, lambda eqn, values: apply(eqn.primitive, eqn.params, values, rules)
    )


def _rebuild(
    primitive: Primitive, params: dict[str, Any], inputs: list[Any], rules: Rules
) -> list[Any]:
    """The same control flow around rewritten bodies."""
    if primitive in CUSTOM_DERIVATIVES and jax_primitives.axis_index_p not in rules:
        return bind(primitive, params, inputs)  # its derivative is worth more than a faster body
    if primitive in CALLS:
        return run(closed(params[CALLS[primitive]]), inputs, rules)
    loop = control(primitive, params)
    if loop is None:
        return bind(primitive, params, inputs)
    return loop.rebuilt(inputs, [functools.partial(_run_body, b, rules) for b in loop.bodies])


def _run_body(jaxpr: ClosedJaxpr, rules: Rules, inputs: list[Any]) -> list[Any]:
    return run(jaxpr, inputs, rules)
