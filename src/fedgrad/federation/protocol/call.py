"""One run of a plan on a federation: the server walks through the plan, nodes run its stages."""

import functools
import uuid
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedgrad.aggregate.sums import in_order
from fedgrad.core.graph import Equation, Exchange, Graph, Round, is_client
from fedgrad.execution.reference import InPython
from fedgrad.federation.protocol.exported import to_data
from fedgrad.federation.protocol.messages import Messages, Work
from fedgrad.federation.protocol.node_values import Place, Remote, Versions, constant, stacked
from fedgrad.federation.protocol.prepared_plan import Prepared
from fedgrad.federation.protocol.provenance.sources import DECIDED
from fedgrad.federation.protocol.stage_program import StageProgram


class Call(InPython):
    """Interpreter of a plan. A client value is a `Place`: where each client finds its own value."""

    def __init__(self, prepared: Prepared, messages: Messages, arguments: Sequence[Place]) -> None:
        self.prepared, self.messages, self.arguments = prepared, messages, arguments
        self.versions = any(isinstance(x, Versions) for x in arguments)
        self.programs: dict[int, dict[Exchange, StageProgram]] = {}  # by client, if they differ
        self.name, self.count = uuid.uuid4().hex, 0
        self.at: tuple[int, ...] = ()  # the current iteration of each enclosing loop
        self.waiting: list[Work] = []  # work that needs no message waits for the next one

    def with_bodies(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        """Run the server's work as compiled; walk through any other equation."""
        work = self.prepared.server.get(equation)
        return super().with_bodies(equation, inputs) if work is None else work(*inputs)

    def round(self, equation: Round, inputs: list[Any]) -> list[Any]:
        """Send all exchanges of a round in one message."""
        works = [self.work(*part) for part in equation.split(inputs)]
        self.waiting += works
        answers: list[Any] = [[] for _ in works]
        if equation.speaks:
            answers = self.send()[-len(works) :]
        return [
            y
            for x, work, answer in zip(equation.exchanges, works, answers, strict=True)
            for y in (*(map(_sum, zip(*answer, strict=True)) if x.up else ()), *work.keep)
        ]

    def index(self, placement: str) -> Any:
        """Return the place of every client's index."""
        return Remote(["index"])

    def at_clients(self, x: Any, placement: str) -> Any:
        """Return a constant as clients see it."""
        return constant(x)

    def exchange(self, exchange: Exchange, sent: list[Any], own: list[Any]) -> list[Any]:
        """Never called: `round` sends all exchanges together."""
        raise AssertionError

    def program(self, exchange: Exchange, client: int) -> StageProgram:
        """Return the program of a stage, as it is sent to a client."""
        client = client if self.versions else 0
        if client not in self.programs:
            sources = [x.of(client).declared for x in self.arguments]
            self.programs[client] = self.prepared.exported.programs(sources)
        return self.programs[client][exchange]

    def work(self, exchange: Exchange, sent: list[Any], own: list[Any]) -> Work:
        """Return the work of an exchange for its clients."""
        freed, any_program = self.prepared.freed[exchange], self.program(exchange, 0)
        places = [
            x if is_client(v.at) else constant(x) for v, x in zip(exchange.own, own, strict=True)
        ]
        return Work(
            placement=exchange.placement,
            program=functools.partial(self.program, exchange),
            sums=any_program.outputs[: any_program.summed],
            at=self.at,
            sent=[np.asarray(to_data(x)) for x in sent],
            own=places,
            keep=[self.kept(exchange, j) for j, _ in enumerate(exchange.kept)],
            free=[x for v, x in zip(exchange.own, own, strict=True) if v in freed],
        )

    def kept(self, exchange: Exchange, output: int) -> Place:
        """Return the place of a value that clients keep, under a unique name."""
        self.count += 1
        name = f"{self.name}/{self.count}"

        def remote(client: int) -> Remote:
            declared = self.program(exchange, client).declared
            return Remote(["kept", name], made=declared.origin(output, self.at).result)

        if not self.versions:
            return remote(0)
        return Versions({c: remote(c) for c in self.messages.groups[exchange.placement].clients})

    def send(self) -> list[Any]:
        """Send the waiting work and return the answers."""
        waiting, self.waiting = self.waiting, []
        return self.messages.send(waiting) if waiting else []

    def iteration(self, body: Graph, inputs: list[Any], i: int | None, at: Any) -> list[Any]:
        """Run one iteration of a loop and record its number, which clients are told."""
        before, self.at = self.at, (*self.at, DECIDED if i is None else i)
        try:
            return self.run(body, inputs, at)
        finally:
            self.at = before

    def row(self, x: Any, i: int) -> Any:
        """Return row i of an array that a scan iterates over."""
        return x.row(i) if isinstance(x, Place) else x[i]

    def stacked(self, rows: Sequence[Any]) -> Any:
        """Stack the values of all iterations into one array."""
        return stacked(rows) if isinstance(rows[0], Place) else jnp.stack(rows)


def _sum(column: Sequence[np.ndarray[Any, Any]]) -> Any:
    return jnp.asarray(in_order(column))
