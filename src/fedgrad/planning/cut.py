"""The plan of a program: what is computed where and when, and what travels in which message.

    server work -> [down -> client stage -> up] -> server work -> [down -> ...] -> ...

A sum travels in the earliest round that can carry it, a broadcast in the latest one before it is
needed, so there are as few rounds as the data allow and nothing is sent to be kept. Everything
that goes the same way in the same round is one message, and a value is sent once.

The law of this pass: evaluating the equations in order computes the graph's outputs. They are
rounds, loops whose bodies are such graphs, and equations of the server; and a client stage reads
only the client's own arguments, what it was sent in this round, and what it remembers.
"""

import dataclasses
from collections.abc import Sequence

from fedgrad.core.graph import (
    ANYWHERE,
    SERVER,
    Equation,
    Exchange,
    Graph,
    Round,
    Value,
    changed,
    is_client,
    needed,
)
from fedgrad.core.primitives import broadcast_p, sum_p


def cut(graph: Graph, recompute: bool = False) -> Graph:
    """Gather the communication of a graph in rounds.

    With `recompute`, clients remember nothing of earlier rounds: what they need again is sent again
    and computed again.
    """
    return changed(graph, lambda graph: _cut(graph, recompute))


def _cut(graph: Graph, recompute: bool) -> Graph:
    effects = [e for e in graph.equations if e.effects]
    live, _ = needed(graph.equations, graph.outputs, always=effects)
    cutter = _Cutter(graph, live, recompute)
    last = max(map(cutter.level_after, live), default=0)
    equations = [e for level in range(last + 1) for e in cutter.equations(level)]
    return dataclasses.replace(graph, equations=tuple(_with_kept(equations, graph.outputs)))


class _Cutter:
    def __init__(self, graph: Graph, live: list[Equation], recompute: bool) -> None:
        self.graph, self.live, self.recompute = graph, live, recompute
        self.levels = _schedule(live)
        self.own = {*graph.inputs, *graph.indices.values()}
        self.at_client: dict[str, set[Value]] = {}  # computed or received by each placement
        self.maker = {v: e for e in live for v in e.outputs}
        self.loops = [e for e in live if e.bodies]
        roots = [v for e in live if e.primitive is broadcast_p or e.bodies for v in e.inputs]
        on_server, _ = needed(
            live,
            [v for v in (*roots, *graph.outputs) if not is_client(v.at)],
            known=lambda v: is_client(v.at) or self.sent_up(v),
            always=[e for e in live if e.effects and not e.bodies and not is_client(e.at)],
        )
        self.on_server = [e for e in on_server if not e.bodies and e.primitive is not sum_p]

    def level(self, v: Value) -> int:
        return self.levels.get(v, 0)

    def level_before(self, equation: Equation) -> int:
        return max(map(self.level, equation.inputs), default=0)

    def level_after(self, equation: Equation) -> int:
        return max(map(self.level, equation.outputs), default=self.level_before(equation))

    def sent_up(self, v: Value) -> bool:
        maker = self.maker.get(v)
        return maker is not None and maker.primitive is sum_p

    def sent_down(self, v: Value) -> bool:
        maker = self.maker.get(v)
        return maker is not None and maker.primitive is broadcast_p and self.level(v) > 0

    def equations(self, level: int) -> list[Equation]:
        """Return a round, then loops, then the server's work."""
        sums = [e for e in self.live if e.primitive is sum_p and self.level(e.outputs[0]) == level]
        effects = [
            e
            for e in self.live
            if e.effects and not e.bodies and is_client(e.at) and self.level_before(e) == level
        ]
        kept = self.wanted(level)
        placements = [e.params["placement"] for e in sums]
        placements += [v.at for v in kept] + [e.at for e in effects]
        exchanges = [
            self.exchange(
                placement,
                [e for e in sums if e.params["placement"] == placement],
                [v for v in kept if v.at == placement],
                [e for e in effects if e.at == placement],
            )
            for placement in dict.fromkeys(placements)
        ]
        loops = [e for e in self.live if e.bodies and self.level_before(e) + 1 == level]
        for v in (v for loop in loops for v in loop.outputs):
            if is_client(v.at):
                self.at_client.setdefault(v.at, set()).add(v)
        server = [e for e in self.on_server if self.level_after(e) == level]
        return [*([Round.of(exchanges)] if exchanges else []), *loops, *server]

    def wanted(self, level: int) -> list[Value]:
        """Return client values of this level that are results or inputs of loops."""
        roots = [*self.graph.outputs, *(v for e in self.live if e.bodies for v in e.inputs)]
        return [
            v
            for v in dict.fromkeys(roots)
            if is_client(v.at) and v not in self.own and self.level(v) == level
            if v not in self.at_client.get(v.at, ())
        ]

    def exchange(
        self, placement: str, sums: list[Equation], kept: list[Value], effects: list[Equation]
    ) -> Exchange:
        has = self.at_client.setdefault(placement, set())

        def known(v: Value) -> bool:
            maker = self.maker.get(v)
            if v in self.own or self.sent_down(v) or maker in self.loops:
                return True
            # What depends on nothing that was sent is computed again rather than remembered.
            return not self.recompute and v in has and self.level(v) > 0

        operands = [e.inputs[0] for e in sums]
        equations, inputs = needed(self.live, [*operands, *kept], known, always=effects)
        down = tuple(
            (self.maker[v].inputs[0], v)
            for v in inputs
            if self.sent_down(v) and (self.recompute or v not in has)
        )
        received = [v for _, v in down]
        mine = [v for v in inputs if v not in received]
        has.update(received, *(e.outputs for e in equations))
        # What is left of broadcasts are those of constants, which a client makes by itself.
        stage = Graph((*received, *mine), tuple(equations), (*operands, *kept))
        return Exchange(placement, down, stage, tuple((e.inputs[0], e.outputs[0]) for e in sums))


