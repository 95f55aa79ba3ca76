"""What a drawing of a plan shows, before anyone decides where it goes on the page.

`outline` is the one walk over a plan that the picture and the text share: server work, rounds
with their visits to clients, frames around loops, and links for what stays with a client.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.graph import Equation, Value
from fedgrad.core.placement import ANYWHERE, SERVER, is_client
from fedgrad.core.primitives import Primitive, inner_jaxprs, jax_primitives, where
from fedgrad.plan.plan import Plan
from fedgrad.plan.stages import Exchange, Loop, Steps


@dataclass(frozen=True)
class Size:
    """How much something is, said once in scalars and once in bytes."""

    scalars: int = 0
    bytes: int = 0
    floats: bool = True  # all of them are floating point numbers

    @staticmethod
    def of(values: Iterable[Value]) -> "Size":
        return sum((Size(v.size, v.bytes, _is_float(v)) for v in values), Size())

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
        for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
            if self.bytes >= factor:
                return f"{self.bytes / factor:.1f} {unit}"
        return f"{self.bytes} B"


@dataclass(frozen=True, eq=False)
class Work:
    """A stage: what it is called, if there is a name for it, and how much it does."""

    title: str
    detail: str


@dataclass(frozen=True, eq=False)
class Visit:
    """One round at the clients of one placement."""

    placement: str
    work: Work
    own: tuple[str, ...]  # which of the client's own arguments it reads
    down: Size | None
    up: Size | None


@dataclass(frozen=True, eq=False)
class Round:
    """Visits at the same time; without a number if nobody says anything."""

    number: int | None
    visits: tuple[Visit, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """One body of a loop."""

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


@dataclass(frozen=True, eq=False)
class Link:
    """What a client has from `start` until `end`. A part stands for its own edges: what an
    iteration finds and what it leaves; None for the end of the program."""

    placement: str
    start: Visit | Frame | Part
    end: Visit | Frame | Part | None
    size: Size


@dataclass(frozen=True, eq=False)
class Outline:
    items: tuple[Item, ...]
    links: tuple[Link, ...]
    lanes: dict[str, str]  # placement: its heading
    arguments: dict[str, dict[str, str]]  # their sizes, by placement, then by name
    results: dict[str, dict[str, str]]


def outline(plan: Plan) -> Outline:
    lanes = {SERVER: SERVER} | {p: f"{p} ×{n:,}" for p, n in plan.clients.items()}
    tree = jax.tree.unflatten(plan.outputs, plan.steps.outputs)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    arguments = _sizes(lanes, [(_argument(v), v) for v in plan.steps.inputs])
    results = _sizes(lanes, [(_result(path), v) for path, v in leaves])
    walk = _Walk(plan)
    own = {v: _argument(v) for v in plan.steps.inputs if is_client(v.at)}
    items = walk.steps(plan.steps, own, {}, None)
    return Outline(items, tuple(walk.links), lanes, arguments, results)


def frames(items: Sequence[Item]) -> Iterator[Frame]:
    for item in items:
        if isinstance(item, Frame):
            yield item
            for part in item.parts:
                yield from frames(part.items)


def plural(n: int, word: str) -> str:
    return f"{n:,} {word}" + ("" if n == 1 else "s")


@dataclass
class _Walk:
    plan: Plan
    links: list[Link] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        self.directing = _directing(self.plan.steps)

    def steps(
        self, steps: Steps, own: dict[Value, str], holds: dict[Value, Any], part: Part | None
    ) -> tuple[Item, ...]:
        """`holds`: who has each client value that is not the client's own argument."""
        own = own | dict.fromkeys(steps.indices.values(), "index")
        carried: dict[tuple[Any, Any, str], list[Value]] = {}
        items: list[Item] = []

        def reads(values: Iterable[Value], reader: Any) -> None:
            for v in dict.fromkeys(values):
                if v in holds and holds[v] is not reader:
                    carried.setdefault((holds[v], reader, v.at), []).append(v)
                    holds[v] = reader  # one who reads it still has it for the next

        for step in steps.steps:
            visits = []
            for x in step.exchanges:
                visits.append(visit := self.visit(x, own))
                reads(x.stage.inputs, visit)
                holds.update((v, visit) for v in x.kept)
            if visits:
                speaks = any(x.speaks for x in step.exchanges)
                self.number += speaks
                items.append(Round(self.number if speaks else None, tuple(visits)))
            for loop in step.loops:
                items.append(frame := self.frame(loop, own))
                reads((v for v in loop.equation.inputs if is_client(v.at)), frame)
                holds.update((v, frame) for v in loop.equation.outputs if is_client(v.at))
            if step.server:
                items.append(self.work(step.server, "nothing"))
        reads((v for v in steps.outputs if is_client(v.at)), part)
        self.links += [
            Link(at, start, end, Size.of(values)) for (start, end, at), values in carried.items()
        ]
        return tuple(items)

    def visit(self, x: Exchange, own: dict[Value, str]) -> Visit:
        reads = [own[v] for v in x.stage.inputs if v in own]
        reads += [own[v] for v, _ in x.up if v in own]
        down = Size.of(v for v, _ in x.down) if x.down else None
        up = Size.of(v for v, _ in x.up) if x.up else None
        work = self.work(x.stage.equations, "only sends" if up else "only keeps")
        return Visit(x.placement, work, tuple(dict.fromkeys(reads)), down, up)

    def frame(self, loop: Loop, own: dict[Value, str]) -> Frame:
        parts = []
        for i, body in enumerate(loop.bodies):
            outer = _outer(loop, i)
            inner_own = {
                v: own[o] for v, o in zip(body.inputs, outer, strict=True) if o in own and o
            }
            label = {"cond": f"branch {i}", "while": ("condition", "body")[i % 2]}.get(loop.kind)
            # The part is the edge of its own links, so it must exist before its items do.
            part = Part(label or "", ())
            holds = {v: part for v in body.inputs if is_client(v.at) and v not in inner_own}
            object.__setattr__(part, "items", self.steps(body, inner_own, dict(holds), part))
            parts.append(part)
        label = loop.kind.removesuffix("_call")
        label += f" × {loop.times:,}" if loop.times is not None else ""
        return Frame(label, loop.kind, loop.times, tuple(parts))

    def work(self, equations: Sequence[Equation], nothing: str) -> Work:
        """A stage is called by the outermost functions that do not direct others; one that did
        only little of the work is not worth a name. Without such functions, by its lines."""
        places = [
            (line, functions if e.at != ANYWHERE else [])  # a constant may be of another stage too
            for e in equations
            for line, functions in _places(e.primitive, e.params, e.source)
        ]
        detail = plural(len(places), "operation")
        if not places:
            return Work("", nothing)
        first = [next((f for f in fs if f not in self.directing), None) for _, fs in places]
        names = Counter(_name(f) for f in first if f is not None)
        if names:
            top = [name for name, n in names.most_common(2) if 4 * n >= names.total()]
            return Work(", ".join(name for name in names if name in top), detail)
        files = Counter(file for (file, _), _ in places)
        file = files.most_common(1)[0][0]
        lines = sorted(line for (f, line), _ in places if f == file)
        if not file:
            return Work("", detail)
        span = f"{lines[0]}" if lines[0] == lines[-1] else f"{lines[0]}–{lines[-1]}"
        return Work(f"{file}:{span}", detail)


