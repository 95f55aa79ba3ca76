"""A plan prepared for repeated runs: client stages are exported, server work is compiled."""

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
from fedgrad.federation.protocol.provenance.origins import last_reads
from fedgrad.planning.plan import Plan


class Prepared:
    """Everything that calls of a program share when their arguments have the same shapes."""

    def __init__(self, plan: Plan, platforms: tuple[str, ...]) -> None:
        self.plan = plan
        self.exported = Exported(plan, platforms)
        self.freed = dict(
            pair for graph in everywhere(plan.graph) for pair in _freed(graph).items()
        )
        self.graph = changed(plan.graph, _gathered)
        self.server: dict[Equation, Callable[..., list[Any]]] = {
            e: _compiled(*e.bodies)
            for graph in everywhere(self.graph)
            for e in graph.loops
            if e.primitive is jax_primitives.jit_p
        }


def _gathered(graph: Graph) -> Graph:
    """Group each run of consecutive server equations into one equation with a body."""
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
    """Compile the server's work into one function."""

    @jax.jit
    def work(*values: Any) -> list[Any]:
        env = dict(zip(body.inputs, values, strict=True))
        evaluate(body.equations, env)
        return [read(env, v) for v in body.outputs]

    return work


def _freed(graph: Graph) -> dict[Exchange, set[Value]]:
    """Return, for each exchange, the kept client values that it is the last to read, which clients
    then free. Inputs of loops are excluded: a loop may pass them on under another name, so they
    live as long as their handles."""
    last = last_reads(graph)
    kept = {v for r in graph.rounds for x in r.exchanges for v in x.kept if is_client(v.at)}
    kept -= {v for loop in graph.loops for v in loop.inputs}
    return {
        x: {v for v in x.own if v in kept and last[v] == i}
        for i, e in enumerate(graph.equations)
        if isinstance(e, Round)
        for x in e.exchanges
    }