def _schedule(equations: Sequence[Equation]) -> dict[Value, int]:
    """Return the step after which each value exists.

    A sum of what needs nothing from the server (a count, say) could travel in the first round. It
    waits for the first round in which its clients are addressed anyway, if that delays nothing.
    """
    waits: dict[str, int] = {}
    levels = _levels(equations, waits)
    sums = [e for e in equations if e.primitive is sum_p]
    eager = [e for e in sums if levels.get(e.inputs[0], 0) == 0]
    for placement in dict.fromkeys(e.params["placement"] for e in eager):
        natural = [
            levels[e.outputs[0]]
            for e in sums
            if e not in eager and e.params["placement"] == placement
        ]
        later = _levels(equations, {**waits, placement: min(natural, default=1)})
        if all(later[e.outputs[0]] == levels[e.outputs[0]] for e in sums if e not in eager):
            if max(later.values()) == max(levels.values()):
                waits, levels = {**waits, placement: min(natural, default=1)}, later
    return levels


def _levels(equations: Sequence[Equation], waits: dict[str, int]) -> dict[Value, int]:
    """Schedule as early as possible; sums that need nothing from the server wait for the round in
    `waits`."""
    levels: dict[Value, int] = {}
    for equation in equations:
        before = max((levels.get(v, 0) for v in equation.inputs), default=0)
        for v in equation.outputs:
            if equation.primitive is broadcast_p:
                constant = equation.inputs[0].at == ANYWHERE  # a client can make it by itself
                levels[v] = 0 if constant else before + 1
            elif equation.primitive is sum_p:
                levels[v] = before or waits.get(equation.params["placement"], 1)
            elif equation.bodies:  # a client reads what a loop left only in the next step
                levels[v] = before + (1 if v.at == SERVER else 2)
            else:
                levels[v] = before
    return levels


def _with_kept(equations: Sequence[Equation], outputs: Sequence[Value]) -> list[Equation]:
    """Add to each stage's outputs the values that later equations read: what the client
    remembers."""
    made: dict[Value, int] = {}
    kept: dict[Value, None] = {}
    for i, equation in enumerate(equations):
        for v in equation.inputs if equation.bodies else ():
            if is_client(v.at) and made.get(v, i) < i:  # constants are recomputed
                kept[v] = None
        for x in equation.exchanges if isinstance(equation, Round) else ():
            for v in _has(x):
                made.setdefault(v, i)
    kept.update((v, None) for v in outputs if is_client(v.at) and v in made)
    return [
        Round.of([_keeping(x, [v for v in kept if made[v] == i]) for x in equation.exchanges])
        if isinstance(equation, Round)
        else equation
        for i, equation in enumerate(equations)
    ]


def _has(x: Exchange) -> list[Value]:
    """Return what clients have after an exchange: what they were sent and what they computed."""
    return [*(r for _, r in x.down), *(v for e in x.stage.equations for v in e.outputs)]


def _keeping(x: Exchange, values: Sequence[Value]) -> Exchange:
    here = set(_has(x))
    outputs = (*(s for s, _ in x.up), *(v for v in values if v in here))
    return dataclasses.replace(x, stage=dataclasses.replace(x.stage, outputs=outputs))
