"""A program as data, from the trace to the node: values, each at a placement, and equations.

A loop around communication is an equation whose bodies are graphs. So is a round, once a plan has
been made: its bodies are the stages of the clients of each placement.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import numpy as np

from fedgrad.core.control import Control, While, control
from fedgrad.core.errors import ArgumentError, known_fields
from fedgrad.core.primitives import (
    MEAN,
    NOWHERE,
    Primitive,
    broadcast_p,
    round_p,
    scope,
    where,
)

T = TypeVar("T")


@known_fields
@dataclass(frozen=True)
class Placement:
    """A group of clients. `fg.CLIENTS` is the usual one; make others for, say, a loss cohort."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ArgumentError.here(
                f"A placement is named by an identifier, got {self.name!r}. "
                'Write for example fg.Placement("eval").'
            )
        if self.name in ("server", "anywhere", "outer"):
            raise ArgumentError.here(
                f"{self.name!r} is not a client placement. Choose another name."
            )

    def __repr__(self) -> str:
        return f"Placement({self.name!r})"


CLIENTS = Placement("clients")

# Placements of values, as plain names so that they can be parameters of primitives. A value that
# depends on nothing (a constant) is ANYWHERE: every side can make it for itself, at no cost.
SERVER = "server"
ANYWHERE = "anywhere"
# The placement of what a nested program captures: the outer program knows the actual one.
OUTER = "outer"


def is_client(at: str) -> bool:
    return at not in (SERVER, ANYWHERE, OUTER)


@dataclass(frozen=True)
class Origin:
    """A description of a value: a name, or the primitive and the line that made it."""

    name: str = ""  # an argument as the user wrote it, in quotes; empty for a constant
    primitive: str = ""
    source: Any = None
    captured: bool = False  # a server array that the program's code captured

    def __str__(self) -> str:
        if self.primitive:
            line = where(self.source)
            if scope(self.source) == MEAN:
                return f"the result of {MEAN} ({line})"
            if (self.primitive, line) == (broadcast_p.name, NOWHERE):
                return "what the algorithm sends"  # such as the model that a loss receives
            return f"the result of {self.primitive} ({line})"
        return self.name or "a constant"


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the program. Values are compared by identity."""

    aval: Any
    at: str
    origin: Origin = Origin()
    shared: bool = False  # a store of examples that all simulated clients read
    constant: Any = None  # the value itself, if it is known while tracing

    @property
    def size(self) -> int:
        """The number of scalars; a PRNG key counts as its integers."""
        return int(np.prod(self.aval.shape)) * _key_words(self.aval)

    @property
    def bytes(self) -> int:
        if jax.dtypes.issubdtype(self.aval.dtype, jax.dtypes.prng_key):
            return self.size * 4
        return self.size * self.aval.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Equation:
    """`outputs = primitive(inputs)`, at one placement.

    Control flow that contains communication has the graphs of its bodies in `bodies`.
    """

    primitive: Primitive
    params: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    at: str
    source: Any
    effects: bool = False
    indexed: bool = False  # an inner jaxpr uses the client's index, which is the last input
    bodies: tuple["Graph", ...] = ()

    @functools.cached_property
    def control(self) -> Control | None:
        """The layout of control flow; None for anything else, including custom derivatives."""
        return control(self.primitive, self.params)

    @property
    def kind(self) -> str:
        return self.primitive.name

    @property
    def times(self) -> int | None:
        """The number of iterations of a loop; None if it depends on data."""
        return 1 if self.control is None else self.control.times

    def repeated(self, bodies: Sequence[float], unknown: float = 1) -> float:
        """Return a measure of a loop's bodies over all iterations; `unknown` is the number of
        iterations if it depends on data. For a cond, it is the largest of the branches."""
        if self.kind == "cond":
            return max(bodies)
        once = sum(bodies)
        return once * (unknown if self.times is None else self.times) if once else 0

    @property
    def inner(self) -> list[tuple[Value, ...]]:
        """The inputs of each body."""
        return [body.inputs for body in self.bodies]

    @property
    def inputs_at(self) -> list[str]:
        """The placements at which the bodies need the inputs: a constant may start a carry at
        clients."""
        if isinstance(self.control, While):
            cond, body = self.bodies
            return [v.at for v in (*cond.inputs[: self.control.cond_consts], *body.inputs)]
        skip = [v.at for v in self.inputs[:1]] if self.kind == "cond" else []
        return skip + [v.at for v in self.bodies[0].inputs]


@dataclass(frozen=True, eq=False)
class Graph:
    """A checked program: every value has a placement and no equation mixes them."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Value, ...]
    indices: dict[str, Value] = field(default_factory=dict)  # each placement's client index
    opened: tuple[str, ...] = ()  # lines of inlined functions whose custom derivative was dropped

    @property
    def rounds(self) -> Iterator["Round"]:
        return (e for e in self.equations if isinstance(e, Round))

    @property
    def loops(self) -> Iterator[Equation]:
        """The control flow around communication."""
        return (e for e in self.equations if e.bodies and not isinstance(e, Round))

    @property
    def local(self) -> Iterator[Equation]:
        """The equations without communication: in a plan, those of the server."""
        return (e for e in self.equations if not e.bodies)


