"""The plan of a program: frozen data, from which everything else is read."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedgrad.core.arguments import Arguments, read_arguments
from fedgrad.core.errors import ArgumentError
from fedgrad.core.graph import Value
from fedgrad.core.placement import is_client
from fedgrad.core.program import Program
from fedgrad.core.trace import trace
from fedgrad.plan import server
from fedgrad.plan.audit import Audit, audit
from fedgrad.plan.cut import cut
from fedgrad.plan.stages import Exchange, Loop, Steps, exchanges


@dataclass(frozen=True)
class Traffic:
    """What one client of a placement receives and sends in one round."""

    round: int
    placement: str
    down: int  # scalars
    up: int
    down_bytes: int
    up_bytes: int
    times: int | None = 1  # how often this round happens; None where the data decide


@dataclass(frozen=True, eq=False)
class Plan:
    """What a program does, round by round. `str(plan)` and `plan.draw()` show it."""

    name: str
    steps: Steps
    clients: dict[str, int]
    outputs: Any = field(repr=False)  # the tree of the result
    rules: tuple[str, ...] = ()  # of a derivative, for each active round: "push", "local", "pull"
    recompute: bool = False  # clients compute again what they would have to remember
    opened: tuple[str, ...] = ()  # lines of functions whose custom derivative was left behind

    @property
    def rounds(self) -> int:
        """Communication rounds. A loop whose trip count the data decide counts once, a branch as
        its longest side."""
        return int(total(self.steps, lambda x: x.speaks, together=True))

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """One record for each round and placement."""
        return tuple(
            Traffic(
                number,
                x.placement,
                sum(v.size for v, _ in x.down),
                sum(v.size for v, _ in x.up),
                sum(v.bytes for v, _ in x.down),
                sum(v.bytes for v, _ in x.up),
                times,
            )
            for number, x, times in exchanges(self.steps)
        )

    @property
    def scalars(self) -> tuple[int, int]:
        """Scalars that a client of each placement receives and sends in all rounds, added up."""
        return self._sent(lambda v: v.size)

    @property
    def bytes(self) -> tuple[int, int]:
        """The same in bytes."""
        return self._sent(lambda v: v.bytes)

    def _sent(self, measure: Callable[[Value], int]) -> tuple[int, int]:
        down = total(self.steps, lambda x: sum(measure(v) for v, _ in x.down))
        up = total(self.steps, lambda x: sum(measure(v) for v, _ in x.up))
        return int(down), int(up)

    @property
    def readdressed(self) -> tuple[str, ...]:
        """Placements whose clients must be addressed in more than one round."""

        return tuple(p for p in self.clients if self.addressed(p) > 1)

    def addressed(self, placement: str) -> float:
        """In how many rounds clients of a placement take part (inf: the data decide)."""
        return total(self.steps, lambda x: x.placement == placement and x.speaks, math.inf)

    def asked(self, placement: str) -> float:
        """In how many of them they are sent something, not only asked for a count or the like."""
        return total(self.steps, lambda x: x.placement == placement and bool(x.down), math.inf)

    @property
    def client_memory(self) -> dict[str, int]:
        """Bytes that a client must keep between rounds, at most, by placement."""
        return {placement: _memory(self.steps, placement) for placement in self.clients}

    @functools.cached_property
    def server_memory(self) -> int:
        """Bytes that the server holds at once, at most: an estimate from the shapes."""
        return server.memory(self.steps)

    @functools.cached_property
    def server_work(self) -> int:
        """Operations on numbers that the server does: an estimate from the shapes."""
        return server.work(self.steps)

    def audit(self) -> Audit:
        """Every value that leaves a client, in which round, through which sum."""
        return audit(self.steps, self.clients)

    def draw(self, path: str | None = None) -> str:
        """The federated graph as SVG; written to `path` if given."""
        picture = _looks["svg"](self)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(picture)
        return picture

    def _repr_svg_(self) -> str:
        return self.draw()

    def __str__(self) -> str:
        return _looks["text"](self)


_looks: dict[str, Callable[[Plan], str]] = {}


def install_looks(text: Callable[[Plan], str], svg: Callable[[Plan], str]) -> None:
    """Called once, by fedgrad.show: a plan is data and does not know how it is shown."""
    _looks.update(text=text, svg=svg)


def plan(program: Program, *args: Any, **kwargs: Any) -> Plan:
    """The plan of a program for these arguments: arrays, cohorts or `jax.ShapeDtypeStruct`."""
    if not isinstance(program, Program):
        raise ArgumentError.here(
            f"fg.plan takes a program, got {program!r}. Decorate it with @fg.program(...)."
        )
    return make_plan(program, read_arguments(program, program.bind(args, kwargs)))


def make_plan(program: Program, arguments: Arguments, recompute: bool = False) -> Plan:
    traced = trace(program, arguments)
    taken = traced.taken
    again = recompute or program.recompute or taken.recompute
    return Plan(
        program.name,
        cut(traced.graph, again),
        arguments.clients,
        traced.outputs,
        taken.rules,
        again,
        traced.graph.opened,
    )


def total(
    steps: Steps, measure: Callable[[Exchange], float], unknown: float = 1, together: bool = False
) -> float:
    """A measure of exchanges, added up over the whole run: a loop as often as it runs (`unknown`
    where the data decide), of a cond the branch with the most. `together`: the exchanges of one
    round count as one."""
    result: float = 0
    for step in steps.steps:
        found = [float(measure(x)) for x in step.exchanges]
        result += max(found, default=0) if together else sum(found)
        for loop in step.loops:
            bodies = [total(body, measure, unknown, together) for body in loop.bodies]
            if loop.kind == "cond":
                result += max(bodies)
            elif sum(bodies):
                result += sum(bodies) * (unknown if loop.times is None else loop.times)
    return result


def _memory(steps: Steps, placement: str) -> int:
    """The largest total of what a client keeps from one step for a later one."""
    made: dict[Value, int] = {}
    last_read: dict[Value, int] = {}
    in_loops = [0] * len(steps.steps)
    for i, step in enumerate(steps.steps):
        for x in step.exchanges:
            if x.placement == placement:
                made.update((v, i) for v in x.kept)
                last_read.update((v, i) for v in x.own)
        for loop in step.loops:
            last_read.update((v, i) for v in loop.equation.inputs)
            made.update((v, i) for v in loop.equation.outputs if v.at == placement)
            in_loops[i] += _loop_memory(loop, placement)
    kept = [
        sum(v.bytes for v, start in made.items() if start <= i < last_read.get(v, -1))
        for i in range(len(steps.steps))
    ]
    return max((a + b for a, b in zip(kept, in_loops, strict=True)), default=0)


def _loop_memory(loop: Loop, placement: str) -> int:
    """What a client carries from one iteration to the next, and keeps within one."""
    inside = max((_memory(body, placement) for body in loop.bodies), default=0)
    if loop.kind == "cond":
        return inside
    carried = sum(v.bytes for v in loop.equation.outputs if v.at == placement and is_client(v.at))
    return inside + carried
