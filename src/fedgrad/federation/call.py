"""One run of a plan on a federation: the server walks through the plan, nodes run its stages."""

import uuid
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedgrad.core.control import Cond, Scan, While
from fedgrad.core.graph import Value, read
from fedgrad.core.placement import is_client
from fedgrad.executors.clients import wide
from fedgrad.executors.walk import Env, Walk
from fedgrad.federation.declared import DECIDED, Declared
from fedgrad.federation.exported import to_data
from fedgrad.federation.messages import Messages, Work
from fedgrad.federation.prepared import Prepared
from fedgrad.federation.values import Remote, constant, stacked
from fedgrad.plan.stages import Exchange, Loop, Steps


class Call(Walk):
    """A client value is a `Remote`: where each client finds its own."""

    def __init__(self, prepared: Prepared, messages: Messages, arguments: Sequence[Remote]) -> None:
        self.prepared, self.messages = prepared, messages
        self.programs = prepared.exported.programs([x.declared for x in arguments])
        self.name, self.count = uuid.uuid4().hex, 0
        self.at: tuple[int, ...] = ()  # the iterations of the loops that we are in
        self.waiting: list[tuple[Work, Exchange, Env]] = []

    def run(
        self, steps: Steps, inputs: Sequence[Any], at: Sequence[str] | None = None
    ) -> list[Any]:
        """As in `Walk`, but all exchanges of a step are one message, and the server's work is
        compiled."""
        env: Env = dict(zip(steps.inputs, inputs, strict=True))
        env.update((v, self.index(placement)) for placement, v in steps.indices.items())
        for step in steps.steps:
            for exchange in step.exchanges:
                self.exchange(exchange, env)
            if any(exchange.speaks for exchange in step.exchanges):
                self.send()
            for loop in step.loops:
                self.loop(loop, env)
            self.prepared.server[step](env)
        places = at or [v.at for v in steps.outputs]
        return [self.placed(env, v, p) for v, p in zip(steps.outputs, places, strict=True)]

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

    # --- loops run here, one iteration after another --------------------------------------

    def inside(self, i: int, body: Steps, inputs: list[Any], at: Any = None) -> list[Any]:
        """One iteration of a loop, of which clients are told the number."""
        before, self.at = self.at, (*self.at, i)
        try:
            return self.run(body, inputs, at)
        finally:
            self.at = before

    def scan(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        scan, body = loop.control, loop.bodies[0]
        assert isinstance(scan, Scan)
        consts, carry, xs = scan.split(inputs)
        places = [v.at for v in loop.equation.outputs]
        rows: list[list[Any]] = []
        for i in scan.order:
            now = [x.row(i) if isinstance(x, Remote) else x[i] for x in xs]
            out = self.inside(i, body, [*consts, *carry, *now], places)
            carry, row = scan.split_outputs(out)
            rows.append(row)
        if scan.reverse:
            rows.reverse()
        if not rows:
            return [*carry, *map(self.nothing, loop.equation.outputs[scan.carry :])]
        return [*carry, *[_stack(column) for column in zip(*rows, strict=True)]]

    def nothing(self, value: Value) -> Any:
        empty = jnp.zeros(value.aval.shape, value.aval.dtype)
        return self.at_clients(empty, value.at) if is_client(value.at) else empty

    def while_(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        assert isinstance(loop.control, While)
        cond_consts, body_consts, carry = loop.control.split(inputs)
        cond, body = loop.bodies
        places = [v.at for v in loop.equation.outputs]
        while self.inside(DECIDED, cond, [*cond_consts, *carry])[0]:
            carry = self.inside(DECIDED, body, [*body_consts, *carry], places)
        return carry

    def cond(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        assert isinstance(loop.control, Cond)
        branch = loop.bodies[loop.control.chosen(inputs[0])]
        return self.run(branch, inputs[1:], [v.at for v in loop.equation.outputs])


def _sum(column: Sequence[np.ndarray[Any, Any]]) -> Any:
    """The sum in the order of the cohort, so that the same answers give the same digits."""
    dtype = column[0].dtype
    total = column[0].astype(wide(dtype))
    for x in column[1:]:
        np.add(total, x.astype(total.dtype, copy=False), out=total)
    return jnp.asarray(total.astype(dtype))


def _stack(rows: Sequence[Any]) -> Any:
    """Iterations as one array: of the server, or of each client."""
    return stacked(rows) if isinstance(rows[0], Remote) else jnp.stack(rows)