def _outer(loop: Loop, i: int) -> list[Value | None]:
    """For each input of a body the value outside that it always is, if there is one."""
    inputs: list[Value | None] = list(loop.equation.inputs)
    params = loop.equation.params
    if loop.kind == "cond":
        return inputs[1:]
    if loop.kind == "scan":
        first, n = params["num_consts"], params["num_carry"]
        return inputs[:first] + [None] * n + inputs[first + n :]
    if loop.kind == "while":
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        consts = (inputs[:n_cond], inputs[n_cond : n_cond + n_body])[i]
        return consts + [None] * (len(inputs) - n_cond - n_body)
    return inputs


def _directing(steps: Steps) -> set["Function"]:
    """Functions that name no stage, because they direct several: those that communicate,
    themselves or through what they call, and those that run both at the server and at clients."""
    found = {f for source in _communication(steps) for f in _functions(source)}
    stacks = [(at == SERVER, _functions(source)) for at, source in _placed(steps)]
    while True:
        heads = [(side, next((f for f in fs if f not in found), None)) for side, fs in stacks]
        both = {f for side, f in heads if side} & {f for side, f in heads if not side} - {None}
        if not both:
            return found
        found |= {f for f in both if f is not None}


def _placed(steps: Steps) -> Iterator[tuple[str, Any]]:
    """Where the sources of all equations run."""
    for step in steps.steps:
        stages = [(x.placement, x.stage.equations) for x in step.exchanges]
        for at, equations in [*stages, (SERVER, step.server)]:
            yield from ((at, e.source) for e in equations if e.at != ANYWHERE)
        for body in (body for loop in step.loops for body in loop.bodies):
            yield from _placed(body)


