"""Names stages in a drawing after the functions that did their work, or else after their lines."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fedgrad.core.graph import ANYWHERE, SERVER, Equation, Graph, everywhere
from fedgrad.core.notebook import cell, place
from fedgrad.core.primitives import Primitive, inner_jaxprs, jax_primitives, position
from fedgrad.show.numbers import plural

Function = tuple[str, str]  # file, name
_ROOT = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MACHINERY = (
    os.path.dirname(jax.__file__) + os.sep,
    os.path.dirname(os.__file__) + os.sep + "functools.py",
    os.path.dirname(os.__file__) + os.sep + "contextlib.py",
    *(_ROOT + layer + os.sep for layer in ("core", "planning", "ad", "execution", "show")),
)
_OWN = tuple(_ROOT + room + os.sep for room in ("algorithms", "tuning"))

WORDS = {
    "train": "local training",
    "own": "loss",
    "apply": "step",
    "build": "step",
    "_stacked": "step",
    "follow": "learning",
    "fresh_round": "learning",
    "same_round": "learning",
    "finite": "guard",
}


@dataclass(frozen=True, eq=False)
class Work:
    """A stage: its name, if it has one, and the amount of its work."""

    title: str
    detail: str


def stage_work(directing: set[Function], equations: Sequence[Equation], nothing: str) -> Work:
    """Name a stage after the outermost functions that do not direct other stages, leaving out those
    that did less than a quarter of the work. Without such functions, name it after its lines."""
    places = [
        (line, functions if e.at != ANYWHERE else [])  # other stages may compute the same constant
        for e in equations
        for line, functions in _places(e.primitive, e.params, e.source)
    ]
    detail = plural(len(places), "operation")
    if not places:
        return Work("", nothing)
    first = [next((f for f in fs if f not in directing), None) for _, fs in places]
    names = Counter(_called(f) for f in first if f is not None)
    if names:
        top = [name for name, n in names.most_common(2) if 4 * n >= names.total()]
        return Work(", ".join(name for name in names if name in top), detail)
    files = Counter(file for (file, _), _ in places)
    file = files.most_common(1)[0][0]
    lines = sorted(line for (f, line), _ in places if f == file)
    if not file:
        return Work("", detail)
    span = f"{lines[0]}" if lines[0] == lines[-1] else f"{lines[0]}–{lines[-1]}"
    return Work(place(file if cell(file) else re.split(r"[/\\]", file)[-1], span), detail)


def directing(graph: Graph) -> set["Function"]:
    """Return the functions that cannot name a stage, because they direct several: those that
    communicate, directly or through their callees, and those that run both at the server and at
    clients."""
    found = {f for source in _communication(graph) for f in _functions(source)}
    stacks = [(at == SERVER, _functions(source)) for at, source in _placed(graph)]
    while True:
        heads = [(side, next((f for f in fs if f not in found), None)) for side, fs in stacks]
        both = {f for side, f in heads if side} & {f for side, f in heads if not side} - {None}
        if not both:
            return found
        found |= {f for f in both if f is not None}


def _placed(graph: Graph) -> Iterator[tuple[str, Any]]:
    """Yield the placement and the source of each equation."""
    for part in everywhere(graph):
        stages = [(x.placement, x.stage.equations) for r in part.rounds for x in r.exchanges]
        for at, equations in [*stages, (SERVER, part.local)]:
            yield from ((at, e.source) for e in equations if e.at != ANYWHERE)


def _communication(graph: Graph) -> Iterator[Any]:
    """Yield the sources of all broadcasts, sums and the loops around them."""
    for part in everywhere(graph):
        exchanges = [x for r in part.rounds for x in r.exchanges]
        pairs = [pair for x in exchanges for pair in (*x.down, *x.up)]
        yield from (v.origin.source for _, v in pairs if v.origin.primitive)
        yield from (loop.source for loop in part.loops)


def _functions(source: Any) -> list[Function]:
    """Return the functions on the stack when an equation was made, outermost first."""
    stack = getattr(getattr(source, "traceback", None), "frames", ())
    functions = [(f.file_name, f.function_name) for f in reversed(stack)]
    return [f for f in functions if not f[0].startswith(_MACHINERY) and "<" not in _name(f)]


def _called(function: Function) -> str:
    """Return a short name for a function; internal functions of the library's algorithms get a
    descriptive word."""
    own = function[0].startswith(_OWN)
    return WORDS.get(_name(function), _name(function)) if own else _name(function)


def _name(function: Function) -> str:
    return function[1].rpartition(".")[2]


def _places(
    primitive: Primitive, params: dict[str, Any], source: Any
) -> Iterator[tuple[tuple[str, int], list[Function]]]:
    """Yield the line and the functions of an equation, or of its inner equations if the user wrote
    them.

    JAX may trace an inner jaxpr once for several callers. So for an inner equation only the
    innermost function is trusted, and the inside of a jitted function only if the user wrote that
    function: then some equations come from a function of its name, whereas the equations of JAX's
    own functions point to their callers.
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
    file, line, _ = position(source)
    return (file, int(line)) if line.isdigit() else ("", 0)
