"""The plan of a program: frozen data, from which all the rest is read. What is sent, how often, and
what clients keep is read here; what clients reveal and what the server needs, in files beside."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedgrad.aggregate.aggregator import Aggregator, plain
from fedgrad.core.arguments import Arguments, read_arguments
from fedgrad.core.errors import ArgumentError, public
from fedgrad.core.graph import Exchange, Graph, Round, Value, exchanges, fold
from fedgrad.core.program import Program
from fedgrad.core.trace import trace
from fedgrad.planning import server
from fedgrad.planning.audit import Audit, audit
from fedgrad.planning.cut import cut


@public
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


@public
@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What a program does, round by round. `str(plan)` and `plan.draw()` show it."""

    name: str
    graph: Graph
    clients: dict[str, int]
    outputs: Any = field(repr=False)  # the tree of the result
    rules: tuple[str, ...] = ()  # of a derivative, for each active round: "push", "local", "pull"
    recompute: bool = False  # clients compute again what they would have to remember

    @property
    def rounds(self) -> int:
        """Communication rounds. A loop whose trip count the data decide counts once, a branch as
        its longest side."""
        return int(_total(self.graph, lambda x: x.speaks, together=True))

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
            for number, x, times in exchanges(self.graph)
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
        down = _total(self.graph, lambda x: sum(measure(v) for v, _ in x.down))
        up = _total(self.graph, lambda x: sum(measure(v) for v, _ in x.up))
        return int(down), int(up)

    @property
    def readdressed(self) -> tuple[str, ...]:
        """Placements whose clients must be addressed in more than one round."""

        return tuple(p for p in self.clients if self.addressed(p) > 1)

    def addressed(self, placement: str) -> float:
        """In how many rounds clients of a placement take part (inf: the data decide)."""
        return _total(self.graph, lambda x: x.placement == placement and x.speaks, math.inf)

    def asked(self, placement: str) -> float:
        """In how many of them they are sent something, not only asked for a count or the like."""
        return _total(self.graph, lambda x: x.placement == placement and bool(x.down), math.inf)

    @property
    def client_memory(self) -> dict[str, int]:
        """Bytes that a client must keep between rounds, at most, by placement."""
        return {placement: _client_memory(self.graph, placement) for placement in self.clients}

    @functools.cached_property
    def server_memory(self) -> int:
        """Bytes that the server holds at once, at most: an estimate from the shapes."""
        return server.memory(self.graph)

    @functools.cached_property
    def server_work(self) -> int:
        """Operations on numbers that the server does: an estimate from the shapes."""
        return server.work(self.graph)

    @functools.cached_property
    def client_work(self) -> int:
        """Operations on numbers that the client with the most examples does: an estimate from the
        shapes."""
        return server.client_work(self.graph)

    def audit(self) -> Audit:
        """Every value that leaves a client, in which round, through which sum; and the results that
        stay at clients."""
        return audit(self.graph, self.clients, self.outputs)

    def draw(self, path: str | None = None) -> str:
        """The federated graph as SVG; written to `path` if given."""
        picture = _looks["svg"](self)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(picture)
        return picture

    def _repr_svg_(self) -> str:
        return self.draw()

    def _repr_html_(self) -> str:
        return _looks["html"](self)

    def __str__(self) -> str:
        return _looks["text"](self)

    __repr__ = __str__


def _total(
    graph: Graph, measure: Callable[[Exchange], float], unknown: float = 1, together: bool = False
) -> float:
    """A measure of exchanges, added up over the whole run. `together`: those of one round count
    as one."""

    def of(graph: Graph, inside: list[list[float]]) -> float:
        result: float = 0
        for equation, bodies in zip(graph.equations, inside, strict=True):
            if isinstance(equation, Round):
                found = [float(measure(x)) for x in equation.exchanges]
                result += max(found, default=0) if together else sum(found)
            elif bodies:
                result += equation.repeated(bodies, unknown)
        return result

    return fold(graph, of)


def _client_memory(graph: Graph, placement: str) -> int:
    """Bytes that a client keeps from one round for a later one, at most."""

    def of(graph: Graph, inside: list[list[int]]) -> int:
        made: dict[Value, int] = {}
        last_read: dict[Value, int] = {}
        in_loops: list[int] = []
        pairs = [(e, b) for e, b in zip(graph.equations, inside, strict=True) if e.bodies]
        for i, (equation, bodies) in enumerate(pairs):
            mine = [v for v in equation.outputs if v.at == placement]
            last_read.update((v, i) for v in equation.inputs)
            made.update((v, i) for v in mine)
            # What a client carries from one iteration to the next, and keeps within one.
            carried = 0 if equation.kind == "cond" or not bodies else sum(v.bytes for v in mine)
            in_loops.append(max(bodies, default=0) + carried)
        kept = [
            sum(v.bytes for v, start in made.items() if start <= i < last_read.get(v, -1))
            for i in range(len(pairs))
        ]
        return max((a + b for a, b in zip(kept, in_loops, strict=True)), default=0)

    return fold(graph, of)


_looks: dict[str, Callable[[Plan], str]] = {}


def install_looks(**looks: Callable[[Plan], str]) -> None:
    """Called once, by fedgrad.show, with `text`, `svg` and `html`: a plan is data and does not know
    how it is shown."""
    _looks.update(looks)


@public
def plan(program: Program, *args: Any, **kwargs: Any) -> Plan:
    """The plan of a program for these arguments: arrays, cohorts or `jax.ShapeDtypeStruct`."""
    if not isinstance(program, Program):
        raise ArgumentError.here(
            f"fg.plan takes a program, got {program!r}. Decorate it with @fg.program(...)."
        )
    return ready_plan(program, read_arguments(program, program.bind(args, kwargs)))


def ready_plan(
    program: Program,
    arguments: Arguments,
    recompute: bool = False,
    aggregator: Aggregator | None = None,
) -> Plan:
    """The plan of a program as it is run. `recompute`: clients remember nothing between rounds.
    `aggregator`: how sums are computed; by default as the program's executor does."""
    traced = trace(program, arguments)
    again = recompute or traced.recompute
    default: Aggregator = getattr(program.executor, "aggregator", plain)
    how = aggregator or default
    # What was cut to be priced is what is run, if clients remember as they did then.
    graph = traced.plan if again == traced.recompute else None
    graph = graph or cut(traced.graph, again)
    return Plan(
        program.name,
        graph if how is plain else how.applied(graph),
        arguments.clients,
        traced.outputs,
        traced.rules,
        again,
    )
