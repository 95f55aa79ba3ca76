"""A program that is to be differentiated, and which rules its rounds can have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedgrad.ad.activity import (
    Unit,
    active_units,
    active_values,
    differentiable,
    has_custom_vjp,
    is_complex,
)
from fedgrad.ad.rules import RULES
from fedgrad.core.graph import Exchange, Graph, Value, is_client
from fedgrad.core.primitives import ClosedJaxpr
from fedgrad.core.trace import check, struct, traced
from fedgrad.plan.cut import cut

Rules = tuple[str, ...]  # the name of the rule of each active unit, in order


@dataclass(frozen=True, eq=False)
class Subject:
    """A program that is to be differentiated, in the view of the server and one client."""

    name: str
    placements: tuple[str, ...]
    jaxpr: ClosedJaxpr
    graph: Graph
    plan: Graph  # cut with recompute, so that every stage stands for itself
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
    graph = check(jaxpr, values, nested=True, to_derive=True, derived=derived)
    plan = cut(graph, recompute=True)
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
        plan,
        tuple(wrt),
        chosen,
        tuple(returned),
        active,
        active_units(plan, active),
    )


def rule_vectors(subject: Subject) -> list[Rules]:
    """Every choice of rules that makes sense: what goes backward gives no tangent to what goes
    forward, so nothing goes forward at or after it."""
    if subject.at_clients and any(is_while(unit) for _, unit in subject.units):
        return []
    vectors: list[Rules] = [()]
    for number, unit in subject.units:
        vectors = [
            (*vector, name)
            for vector in vectors
            for name in RULES
            if possible(subject, unit, name) and not _crosses(subject, vector, name, number)
        ]
    return vectors


def possible(subject: Subject, unit: Unit, name: str) -> bool:
    """May this round have this rule, whatever the others have?"""
    rule = RULES[name]
    if subject.at_clients and not rule.by_clients:
        return False
    return rule.through_while or not is_while(unit)


def _crosses(subject: Subject, vector: Rules, name: str, number: int) -> bool:
    """Would a rule for the unit at `number` go against those of the units before it?"""
    forward = RULES[name].forward
    before = [(RULES[n].forward, at) for n, (at, _) in zip(vector, subject.units, strict=False)]
    if forward is True:
        return any(way is False for way, _ in before)
    return forward is False and any(way is True and at == number for way, at in before)


def _sizes(unit: Unit) -> tuple[int, ...]:
    if isinstance(unit, Exchange):
        return tuple(v.size for pair in (*unit.down, *unit.up) for v in pair[:1])
    return tuple(v.size for v in (*unit.inputs, *unit.outputs))


def is_while(unit: Unit) -> bool:
    """JAX cannot pull back through a while_loop."""
    return not isinstance(unit, Exchange) and unit.kind == "while"
