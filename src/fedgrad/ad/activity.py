"""Which rounds a derivative has to pass through.

A value is active if it depends on what is differentiated and influences what is returned. A round
(or a loop of rounds) is active if one of its sums is; the others cost a derivative nothing.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from fedgrad.core.graph import Equation, Exchange, Graph, Round, Value, inside
from fedgrad.core.primitives import jax_primitives, primitives_inside

Unit = Exchange | Equation  # what gets a rule of its own: one round with one placement, or a loop


def is_float(x: Any) -> bool:
    """Can this array, or what stands for one, have a derivative?"""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def differentiable(value: Value) -> bool:
    return is_float(value.aval)


def is_complex(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def active_values(
    equations: Iterable[Equation], wrt: Iterable[Value], results: Iterable[Value]
) -> set[Value]:
    """Values that depend on `wrt` and influence `results`."""
    equations = list(equations)
    forward = depends(equations, wrt)
    backward = set(results)
    for equation in reversed(equations):
        if any(v in backward for v in equation.outputs):
            backward.update(equation.inputs)
    return forward & backward


def active_units(graph: Graph, active: set[Value]) -> list[tuple[int, Unit]]:
    """The active rounds and loops of a plan, each with its position among the equations."""
    units: list[tuple[int, Unit]] = []
    for i, equation in enumerate(graph.equations):
        parts = equation.exchanges if isinstance(equation, Round) else (equation,)
        for part in parts if equation.bodies else ():
            if speaks(part) and any(v in active for v in _sums(part)):
                units.append((i, part))
    return units


def _sums(unit: Unit) -> Iterable[Value]:
    return (total for _, total in unit.up) if isinstance(unit, Exchange) else unit.outputs


def speaks(unit: Unit) -> bool:
    """Is there communication in it?"""
    if isinstance(unit, Exchange):
        return unit.speaks
    return any(r.speaks for graph in inside(unit) for r in graph.rounds)


def depends(equations: Iterable[Equation], inputs: Iterable[Value]) -> set[Value]:
    """What can have a derivative with respect to these inputs."""
    found = set(inputs)
    for equation in equations:
        if equation.primitive is not jax_primitives.stop_gradient_p:
            if any(v in found for v in equation.inputs):
                found.update(v for v in equation.outputs if differentiable(v))
    return found


def has_custom_vjp(equation: Equation) -> bool:
    """Is there a custom_vjp, which JAX cannot push tangents through?"""
    primitive = jax_primitives.custom_vjp_call_p
    return equation.primitive is primitive or primitive in primitives_inside(equation.params)
