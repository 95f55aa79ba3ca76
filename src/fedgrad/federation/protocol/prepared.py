"""A plan made ready to be run many times: clients' stages exported, the server's compiled."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedgrad.core.evaluate import evaluate, read
from fedgrad.core.graph import (
    SERVER,
    Equation,
    Exchange,
    Graph,
    Round,
    Value,
    changed,
    everywhere,
    is_client,
)
from fedgrad.core.primitives import jax_primitives
from fedgrad.federation.protocol.exported import Exported
from fedgrad.plan.plan import Plan


class Prepared:
    """What is the same in every call of a program with arguments of the same shapes."""

    def __init__(self, plan: Plan, platforms: tuple[str, ...]) -> None:
        self.plan = plan
        self.exported = Exported(plan, platforms)
        self.last_reads: dict[Exchange, set[Value]] = {}
        for graph in everywhere(plan.graph):
            self.last_reads.update(_last_reads(graph))
        self.graph = changed(plan.graph, _gathered)
        self.server: dict[Equation, Callable[..., list[Any]]] = {
            e: _compiled(*e.bodies)
            for graph in everywhere(self.graph)
            for e in graph.loops
            if e.primitive is jax_primitives.jit_p
        }


def _gathered(graph: Graph) -> Graph:
    """The same graph, in which what the server does in one go is one equation with a body."""
    groups = [(k, list(g)) for k, g in itertools.groupby(graph.equations, lambda e: not e.bodies)]
    reads = [{v for e in group for v in e.inputs} for _, group in groups]
    equations: list[Equation] = []
    for i, (local, group) in enumerate(groups):
        later = set(graph.outputs).union(*reads[i + 1 :])
        equations += [_work(group, later)] if local else group
    return dataclasses.replace(graph, equations=tuple(equations))


def _work(equations: Sequence[Equation], wanted: set[Value]) -> Equation:
    made = [v for e in equations for v in e.outputs]
    reads = {v: None for e in equations for v in e.inputs if v.constant is None}
    inputs = tuple(v for v in reads if v not in set(made))
    outputs = tuple(v for v in made if v in wanted)
    body = Graph(inputs, tuple(equations), outputs)
    return Equation(jax_primitives.jit_p, {}, inputs, outputs, SERVER, None, bodies=(body,))


def _compiled(body: Graph) -> Callable[..., list[Any]]:
    """The server's work as one compiled function."""

    @jax.jit
    def work(*values: Any) -> list[Any]:
        env = dict(zip(body.inputs, values, strict=True))
        evaluate(body.equations, env)
        return [read(env, v) for v in body.outputs]

    return work


def _last_reads(graph: Graph) -> dict[Exchange, set[Value]]:
    """Which values that clients keep each stage is the last one to read: then they are freed."""
    reader: dict[Value, Exchange | None] = {}
    for equation in graph.equations:
        for x in equation.exchanges if isinstance(equation, Round) else ():
            reader.update(dict.fromkeys(x.kept))  # nobody so far
            reader.update((v, x) for v in x.own if v in reader)
        if equation.bodies and not isinstance(equation, Round):
            reader.update((v, None) for v in equation.inputs if v in reader)
    found: dict[Exchange, set[Value]] = {}
    for v, last in reader.items():
        if last is not None and v not in graph.outputs and is_client(v.at):
            found.setdefault(last, set()).add(v)
    return found
