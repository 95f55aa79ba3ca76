"""Walking through a plan: what all executors that run in this process have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from fedgrad.core.graph import Value, evaluate, read
from fedgrad.core.placement import is_client
from fedgrad.core.primitives import jax_primitives
from fedgrad.plan.stages import Exchange, Loop, Steps

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
            for exchange in step.exchanges:
                self.exchange(exchange, env)
            for loop in step.loops:
                self.loop(loop, env)
            evaluate(step.server, env)
        places = at or [v.at for v in steps.outputs]
        return [self.placed(env, v, p) for v, p in zip(steps.outputs, places, strict=True)]

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
