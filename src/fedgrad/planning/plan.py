"""The plan of a program: frozen data, from which everything else is read. Traffic, rounds and
client memory are computed here; the audit and the server's costs in the files beside."""

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
    """The traffic of one client of a placement in one round."""

    round: int
    placement: str
    down: int  # scalars
    up: int
    down_bytes: int
    up_bytes: int
    times: int | None = 1  # how often this round happens; None if it depends on data


@public
@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """The plan of a program, round by round. `str(plan)` and `plan.draw()` show it."""

    name: str
    graph: Graph
    clients: dict[str, int]
    outputs: Any = field(repr=False)  # the pytree structure of the result
    rules: tuple[str, ...] = ()  # of a derivative, for each active round: "push", "local", "pull"
    recompute: bool = False  # clients recompute instead of remembering

    @property
    def rounds(self) -> int:
        """The number of communication rounds. A loop whose trip count depends on data counts as one
        iteration, a branch as its longest side."""
        return int(_total(self.graph, lambda x: x.speaks, together=True))

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The traffic of each round and placement."""
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
        """The scalars that one client per placement receives and sends in all rounds, added up."""
        return self._sent(lambda v: v.size)

    @property
    def bytes(self) -> tuple[int, int]:
        """The bytes that one client per placement receives and sends in all rounds, added up."""
        return self._sent(lambda v: v.bytes)

    def _sent(self, measure: Callable[[Value], int]) -> tuple[int, int]:
        down = _total(self.graph, lambda x: sum(measure(v) for v, _ in x.down))
        up = _total(self.graph, lambda x: sum(measure(v) for v, _ in x.up))
        return int(down), int(up)

    @property
    def readdressed(self) -> tuple[str, ...]:
        """The placements whose clients must be addressed in more than one round."""

        return tuple(p for p in self.clients if self.addressed(p) > 1)

    def addressed(self, placement: str) -> float:
        """Return in how many rounds clients of a placement take part (inf: it depends on data)."""
        return _total(self.graph, lambda x: x.placement == placement and x.speaks, math.inf)

    def asked(self, placement: str) -> float:
        """Return in how many rounds clients of a placement are sent something, not only asked for
        something like a count."""
        return _total(self.graph, lambda x: x.placement == placement and bool(x.down), math.inf)

    @property
    def client_memory(self) -> dict[str, int]:
        """The most bytes that a client must keep between rounds, by placement."""
        return {placement: _client_memory(self.graph, placement) for placement in self.clients}

    @functools.cached_property
    def server_memory(self) -> int:
        """The most bytes that the server holds at once, estimated from the shapes."""
        return server.memory(self.graph)

    @functools.cached_property
    def server_work(self) -> int:
        """The server's number of arithmetic operations, estimated from the shapes."""
        return server.work(self.graph)

    @functools.cached_property
    def client_work(self) -> int:
        """The number of arithmetic operations of the client with the most examples, estimated from
        the shapes."""
        return server.client_work(self.graph)

    def audit(self) -> Audit:
        """List every value that leaves a client, with its round and its sum, and the results that
        stay at clients."""
        return audit(self.graph, self.clients, self.outputs)

    def draw(self, path: str | None = None) -> str:
        """Return the federated graph as SVG, and write it to `path` if given."""
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
    """Sum a measure of exchanges over the whole run. With `together`, those of one round count as
    one."""

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
    """Return the most bytes that a client keeps from one round for a later one."""

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
    """Register the renderers `text`, `svg` and `html`. fedgrad.show calls this once, so that a plan
    is data that does not depend on how it is shown."""
    _looks.update(looks)


@public
def plan(program: Program, *args: Any, **kwargs: Any) -> Plan:
    """Return the plan of a program for these arguments. Nothing is run.

    Args:
        program: A program, made with `@fg.program`.
        *args: Its arguments: arrays, cohorts or `jax.ShapeDtypeStruct`.
        **kwargs: Its keyword arguments, likewise.

    Returns:
        An `fg.Plan`: rounds, traffic, memory, audit, and a drawing.
    """
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
    """Return the plan of a program as it is run. With `recompute`, clients remember nothing between
    rounds. `aggregator` defines how sums are computed, by default as in the program's executor."""
    traced = trace(program, arguments)
    again = recompute or traced.recompute
    default: Aggregator = getattr(program.executor, "aggregator", plain)
    how = aggregator or default
    # The plan that was priced is the one that runs, unless `recompute` differs.
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
