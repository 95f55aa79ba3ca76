"""Evaluating a plan for all clients: what all executors have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from fedgrad.core.evaluate import Env, bodies, evaluate, read
from fedgrad.core.graph import Equation, Exchange, Graph, Round, Value
from fedgrad.core.placement import is_client


class Walk(ABC):
    """Runs a plan. Server values are as they are, and client values in whatever form the subclass
    keeps all clients' values in."""

    def run(
        self, graph: Graph, inputs: Sequence[Any], at: Sequence[str] | None = None
    ) -> list[Any]:
        """The outputs of a plan, or of a loop's body, whose outputs must be at the places `at`."""
        env: Env = dict(zip(graph.inputs, inputs, strict=True))
        env.update((v, self.index(placement)) for placement, v in graph.indices.items())
        evaluate(graph.equations, env, with_bodies=self.with_bodies)
        outputs = [read(env, v) for v in graph.outputs]
        return self.placed(graph.outputs, outputs, at or [v.at for v in graph.outputs])

    def with_bodies(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        """The outputs of a round or a loop."""
        if isinstance(equation, Round):
            return self.round(equation, inputs)
        return self.loop(equation, self.placed(equation.inputs, inputs, equation.inputs_at))

    def round(self, equation: Round, inputs: list[Any]) -> list[Any]:
        """The outputs of all exchanges of a round."""
        return [y for x, sent, own in equation.split(inputs) for y in self.exchange(x, sent, own)]

    def placed(self, values: Sequence[Value], xs: Sequence[Any], at: Sequence[str]) -> list[Any]:
        """Values in the form that their places want: a constant may be wanted at clients."""
        return [
            self.at_clients(x, place) if is_client(place) and not is_client(v.at) else x
            for v, x, place in zip(values, xs, at, strict=True)
        ]

    @abstractmethod
    def index(self, placement: str) -> Any:
        """Every client's index."""

    @abstractmethod
    def at_clients(self, x: Any, placement: str) -> Any:
        """A constant as all clients have it."""

    @abstractmethod
    def exchange(self, exchange: Exchange, sent: list[Any], own: list[Any]) -> list[Any]:
        """Send down, run the client stage, and sum up: the sums, and what clients keep."""

    @abstractmethod
    def loop(self, loop: Equation, inputs: list[Any]) -> list[Any]:
        """Run the bodies of a loop."""


class InPython(Walk):
    """Loops run here, one iteration after another."""

    @abstractmethod
    def row(self, x: Any, i: int) -> Any:
        """A row of what a scan goes over: of the server's array, or of each client's."""

    @abstractmethod
    def stacked(self, rows: Sequence[Any]) -> Any:
        """Iterations as one array: of the server, or of each client."""

    def iteration(self, body: Graph, inputs: list[Any], i: int | None, at: Any) -> list[Any]:
        """One iteration of a loop; `i` is None where the data decide how many there are."""
        return self.run(body, inputs, at)

    def loop(self, loop: Equation, inputs: list[Any]) -> list[Any]:
        assert loop.control is not None
        run = self.run if loop.kind == "cond" else self.iteration
        return loop.control.in_python(inputs, bodies(loop, run), _Rows(self, loop.outputs))


@dataclass(frozen=True, eq=False)
class _Rows:
    walk: InPython
    outputs: Sequence[Value]

    def row(self, x: Any, i: int) -> Any:
        return self.walk.row(x, i)

    def stacked(self, rows: Sequence[Any]) -> Any:
        return self.walk.stacked(rows)

    def nothing(self, output: int) -> Any:
        value = self.outputs[output]
        empty = jnp.zeros(value.aval.shape, value.aval.dtype)
        return self.walk.at_clients(empty, value.at) if is_client(value.at) else empty
