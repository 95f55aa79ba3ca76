"""The content of a drawing of a plan, before its layout.

`outline` is the single walk over a plan that the picture and the text share: server work, rounds
with their visits to clients, frames around loops, and links for values that stay with a client.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any, TypeVar

import jax

from fedgrad.ad.rules import differentiable
from fedgrad.core import graph as core
from fedgrad.core.graph import SERVER, Equation, Exchange, Graph, Value, is_client
from fedgrad.planning.plan import Plan
from fedgrad.show.naming import Work, directing, stage_work
from fedgrad.show.numbers import memory, plural


@dataclass(frozen=True)
class Size:
    """An amount of data, in scalars and in bytes."""

    scalars: int = 0
    bytes: int = 0
    floats: bool = True  # whether all are floating-point numbers

    @staticmethod
    def of(values: Iterable[Value]) -> "Size":
        return sum((Size(v.size, v.bytes, differentiable(v)) for v in values), Size())

    def __add__(self, other: "Size") -> "Size":
        floats = self.floats and other.floats
        return Size(self.scalars + other.scalars, self.bytes + other.bytes, floats)

    def __mul__(self, times: int) -> "Size":
        return Size(self.scalars * times, self.bytes * times, self.floats)

    @property
    def count(self) -> str:
        return plural(self.scalars, "float" if self.floats else "scalar")

    @property
    def memory(self) -> str:
        return memory(self.bytes)


@dataclass(frozen=True, eq=False)
class Visit:
    """One round at the clients of one placement."""

    placement: str
    work: Work
    own: tuple[str, ...]  # the client's own arguments that it reads
    down: Size | None
    up: Size | None


@dataclass(frozen=True, eq=False)
class Round:
    """Simultaneous visits. The number is None if nothing is communicated."""

    number: int | None
    visits: tuple[Visit, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """One body of a loop, or one branch of a cond."""

    label: str
    items: tuple["Work | Round | Frame", ...]


@dataclass(frozen=True, eq=False)
class Frame:
    """Control flow around communication."""

    label: str
    kind: str
    times: int | None
    parts: tuple[Part, ...]


Item = Work | Round | Frame
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Link:
    """Data that a client holds from `start` until `end`. A `Part` stands for its own boundary: the
    values that enter or leave an iteration. None is the end of the program."""

    placement: str
    start: Visit | Frame | Part
    end: Visit | Frame | Part | None
    size: Size


@dataclass(frozen=True, eq=False)
class Outline:
    items: tuple[Item, ...]
    links: tuple[Link, ...]
    lanes: dict[str, str]  # headings by placement
    arguments: dict[str, dict[str, str]]  # sizes by placement, then by name
    results: dict[str, dict[str, str]]


def outline(plan: Plan) -> Outline:
    lanes = {SERVER: SERVER} | {p: f"{p} ×{n:,}" for p, n in plan.clients.items()}
    tree = jax.tree.unflatten(plan.outputs, plan.graph.outputs)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    arguments = _sizes(lanes, [(_argument(v), v) for v in plan.graph.inputs])
    results = _sizes(lanes, [(_result(tree, path), v) for path, v in leaves])
    walk = _Walk(plan)
    own = {v: _argument(v) for v in plan.graph.inputs if is_client(v.at)}
    items = core.fold(plan.graph, walk.drawn)(own, {}, None)
    return Outline(items, tuple(walk.links), lanes, arguments, results)


def inside(items: Sequence[Item], kind: type[T]) -> Iterator[T]:
    """Yield all items of one kind, including those inside frames."""
    for item in items:
        if isinstance(item, kind):
            yield item
        for part in item.parts if isinstance(item, Frame) else ():
            yield from inside(part.items, kind)


# Draws a graph, given what its clients hold: (own, holds, part).
Drawn = Callable[[dict[Value, str], dict[Value, Any], Part | None], tuple[Item, ...]]


@dataclass
class _Walk:
    plan: Plan
    links: list[Link] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.directing = directing(self.plan.graph)

    def drawn(self, graph: Graph, inside: list[list[Drawn]]) -> Drawn:
        return partial(self.items, graph, inside)

    def items(
        self,
        graph: Graph,
        inside: list[list[Drawn]],
        own: dict[Value, str],
        holds: dict[Value, Any],
        part: Part | None,
    ) -> tuple[Item, ...]:
        """Draw a graph. `holds` maps each client value that is not an own argument to its last
        holder."""
        frames = dict(zip(graph.equations, inside, strict=True))
        own = own | dict.fromkeys(graph.indices.values(), "index")
        carried: dict[tuple[Any, Any, str], list[Value]] = {}
        items: list[Item] = []

        def reads(values: Iterable[Value], reader: Any) -> None:
            for v in dict.fromkeys(values):
                if v in holds and holds[v] is not reader:
                    carried.setdefault((holds[v], reader, v.at), []).append(v)
                    holds[v] = reader  # a reader passes the value on to the next reader

        for local, group in itertools.groupby(graph.equations, lambda e: not e.bodies):
            if local:
                items.append(stage_work(self.directing, list(group), "nothing"))
            for equation in () if local else group:
                if isinstance(equation, core.Round):
                    visits = [self.visit(x, own) for x in equation.exchanges]
                    for x, visit in zip(equation.exchanges, visits, strict=True):
                        reads(x.stage.inputs, visit)
                        holds.update((v, visit) for v in x.kept)
                    self.number += equation.speaks
                    items.append(Round(self.number if equation.speaks else None, tuple(visits)))
                else:
                    items.append(frame := self.frame(equation, frames[equation], own))
                    reads((v for v in equation.inputs if is_client(v.at)), frame)
                    holds.update((v, frame) for v in equation.outputs if is_client(v.at))
        reads((v for v in graph.outputs if is_client(v.at)), part)
        self.links += [
            Link(at, start, end, Size.of(values)) for (start, end, at), values in carried.items()
        ]
        return tuple(items)

    def visit(self, x: Exchange, own: dict[Value, str]) -> Visit:
        reads = [own[v] for v in x.stage.inputs if v in own]
        reads += [own[v] for v, _ in x.up if v in own]
        down = Size.of(v for v, _ in x.down) if x.down else None
        up = Size.of(v for v, _ in x.up) if x.up else None
        work = stage_work(self.directing, x.stage.equations, "only sends" if up else "only keeps")
        return Visit(x.placement, work, tuple(dict.fromkeys(reads)), down, up)

    def frame(self, loop: Equation, bodies: list[Drawn], own: dict[Value, str]) -> Frame:
        parts = []
        for i, (items, inputs) in enumerate(zip(bodies, loop.inner, strict=True)):
            outer = _outer(loop, i)
            inner_own = {v: own[o] for v, o in zip(inputs, outer, strict=True) if o in own and o}
            label = {"cond": f"branch {i}", "while": ("condition", "body")[i % 2]}.get(loop.kind)
            # The links of a part refer to it, so it must exist before its items do.
            part = Part(label or "", ())
            holds = {v: part for v in inputs if is_client(v.at) and v not in inner_own}
            object.__setattr__(part, "items", items(inner_own, dict(holds), part))
            parts.append(part)
        label = loop.kind.removesuffix("_call")
        label += f" × {loop.times:,}" if loop.times is not None else ""
        return Frame(label, loop.kind, loop.times, tuple(parts))


def _outer(loop: Equation, i: int) -> list[Value | None]:
    """Return, for each input of a body, the outer value that it equals in every iteration, if
    any."""
    inputs = loop.inputs
    return list(inputs) if loop.control is None else loop.control.seen(inputs)[i]


def _argument(v: Value) -> str:
    return re.split(r"[.\[]", v.origin.name.strip('"'))[0] or "a constant"


def _result(tree: Any, path: Sequence[Any]) -> str:
    if not path:
        return "result"
    part = tree[path[0].idx] if isinstance(tree, tuple) and hasattr(path[0], "idx") else None
    if is_dataclass(part) and not isinstance(part, Value):  # e.g. `TunedState` is called "state"
        return re.findall("[A-Z]?[^A-Z]*", type(part).__name__)[-2].lower()
    key = jax.tree_util.keystr(tuple(path[:1]), simple=True)
    key = "".join(c if c.isprintable() else "?" for c in key)  # users' keys can be anything
    return f"result[{key}]" if key.isdigit() else key


def _sizes(lanes: Iterable[str], named: Sequence[tuple[str, Value]]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, list[Value]]] = {lane: {} for lane in lanes}
    for name, v in named:
        found[v.at if is_client(v.at) else SERVER].setdefault(name, []).append(v)
    return {
        lane: {
            # Simulated clients share one store, so its size is not the size of a client's data.
            name: "examples" if any(v.shared for v in values) else Size.of(values).count
            for name, values in names.items()
        }
        for lane, names in found.items()
    }