def _communication(steps: Steps) -> Iterator[Any]:
    """The sources of all broadcasts, sums and loops around them."""
    for step in steps.steps:
        pairs = [pair for x in step.exchanges for pair in (*x.down, *x.up)]
        yield from (v.origin[1] for _, v in pairs if isinstance(v.origin, tuple))
        for loop in step.loops:
            yield loop.equation.source
            for body in loop.bodies:
                yield from _communication(body)


Function = tuple[str, str]  # its file and its name
_ROOT = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MACHINERY = (
    os.path.dirname(jax.__file__) + os.sep,
    os.path.dirname(os.__file__) + os.sep + "functools.py",
    os.path.dirname(os.__file__) + os.sep + "contextlib.py",
    *(_ROOT + layer + os.sep for layer in ("core", "plan", "ad", "executors")),
)


def _functions(source: Any) -> list[Function]:
    """The functions that were running when an equation was made, outermost first."""
    stack = getattr(getattr(source, "traceback", None), "frames", ())
    functions = [(f.file_name, f.function_name) for f in reversed(stack)]
    return [f for f in functions if not f[0].startswith(_MACHINERY) and "<" not in _name(f)]


def _name(function: Function) -> str:
    return function[1].rpartition(".")[2]


def _places(
    primitive: Primitive, params: dict[str, Any], source: Any
) -> Iterator[tuple[tuple[str, int], list[Function]]]:
    """The line and the functions of an equation, or of those inside if the user wrote them.

    JAX may trace what is inside once for several callers. So of an inner equation only its own
    function is believed, and of a jitted function's only if the user wrote that: then there are
    equations in a function of its name, whereas JAX's own functions point at whoever called.
    """
    functions = _functions(source)
    inner = [e for jaxpr in inner_jaxprs(params) for e in jaxpr.eqns]
    written = primitive in (jax_primitives.scan_p, jax_primitives.while_p, jax_primitives.cond_p)
    if primitive is jax_primitives.jit_p:
        called = re.findall(r"\w+", str(params.get("name", "")))[-1:]
        makers = [_functions(e.source_info)[-1:] for e in inner]
        written = any([_name(f) for f in maker] == called for maker in makers if maker)
    if not (inner and written):
        yield _line(source), functions
        return
    for e in inner:
        for line, deeper in _places(e.primitive, e.params, e.source_info):
            yield line, functions + deeper[-1:]


def _line(source: Any) -> tuple[str, int]:
    found = re.match(r"(.*?):(\d+)", where(source))
    return (re.split(r"[/\\]", found[1])[-1], int(found[2])) if found else ("", 0)


def _argument(v: Value) -> str:
    return re.split(r"[.\[]", str(v.origin).strip('"'))[0] or "a constant"


def _result(path: Sequence[Any]) -> str:
    if not path:
        return "result"
    key = jax.tree_util.keystr(tuple(path[:1]), simple=True)
    key = "".join(c if c.isprintable() else "?" for c in key)  # a key of the user's can be anything
    return f"result[{key}]" if key.isdigit() else key


def _sizes(lanes: Iterable[str], named: Sequence[tuple[str, Value]]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, list[Value]]] = {lane: {} for lane in lanes}
    for name, v in named:
        found[v.at if is_client(v.at) else SERVER].setdefault(name, []).append(v)
    return {
        lane: {
            # A store that simulated clients share says nothing about how much one of them has.
            name: "examples" if any(v.shared for v in values) else Size.of(values).count
            for name, values in names.items()
        }
        for lane, names in found.items()
    }


def _is_float(v: Value) -> bool:
    return bool(jnp.issubdtype(v.aval.dtype, jnp.inexact))
