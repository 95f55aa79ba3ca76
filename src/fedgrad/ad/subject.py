"""A program that is to be differentiated, and which rules its rounds can have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from fedgrad.ad.activity import Unit, active_units, active_values, differentiable, has_custom_vjp
from fedgrad.core.check import check
from fedgrad.core.graph import Graph, Value
from fedgrad.core.normal_form import traced
from fedgrad.core.placement import is_client
from fedgrad.core.primitives import ClosedJaxpr
from fedgrad.core.trace import struct
from fedgrad.plan.cut import cut
from fedgrad.plan.stages import Loop, Steps

Rules = tuple[str, ...]  # "push" | "local" | "pull" for each active unit, in order


@dataclass(frozen=True, eq=False)
class Subject:
    """A program that is to be differentiated, in the view of the server and one client."""

    name: str
    placements: tuple[str, ...]
    jaxpr: ClosedJaxpr
    graph: Graph
    steps: Steps
    wrt: tuple[int, ...]  # positions among the inputs
    results: tuple[int, ...]  # positions among the outputs
    returned: tuple[int, ...]  # outputs that are wanted besides the derivative
    active: set[Value]
    units: list[tuple[int, Unit]]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the choice of rules depends on, besides the shapes of the arguments."""
        return tuple((number, type(unit).__name__, _sizes(unit)) for number, unit in self.units)

    @property
    def at_clients(self) -> bool:
        """Is one of the inputs that are differentiated at clients?"""
        return any(is_client(self.graph.inputs[i].at) for i in self.wrt)

    @property
    def complex(self) -> bool:
        """Is one of them complex? Pushing a basis forward would need its imaginary half too."""
        return any(is_complex(self.graph.inputs[i].aval) for i in self.wrt)

    @property
    def widens(self) -> bool:
        """Is it free to go forward, and the shorter way: are there fewer inputs than results?"""
        if self.at_clients or self.complex or any(map(has_custom_vjp, self.graph.equations)):
            return False
        inputs = sum(self.graph.inputs[i].size for i in self.wrt)
        return inputs < sum(self.graph.outputs[j].size for j in self.results)


def subject(
    name: str,
    fun: Callable[..., list[Any]],
    values: Sequence[Value],
    placements: Sequence[str],
    wrt: Sequence[int],
    pick: Callable[[int], tuple[Sequence[int], Sequence[int]]],
    derived: bool = False,
) -> Subject:
    """Trace `fun`, a function of flat values. `pick` says, of so many outputs, which ones are
    differentiated and which ones are returned as well. `derived`: it is a derivative itself."""
    jaxpr, _ = traced(fun, placements, *map(struct, values))
    graph = check(jaxpr, values, nested=True, keep_custom=True, derived=derived)
    steps = cut(graph, recompute=True)
    results, returned = pick(len(graph.outputs))
    chosen = tuple(i for i in results if differentiable(graph.outputs[i]))
    active = active_values(
        graph.equations, [graph.inputs[i] for i in wrt], [graph.outputs[i] for i in chosen]
    )
    return Subject(
        name,
        tuple(placements),
        jaxpr,
        graph,
        steps,
        tuple(wrt),
        chosen,
        tuple(returned),
        active,
        active_units(steps, active),
    )


def rule_vectors(subject: Subject) -> list[Rules]:
    """Every choice of rules that makes sense: a pull gives no tangent to push on, so there is no
    push at or after a pull."""
    if subject.at_clients and any(is_while(unit) for _, unit in subject.units):
        return []
    vectors: list[tuple[str, ...]] = [()]
    for number, unit in subject.units:
        longer = []
        for vector in vectors:
            pulled = any(
                rule == "pull" and at <= number
                for rule, (at, _) in zip(vector, subject.units, strict=False)
            )
            pushed = _pushed_here(subject, vector, number)
            longer += [
                (*vector, rule)
                for rule in ("local", "push", "pull")
                if possible(subject, unit, rule)
                if not (rule == "push" and pulled) and not (rule == "pull" and pushed)
            ]
        vectors = longer
    return vectors


def possible(subject: Subject, unit: Unit, rule: str) -> bool:
    """May this round have this rule, whatever the others have?"""
    if rule == "push":
        return not subject.at_clients
    return not (rule == "pull" and is_while(unit))


def _pushed_here(subject: Subject, vector: Rules, number: int) -> bool:
    return any(
        rule == "push" and at == number
        for rule, (at, _) in zip(vector, subject.units, strict=False)
    )


def _sizes(unit: Unit) -> tuple[int, ...]:
    if isinstance(unit, Loop):
        return tuple(v.size for v in (*unit.equation.inputs, *unit.equation.outputs))
    return tuple(v.size for pair in (*unit.down, *unit.up) for v in pair[:1])


def is_while(unit: Unit) -> bool:
    """JAX cannot pull back through a while_loop."""
    return isinstance(unit, Loop) and unit.kind == "while"


def is_complex(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))