@dataclass(frozen=True, eq=False)
class Exchange:
    """The part of a round that concerns the clients of one placement.

    `down` and `up` are pairs (sent, received): values of the server that become values of the
    client, and values of the client whose sums become values of the server. The stage's inputs
    beyond `down` are the client's own; its outputs beyond `up` stay with the client.
    """

    placement: str
    down: tuple[tuple[Value, Value], ...]
    stage: Graph
    up: tuple[tuple[Value, Value], ...]

    @property
    def speaks(self) -> bool:
        return bool(self.down or self.up)

    @property
    def own(self) -> tuple[Value, ...]:
        """The stage's inputs that were not sent to it in this round."""
        return self.stage.inputs[len(self.down) :]

    @property
    def kept(self) -> tuple[Value, ...]:
        """The values that the stage made (or was sent) and that a later equation needs."""
        return self.stage.outputs[len(self.up) :]

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (*(sent for sent, _ in self.down), *self.own)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return (*(total for _, total in self.up), *self.kept)


@dataclass(frozen=True, eq=False)
class Round(Equation):
    """Exchanges with the clients of one or more placements at the same time."""

    exchanges: tuple[Exchange, ...] = ()

    @staticmethod
    def of(exchanges: Sequence[Exchange]) -> "Round":
        return Round(
            round_p,
            {},
            tuple(v for x in exchanges for v in x.inputs),
            tuple(v for x in exchanges for v in x.outputs),
            SERVER,
            None,
            bodies=tuple(x.stage for x in exchanges),
            exchanges=tuple(exchanges),
        )

    @property
    def speaks(self) -> bool:
        return any(x.speaks for x in self.exchanges)

    def split(self, inputs: Sequence[Any]) -> Iterator[tuple[Exchange, list[Any], list[Any]]]:
        """Yield each exchange, with the values sent down in it and the clients' own values."""
        rest = iter(inputs)
        for x in self.exchanges:
            yield x, [next(rest) for _ in x.down], [next(rest) for _ in x.own]


def fold(graph: Graph, result: Callable[[Graph, list[list[T]]], T]) -> T:
    """Apply `result` to a graph and, for each equation, the results of the loop bodies in it: from
    the inside out."""
    inside = [
        [] if isinstance(e, Round) else [fold(body, result) for body in e.bodies]
        for e in graph.equations
    ]
    return result(graph, inside)


def changed(graph: Graph, change: Callable[[Graph], Graph]) -> Graph:
    """Apply `change` to a graph and to the bodies of its loops."""

    def of(graph: Graph, inside: list[list[Graph]]) -> Graph:
        pairs = zip(graph.equations, inside, strict=True)
        equations = [replace(e, bodies=tuple(bodies)) if bodies else e for e, bodies in pairs]
        return change(replace(graph, equations=tuple(equations)))

    return fold(graph, of)


def inside(loop: Equation) -> list[Graph]:
    """Return the bodies of a loop and of the loops in them, at any depth."""
    return [graph for body in loop.bodies for graph in everywhere(body)]


def everywhere(graph: Graph) -> list[Graph]:
    """Return the graph and the bodies of its loops, at any depth."""
    return fold(graph, lambda g, inside: [g, *(x for e in inside for body in e for x in body)])


Numbered = list[tuple[int, Exchange, int | None]]


def exchanges(graph: Graph) -> Numbered:
    """Return every exchange that sends something: (number of its round, the exchange, how
    often)."""
    return fold(graph, _numbered)


def _numbered(graph: Graph, inside: list[list[Numbered]]) -> Numbered:
    found: Numbered = []
    number = 1
    for equation, bodies in zip(graph.equations, inside, strict=True):
        if isinstance(equation, Round):
            found += [(number, x, 1) for x in equation.exchanges if x.speaks]
            number += equation.speaks
        for body in bodies:
            found += [(number - 1 + n, x, _product(t, equation.times)) for n, x, t in body]
            number = max([number, *(n + 1 for n, _, _ in found)])
    return found


def _product(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b


def needed(
    equations: Sequence[Equation],
    roots: Iterable[Value],
    known: Callable[[Value], bool] = lambda v: False,
    always: Sequence[Equation] = (),
) -> tuple[list[Equation], list[Value]]:
    """Return the equations that `roots` and the equations `always` depend on, in order, stopping at
    known values; and those values."""
    wanted = {v: None for v in roots if v.constant is None}  # a dict keeps the order
    found = {v: None for v in wanted if known(v)}
    kept = []
    for equation in reversed(equations):
        if equation in always or any(v in wanted and v not in found for v in equation.outputs):
            kept.append(equation)
            for v in equation.inputs:
                if v.constant is None:
                    wanted[v] = None
                    if known(v):
                        found[v] = None
    kept.reverse()
    made = {v for equation in kept for v in equation.outputs}
    found.update((v, None) for v in wanted if v not in made)
    return kept, list(found)


def _key_words(aval: Any) -> int:
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return 1
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype))
    return int(np.prod(data.shape))
