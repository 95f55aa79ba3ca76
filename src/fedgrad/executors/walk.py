"""Walking through a plan: what all executors that run in this process have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from fedgrad.core.control import Cond, Scan, While
from fedgrad.core.graph import Value, evaluate, read
from fedgrad.core.placement import is_client
from fedgrad.core.primitives import jax_primitives
from fedgrad.plan.stages import Exchange, Loop, Step, Steps

Env = dict[Value, Any]


class Walk(ABC):
    """Runs the steps of a plan in order. `env` holds server values as they are, and client values
    in whatever form the subclass keeps all clients' values in."""

    def run(
        self, steps: Steps, inputs: Sequence[Any], at: Sequence[str] | None = None
    ) -> list[Any]:
        """The outputs of a plan, or of a loop's body, whose outputs must be at the places `at`."""
        env: Env = dict(zip(steps.inputs, inputs, strict=True))
        env.update((v, self.index(placement)) for placement, v in steps.indices.items())
        for step in steps.steps:
            self.exchanges(step, env)
            for loop in step.loops:
                self.loop(loop, env)
            self.server(step, env)
        places = at or [v.at for v in steps.outputs]
        return [self.placed(env, v, p) for v, p in zip(steps.outputs, places, strict=True)]

    def exchanges(self, step: Step, env: Env) -> None:
        """All exchanges of a step."""
        for exchange in step.exchanges:
            self.exchange(exchange, env)

    def server(self, step: Step, env: Env) -> None:
        """What the server does in a step."""
        evaluate(step.server, env)

    def placed(self, env: Env, value: Value, at: str) -> Any:
        """A value in the form in which its place wants it: a constant may be wanted at clients."""
        x = read(env, value)
        return self.at_clients(x, at) if is_client(at) and not is_client(value.at) else x

    def loop(self, loop: Loop, env: Env) -> None:
        equation = loop.equation
        inputs = [
            self.placed(env, v, at) for v, at in zip(equation.inputs, loop.inputs_at, strict=True)
        ]
        run = {
            jax_primitives.scan_p: self.scan,
            jax_primitives.while_p: self.while_,
            jax_primitives.cond_p: self.cond,
        }[equation.primitive]
        env.update(zip(equation.outputs, run(loop, inputs), strict=True))

    @abstractmethod
    def index(self, placement: str) -> Any:
        """Every client's index."""

    @abstractmethod
    def at_clients(self, x: Any, placement: str) -> Any:
        """A constant as all clients have it."""

    @abstractmethod
    def exchange(self, exchange: Exchange, env: Env) -> None:
        """Send down, run the client stage, and sum up; adds to `env`."""

    @abstractmethod
    def scan(self, loop: Loop, inputs: list[Any]) -> list[Any]: ...

    @abstractmethod
    def while_(self, loop: Loop, inputs: list[Any]) -> list[Any]: ...

    @abstractmethod
    def cond(self, loop: Loop, inputs: list[Any]) -> list[Any]: ...


class InPython(Walk):
    """Loops run here, one iteration after another."""

    @abstractmethod
    def row(self, x: Any, i: int) -> Any:
        """A row of what a scan goes over: of the server's array, or of each client's."""

    @abstractmethod
    def stacked(self, rows: Sequence[Any]) -> Any:
        """Iterations as one array: of the server, or of each client."""

    def iteration(self, i: int | None, body: Steps, inputs: list[Any], at: Any = None) -> list[Any]:
        """One iteration of a loop; `i` is None where the data decide how many there are."""
        return self.run(body, inputs, at)

    def scan(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        scan, body = loop.control, loop.bodies[0]
        assert isinstance(scan, Scan)
        consts, carry, xs = scan.split(inputs)
        rows: list[list[Any]] = [[] for _ in scan.order]
        for i in scan.order:
            now = [self.row(x, i) for x in xs]
            out = self.iteration(i, body, [*consts, *carry, *now], _places(loop))
            carry, rows[i] = scan.split_outputs(out)
        if not rows:  # the shapes are known, the rows are none
            return [*carry, *map(self._nothing, loop.equation.outputs[scan.carry :])]
        return [*carry, *[self.stacked(column) for column in zip(*rows, strict=True)]]

    def while_(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        assert isinstance(loop.control, While)
        of_cond, of_body, carry = loop.control.split(inputs)
        cond, body = loop.bodies
        while self.iteration(None, cond, [*of_cond, *carry])[0]:
            carry = self.iteration(None, body, [*of_body, *carry], _places(loop))
        return carry

    def cond(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        assert isinstance(loop.control, Cond)
        branch = loop.bodies[loop.control.chosen(inputs[0])]
        return self.run(branch, inputs[1:], _places(loop))

    def _nothing(self, value: Value) -> Any:
        empty = jnp.zeros(value.aval.shape, value.aval.dtype)
        return self.at_clients(empty, value.at) if is_client(value.at) else empty


def _places(loop: Loop) -> list[str]:
    return [v.at for v in loop.equation.outputs]
