"""The definition of what a program means: a plain Python loop over steps, clients and rounds.

It is slow and it is meant to be read. Every other executor is tested against it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.control import Cond, Scan, While
from fedgrad.core.graph import Value, read
from fedgrad.core.placement import is_client
from fedgrad.core.program import Program
from fedgrad.core.trace import read_arguments
from fedgrad.executors.clients import wide
from fedgrad.executors.rewrite import evaluate
from fedgrad.executors.walk import Env, Walk
from fedgrad.plan.plan import make_plan
from fedgrad.plan.stages import Exchange, Loop

# Called for each client in each round with (placement, client, values sent down, values sent up).
Observer = Callable[[str, int, list[Any], list[Any]], None]


@dataclass(frozen=True)
class Reference:
    """Runs clients one after another, in Python. `observe` sees everything that is sent."""

    observe: Observer | None = None
    recompute: bool = False

    def compile(self, program: Program) -> Callable[[dict[str, Any]], Any]:
        """The program as a function of its arguments by name."""

        def run(arguments: dict[str, Any]) -> Any:
            args = read_arguments(program, arguments)
            plan = make_plan(program, args, self.recompute)
            walk = _OneByOne(args.clients, args.indices, self.observe)
            inputs = [walk.split(v, leaf) for v, leaf in zip(args.values, args.leaves, strict=True)]
            outputs = walk.run(plan.steps, inputs)
            places = [v.at for v in plan.steps.outputs]
            results = [
                _stack(x) if is_client(p) else x for p, x in zip(places, outputs, strict=True)
            ]
            return jax.tree.unflatten(plan.outputs, results)

        return run


class _OneByOne(Walk):
    """A client value is a list with one entry per client."""

    def __init__(
        self, clients: dict[str, int], indices: dict[str, Any], observe: Observer | None
    ) -> None:
        self.clients, self.indices, self.observe = clients, indices, observe

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

    def exchange(self, exchange: Exchange, env: Env) -> None:
        stage, placement = exchange.stage, exchange.placement
        down = {received: read(env, sent) for sent, received in exchange.down}
        results = []
        for i in range(self.clients[placement]):
            client = {v: env[v][i] if is_client(v.at) else env[v] for v in exchange.own}
            client.update(down)
            evaluate(stage.equations, client)
            results.append([read(client, v) for v in stage.outputs])
            if self.observe:
                up = results[-1][: len(exchange.up)]
                self.observe(placement, i, list(down.values()), up)
        columns = list(zip(*results, strict=True))
        for (_, total), column in zip(exchange.up, columns, strict=False):
            env[total] = _sum(column)
        for kept, column in zip(exchange.kept, columns[len(exchange.up) :], strict=True):
            env[kept] = list(column)

    def scan(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        scan, body = loop.control, loop.bodies[0]
        assert isinstance(scan, Scan)
        consts, carry, xs = scan.split(inputs)
        places = [v.at for v in loop.equation.outputs]
        rows: list[list[Any]] = []
        for i in scan.order:
            now = [[c[i] for c in x] if isinstance(x, list) else x[i] for x in xs]
            out = self.run(body, [*consts, *carry, *now], places)
            carry, row = scan.split_outputs(out)
            rows.append(row)
        if scan.reverse:
            rows.reverse()
        if not rows:  # the shapes are known, the rows are none
            return [*carry, *map(self.nothing, loop.equation.outputs[scan.carry :])]
        return [*carry, *[_stack_rows(column) for column in zip(*rows, strict=True)]]

    def nothing(self, value: Value) -> Any:
        empty = jnp.zeros(value.aval.shape, value.aval.dtype)
        return self.at_clients(empty, value.at) if is_client(value.at) else empty

    def while_(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        assert isinstance(loop.control, While)
        cond_consts, body_consts, carry = loop.control.split(inputs)
        cond, body = loop.bodies
        while self.run(cond, [*cond_consts, *carry])[0]:
            carry = self.run(body, [*body_consts, *carry], [v.at for v in loop.equation.outputs])
        return carry

    def cond(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        assert isinstance(loop.control, Cond)
        branch = loop.bodies[loop.control.chosen(inputs[0])]
        return self.run(branch, inputs[1:], [v.at for v in loop.equation.outputs])


def _sum(column: Any) -> Any:
    dtype = jnp.result_type(column[0])
    return reduce(lambda a, b: a + b, [jnp.asarray(x, wide(dtype)) for x in column]).astype(dtype)


def _stack(column: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *column)


def _stack_rows(column: Any) -> Any:
    """Stack over iterations: of a server value, or of each client's."""
    if isinstance(column[0], list):
        return [_stack(rows) for rows in zip(*column, strict=True)]
    return _stack(column)
