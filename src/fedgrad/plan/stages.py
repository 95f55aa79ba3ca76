"""A plan as data: steps, and in them exchanges with clients, loops, and the server's work."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from fedgrad.core.control import Control, While, control
from fedgrad.core.graph import Equation, Value


@dataclass(frozen=True, eq=False)
class Stage:
    """Local work: equations, what they read and what they give."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class Exchange:
    """One round with the clients of one placement.

    `down` and `up` are pairs (sent, received): values of the server that become values of the
    client, and values of the client whose sums become values of the server. The stage's inputs
    beyond `down` are the client's own; its outputs beyond `up` stay with the client.
    """

    placement: str
    down: tuple[tuple[Value, Value], ...]
    stage: Stage
    up: tuple[tuple[Value, Value], ...]

    @property
    def speaks(self) -> bool:
        return bool(self.down or self.up)

    @property
    def own(self) -> tuple[Value, ...]:
        """What the stage reads that was not sent to it in this round."""
        return self.stage.inputs[len(self.down) :]

    @property
    def kept(self) -> tuple[Value, ...]:
        """What the stage makes (or was sent) that a later step needs."""
        return self.stage.outputs[len(self.up) :]


@dataclass(frozen=True, eq=False)
class Loop:
    """Control flow around communication: its bodies are plans."""

    equation: Equation
    bodies: tuple["Steps", ...]

    @property
    def kind(self) -> str:
        return self.equation.primitive.name

    @functools.cached_property
    def control(self) -> Control | None:
        """How the equation is laid out; None of a function with a custom derivative."""
        return control(self.equation.primitive, self.equation.params)

    @property
    def inputs_at(self) -> list[str]:
        """Where the bodies want the inputs: a constant may start a carry that lives at clients."""
        if isinstance(self.control, While):
            cond, body = self.bodies
            return [v.at for v in (*cond.inputs[: self.control.cond_consts], *body.inputs)]
        skip = [v.at for v in self.equation.inputs[:1]] if self.kind == "cond" else []
        return skip + [v.at for v in self.bodies[0].inputs]

    @property
    def times(self) -> int | None:
        """How often the body runs; None where the data decide."""
        return 1 if self.control is None else self.control.times


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a plan: exchanges (all in one round), then loops, then the server's work."""

    exchanges: tuple[Exchange, ...]
    loops: tuple[Loop, ...]
    server: tuple[Equation, ...]


@dataclass(frozen=True, eq=False)
class Steps:
    """A cut graph: the steps of a program or of a loop's body."""

    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Value, ...]
    indices: dict[str, Value] = field(default_factory=dict)


def exchanges(
    steps: Steps, first: int = 1, times: int | None = 1
) -> Iterator[tuple[int, Exchange, int | None]]:
    """Every exchange that sends something: (number of its round, the exchange, how often)."""
    number = first
    for step in steps.steps:
        speaking = [x for x in step.exchanges if x.speaks]
        yield from ((number, x, times) for x in speaking)
        number += bool(speaking)
        for loop in step.loops:
            inner = None if times is None or loop.times is None else times * loop.times
            for body in loop.bodies:
                found = list(exchanges(body, number, inner))
                yield from found
                number = max([number, *(n + 1 for n, _, _ in found)])
