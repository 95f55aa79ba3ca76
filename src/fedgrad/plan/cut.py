"""The plan of a program: when what is computed where, and what travels in which message.

    server stage 0 -> [down -> client stage -> up] -> server stage 1 -> [down -> ...] -> ...

A sum travels in the earliest round that can carry it, a broadcast in the latest one before it is
needed, so there are as few rounds as the data allow and nothing is sent to be kept. Everything
that goes the same way in the same round is one message, and a value is sent once.

The law of this pass: running the steps in order computes the graph's outputs, and a client stage
reads only the client's own arguments, what it was sent in this round, and what it remembers.
"""

from collections.abc import Sequence

from fedgrad.core.graph import Equation, Graph, Value, needed
from fedgrad.core.placement import ANYWHERE, SERVER, is_client
from fedgrad.core.primitives import broadcast_p, jax_primitives, sum_p
from fedgrad.plan.stages import Exchange, Loop, Stage, Step, Steps


def cut(graph: Graph, recompute: bool = False) -> Steps:
    """Cut a graph into steps.

    `recompute`: clients remember nothing of earlier rounds; what they need again is sent again and
    computed again.
    """
    effects = [e for e in graph.equations if e.effects]
    live, _ = needed(graph.equations, graph.outputs, always=effects)
    cutter = _Cutter(graph, live, recompute)
    last = max(map(cutter.level_after, live), default=0)
    steps = [cutter.step(level) for level in range(last + 1)]
    return Steps(graph.inputs, tuple(_with_kept(steps, graph)), graph.outputs, graph.indices)


class _Cutter:
    def __init__(self, graph: Graph, live: list[Equation], recompute: bool) -> None:
        self.graph, self.live, self.recompute = graph, live, recompute
        self.levels = _schedule(live)
        self.own = {*graph.inputs, *graph.indices.values()}
        self.at_client: dict[str, set[Value]] = {}  # what each placement has computed or received
        self.maker = {v: e for e in live for v in e.outputs}
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

    def step(self, level: int) -> Step:
        sums = [e for e in self.live if e.primitive is sum_p and self.level(e.outputs[0]) == level]
        effects = [
            e
            for e in self.live
            if e.effects and not e.bodies and is_client(e.at) and self.level_before(e) == level
        ]
        kept = self.wanted(level)
        placements = [e.params["placement"] for e in sums]
        placements += [v.at for v in kept] + [e.at for e in effects]
        exchanges = tuple(
            self.exchange(
                placement,
                [e for e in sums if e.params["placement"] == placement],
                [v for v in kept if v.at == placement],
                [e for e in effects if e.at == placement],
            )
            for placement in dict.fromkeys(placements)
        )
        loops = tuple(
            Loop(e, tuple(cut(body, self.recompute) for body in e.bodies))
            for e in self.live
            if e.bodies and self.level_before(e) + 1 == level
        )
        for v in (v for loop in loops for v in loop.equation.outputs):
            if is_client(v.at):
                self.at_client.setdefault(v.at, set()).add(v)
        server = tuple(e for e in self.on_server if self.level_after(e) == level)
        return Step(exchanges, loops, server)

    def wanted(self, level: int) -> list[Value]:
        """Client values of this level that something other than a sum needs: results and loops."""
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
            if v in self.own or self.sent_down(v) or (maker is not None and bool(maker.bodies)):
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
        local = tuple(e if e.primitive is not broadcast_p else _local_copy(e) for e in equations)
        stage = Stage((*received, *mine), local, (*operands, *kept))
        return Exchange(placement, down, stage, tuple((e.inputs[0], e.outputs[0]) for e in sums))


def _schedule(equations: Sequence[Equation]) -> dict[Value, int]:
    """The step after which each value exists.

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
    """As early as possible, but sums that need nothing not before the round `waits` says."""
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


def _local_copy(equation: Equation) -> Equation:
    """The broadcast of a constant: the client makes the constant, nothing travels."""
    return Equation(
        jax_primitives.copy_p, {}, equation.inputs, equation.outputs, equation.at, equation.source
    )


def is_local_copy(equation: Equation) -> bool:
    """Was this equation a broadcast?"""
    of_constant = all(v.at == ANYWHERE for v in equation.inputs)
    return equation.primitive is jax_primitives.copy_p and is_client(equation.at) and of_constant


def _with_kept(steps: Sequence[Step], graph: Graph) -> list[Step]:
    """Give each stage, as outputs, what later steps read of it: what the client remembers."""
    made: dict[Value, int] = {}
    kept: dict[int, dict[Value, None]] = {}
    for i, step in enumerate(steps):
        readers = [v for x in step.exchanges for v in x.own]
        readers += [v for loop in step.loops for v in loop.equation.inputs]
        for v in filter(lambda v: is_client(v.at), readers):  # a constant is made again
            if v in made and made[v] < i:
                kept.setdefault(made[v], {})[v] = None
        for x in step.exchanges:
            for v in [r for _, r in x.down] + [v for e in x.stage.equations for v in e.outputs]:
                made.setdefault(v, i)
    for v in graph.outputs:
        if is_client(v.at) and v in made:
            kept.setdefault(made[v], {})[v] = None
    result = []
    for i, step in enumerate(steps):
        exchanges = []
        for x in step.exchanges:
            here = {r for _, r in x.down} | {v for e in x.stage.equations for v in e.outputs}
            stay = [v for v in kept.get(i, {}) if v in here]
            outputs = (*[s for s, _ in x.up], *stay)
            stage = Stage(x.stage.inputs, x.stage.equations, outputs)
            exchanges.append(Exchange(x.placement, x.down, stage, x.up))
        result.append(Step(tuple(exchanges), step.loops, step.server))
    return result
