"""One run of a plan on a federation: the server walks through the plan, nodes run its stages."""

import uuid
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedgrad.aggregate.sums import in_order
from fedgrad.core.graph import Equation, Exchange, Graph, Round
from fedgrad.core.placement import is_client
from fedgrad.executors.walk import InPython
from fedgrad.federation.protocol.declared import Declared
from fedgrad.federation.protocol.exported import to_data
from fedgrad.federation.protocol.messages import Messages, Work
from fedgrad.federation.protocol.prepared import Prepared
from fedgrad.federation.protocol.sources import DECIDED
from fedgrad.federation.protocol.values import Remote, constant, stacked


class Call(InPython):
    """A client value is a `Remote`: where each client finds its own."""

    def __init__(self, prepared: Prepared, messages: Messages, arguments: Sequence[Remote]) -> None:
        self.prepared, self.messages = prepared, messages
        self.programs = prepared.exported.programs([x.declared for x in arguments])
        self.name, self.count = uuid.uuid4().hex, 0
        self.at: tuple[int, ...] = ()  # the iterations of the loops that we are in
        self.waiting: list[Work] = []  # what needs no message waits until there is one

    def with_bodies(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        """The server's work is compiled."""
        work = self.prepared.server.get(equation)
        return super().with_bodies(equation, inputs) if work is None else work(*inputs)

    def round(self, equation: Round, inputs: list[Any]) -> list[Any]:
        """All exchanges of a round are one message."""
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
        """Every client's index."""
        return Remote(["index"])

    def at_clients(self, x: Any, placement: str) -> Any:
        """A constant as all clients have it."""
        return constant(x)

    def exchange(self, exchange: Exchange, sent: list[Any], own: list[Any]) -> list[Any]:
        """One exchange is a part of its round's message."""
        raise AssertionError

    def work(self, exchange: Exchange, sent: list[Any], own: list[Any]) -> Work:
        """What clients have to do."""
        freed, program = self.prepared.last_reads.get(exchange, ()), self.programs[exchange]
        remote = [
            x if is_client(v.at) else constant(x) for v, x in zip(exchange.own, own, strict=True)
        ]
        return Work(
            placement=exchange.placement,
            program=program,
            at=self.at,
            sent=[np.asarray(to_data(x)) for x in sent],
            own=remote,
            keep=[self.kept(program.declared, j) for j, _ in enumerate(exchange.kept)],
            free=[x for v, x in zip(exchange.own, own, strict=True) if v in freed],
        )

    def kept(self, by: Declared, output: int) -> Remote:
        self.count += 1
        made = by.origin(output, self.at).result
        return self.messages.federation.kept(f"{self.name}/{self.count}", made)

    def send(self) -> list[Any]:
        """Send what waits; gives what comes back."""
        waiting, self.waiting = self.waiting, []
        return self.messages.send(waiting) if waiting else []

    def iteration(self, i: int | None, body: Graph, inputs: list[Any], at: Any = None) -> list[Any]:
        """Clients are told the number of an iteration."""
        before, self.at = self.at, (*self.at, DECIDED if i is None else i)
        try:
            return self.run(body, inputs, at)
        finally:
            self.at = before

    def row(self, x: Any, i: int) -> Any:
        """A row of what a scan goes over."""
        return x.row(i) if isinstance(x, Remote) else x[i]

    def stacked(self, rows: Sequence[Any]) -> Any:
        """Iterations as one array."""
        return stacked(rows) if isinstance(rows[0], Remote) else jnp.stack(rows)


def _sum(column: Sequence[np.ndarray[Any, Any]]) -> Any:
    return jnp.asarray(in_order(column))
