"""One run of a plan on a federation: the server walks through the plan, nodes run its stages."""

import uuid
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedgrad.core.graph import read
from fedgrad.core.placement import is_client
from fedgrad.executors.clients import wide
from fedgrad.executors.walk import Env, InPython
from fedgrad.federation.protocol.declared import Declared
from fedgrad.federation.protocol.exported import to_data
from fedgrad.federation.protocol.messages import Messages, Work
from fedgrad.federation.protocol.prepared import Prepared
from fedgrad.federation.protocol.sources import DECIDED
from fedgrad.federation.protocol.values import Remote, constant, stacked
from fedgrad.plan.stages import Exchange, Step, Steps


class Call(InPython):
    """A client value is a `Remote`: where each client finds its own."""

    def __init__(self, prepared: Prepared, messages: Messages, arguments: Sequence[Remote]) -> None:
        self.prepared, self.messages = prepared, messages
        self.programs = prepared.exported.programs([x.declared for x in arguments])
        self.name, self.count = uuid.uuid4().hex, 0
        self.at: tuple[int, ...] = ()  # the iterations of the loops that we are in
        self.waiting: list[tuple[Work, Exchange, Env]] = []

    def exchanges(self, step: Step, env: Env) -> None:
        """All exchanges of a step are one message."""
        super().exchanges(step, env)
        if any(exchange.speaks for exchange in step.exchanges):
            self.send()

    def server(self, step: Step, env: Env) -> None:
        """The server's work is compiled."""
        self.prepared.server[step](env)

    def index(self, placement: str) -> Any:
        """Every client's index."""
        return Remote(["index"])

    def at_clients(self, x: Any, placement: str) -> Any:
        """A constant as all clients have it."""
        return constant(x)

    def exchange(self, exchange: Exchange, env: Env) -> None:
        """Note what clients have to do. What needs no message waits until there is one."""
        freed, program = self.prepared.last_reads.get(exchange, ()), self.programs[exchange]
        work = Work(
            placement=exchange.placement,
            program=program,
            at=self.at,
            sent=[np.asarray(to_data(read(env, sent))) for sent, _ in exchange.down],
            own=[env[v] if is_client(v.at) else constant(env[v]) for v in exchange.own],
            keep=[self.kept(program.declared, j) for j, _ in enumerate(exchange.kept)],
            free=[env[v] for v in exchange.own if v in freed],
        )
        env.update(zip(exchange.kept, work.keep, strict=True))
        self.waiting.append((work, exchange, env))

    def kept(self, by: Declared, output: int) -> Remote:
        self.count += 1
        made = by.origin(output, self.at).result
        return self.messages.federation.kept(f"{self.name}/{self.count}", made)

    def send(self) -> None:
        """Send what waits, and sum what comes back."""
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        answers = self.messages.send([work for work, _, _ in waiting])
        for (_, exchange, env), answer in zip(waiting, answers, strict=True):
            for (_, total), column in zip(exchange.up, zip(*answer, strict=True), strict=True):
                env[total] = _sum(column)

    def iteration(self, i: int | None, body: Steps, inputs: list[Any], at: Any = None) -> list[Any]:
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
    """The sum in the order of the cohort, so that the same answers give the same digits."""
    dtype = column[0].dtype
    total = column[0].astype(wide(dtype))
    for x in column[1:]:
        np.add(total, x.astype(total.dtype, copy=False), out=total)
    return jnp.asarray(total.astype(dtype))
