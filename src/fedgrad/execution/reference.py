"""The definition of a program's meaning: a plain Python loop over steps, clients and rounds.

It is slow and meant to be read. Every other executor is tested against it.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.aggregate.aggregator import Aggregator, plain
from fedgrad.aggregate.sums import in_order
from fedgrad.core.arguments import read_arguments
from fedgrad.core.errors import known_fields_of
from fedgrad.core.evaluate import AT_CLIENT, Walk, bodies, evaluate, read
from fedgrad.core.graph import Equation, Exchange, Graph, Value, is_client
from fedgrad.core.program import Program
from fedgrad.planning.plan import ready_plan

# Called for each client in each round with (placement, client, values sent down, values sent up).
Observer = Callable[[str, int, list[Any], list[Any]], None]


@known_fields_of("reference")
@dataclass(frozen=True)
class Reference:
    """Runs clients one after another in Python.

    Args:
        observe: Called with everything that is sent: `observe(placement, client, down, up)`.
        recompute: Whether clients keep nothing between rounds, but compute it again.
        aggregator: How sums are computed.
    """

    observe: Observer | None = None
    recompute: bool = False
    aggregator: Aggregator = field(default=plain, repr=False)

    def compile(self, program: Program) -> Callable[[dict[str, Any]], Any]:
        """Return the program as a function of its arguments by name."""

        def run(arguments: dict[str, Any]) -> Any:
            args = read_arguments(program, arguments)
            plan = ready_plan(program, args, self.recompute, self.aggregator)
            walk = _OneByOne(args.clients, args.indices, self.observe)
            inputs = [walk.split(v, leaf) for v, leaf in zip(args.values, args.leaves, strict=True)]
            outputs = walk.run(plan.graph, inputs)
            places = [v.at for v in plan.graph.outputs]
            results = [
                _stack(x) if is_client(p) else x for p, x in zip(places, outputs, strict=True)
            ]
            return jax.tree.unflatten(plan.outputs, results)

        return run


class InPython(Walk):
    """A walk that runs loops in Python, one iteration after another."""

    @abstractmethod
    def row(self, x: Any, i: int) -> Any:
        """Return row `i` of an array that a scan iterates over, of the server or of each client."""

    @abstractmethod
    def stacked(self, rows: Sequence[Any]) -> Any:
        """Stack iterations into one array, of the server or of each client."""

    def iteration(self, body: Graph, inputs: list[Any], i: int | None, at: Any) -> list[Any]:
        """Run one iteration of a loop; `i` is None if the trip count depends on data."""
        return self.run(body, inputs, at)

    def loop(self, loop: Equation, inputs: list[Any]) -> list[Any]:
        assert loop.control is not None
        run = self.run if loop.kind == "cond" else self.iteration
        outputs = loop.control.in_python(inputs, bodies(loop, run), self)
        return [*outputs, *map(self._nothing, loop.outputs[len(outputs) :])]

    def _nothing(self, value: Value) -> Any:
        """Return the stacked result of zero iterations."""
        empty = jnp.zeros(value.aval.shape, value.aval.dtype)
        return self.at_clients(empty, value.at) if is_client(value.at) else empty


@dataclass(frozen=True, eq=False)
class _OneByOne(InPython):
    """Represents a client value as a list with one entry per client."""

    clients: dict[str, int]
    indices: dict[str, Any]
    observe: Observer | None

    def split(self, value: Value, x: Any) -> Any:
        if not is_client(value.at):
            return jnp.asarray(x)
        n = self.clients[value.at]
        return [x] * n if value.shared else [jnp.asarray(x)[i] for i in range(n)]

    def index(self, placement: str) -> Any:
        known = self.indices.get(placement)
        n = self.clients[placement]
        return [jnp.int32(i if known is None else known[i]) for i in range(n)]

    def at_clients(self, x: Any, placement: str) -> Any:
        return [x] * self.clients[placement]

    def exchange(self, exchange: Exchange, sent: list[Any], own: list[Any]) -> list[Any]:
        stage, results = exchange.stage, []
        for i in range(self.clients[exchange.placement]):
            mine = [x[i] if is_client(v.at) else x for v, x in zip(exchange.own, own, strict=True)]
            client = dict(zip(stage.inputs, [*sent, *mine], strict=True))
            evaluate(stage.equations, client, AT_CLIENT)
            results.append([read(client, v) for v in stage.outputs])
            if self.observe:
                self.observe(exchange.placement, i, sent, results[-1][: len(exchange.up)])
        columns = list(zip(*results, strict=True))
        kept = columns[len(exchange.up) :]
        return [*map(_sum, columns[: len(exchange.up)]), *map(list, kept)]

    def row(self, x: Any, i: int) -> Any:
        return [c[i] for c in x] if isinstance(x, list) else x[i]

    def stacked(self, rows: Sequence[Any]) -> Any:
        if isinstance(rows[0], list):
            return [_stack(of_client) for of_client in zip(*rows, strict=True)]
        return _stack(rows)


def _sum(column: Any) -> Any:
    return in_order([jnp.asarray(x) for x in column])


def _stack(column: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *column)
