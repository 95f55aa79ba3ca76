"""Estimates, from shapes alone, the server's peak memory and work, and a client's work.

A compiler fuses operations and reuses memory, so the compiled program needs less. What matters is
that a plan whose server keeps a matrix of the model's size squared is priced higher than one whose
server does not.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from fedgrad.core.control import Cond, Scan, control
from fedgrad.core.graph import Equation, Graph, Round, Value, fold, is_client
from fedgrad.core.primitives import JaxprEqn, Literal, inner_jaxprs

# A step: what it reads, what it makes, and the extra bytes that it needs while it runs.
Event = tuple[Sequence[Any], Sequence[Any], float]


def memory(graph: Graph) -> int:
    """Return the most bytes that the server holds at once."""

    def of(graph: Graph, inside: list[list[float]]) -> float:
        events = [
            _event(e, max(b, default=0)) for e, b in zip(graph.equations, inside, strict=True)
        ]
        return _peak(events, _at_server(graph.inputs), _at_server(graph.outputs), lambda v: v.bytes)

    return int(fold(graph, of))


def work(graph: Graph) -> int:
    """Return the server's number of arithmetic operations."""

    def of(graph: Graph, inside: list[list[float]]) -> float:
        pairs = [
            p for p in zip(graph.equations, inside, strict=True) if not isinstance(p[0], Round)
        ]
        return sum(e.repeated(bodies) if bodies else _work(e) for e, bodies in pairs)

    return int(fold(graph, of))


def client_work(graph: Graph) -> int:
    """Return the number of arithmetic operations of the client with the most examples."""

    def of(graph: Graph, inside: list[list[float]]) -> float:
        return sum(map(here, graph.equations, inside))

    def here(equation: Equation, bodies: list[float]) -> float:
        if isinstance(equation, Round):
            return sum(_work(e) for x in equation.exchanges for e in x.stage.equations)
        return equation.repeated(bodies) if bodies else 0

    return int(fold(graph, of))


def _event(equation: Equation, in_loop: float) -> Event:
    besides = in_loop if equation.bodies else _inside(equation)
    return _at_server(equation.inputs), _at_server(equation.outputs), besides


def _at_server(values: Sequence[Value]) -> list[Value]:
    return [v for v in values if not is_client(v.at)]


def _peak(
    events: Sequence[Event],
    inputs: Sequence[Any],
    results: Sequence[Any],
    size: Callable[[Any], float],
) -> float:
    last = {v: i for i, (reads, _, _) in enumerate(events) for v in reads}
    last.update((v, len(events)) for v in results)
    ends: dict[int, list[Any]] = {}
    for v, i in last.items():
        ends.setdefault(i, []).append(v)
    alive = set(inputs)
    now = sum(map(size, alive))
    peak = now
    for i, (_, makes, besides) in enumerate(events):
        for v in makes:
            if v not in alive:
                alive.add(v)
                now += size(v)
        peak = max(peak, now + besides)
        for v in (*ends.get(i, ()), *(v for v in makes if v not in last)):
            if v in alive:
                alive.remove(v)
                now -= size(v)
    return peak


def _inside(equation: Equation | JaxprEqn) -> float:
    """Return the bytes that an equation's inner equations need besides its inputs and outputs."""
    return max((_needs(jaxpr) for jaxpr in inner_jaxprs(equation.params)), default=0)


def _needs(jaxpr: Any) -> float:
    inputs, results = set(jaxpr.invars), {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    events = [
        ([v for v in eqn.invars if not isinstance(v, Literal)], eqn.outvars, _inside(eqn))
        for eqn in jaxpr.eqns
    ]

    def size(v: Any) -> float:
        return 0 if v in inputs or v in results else _bytes(v.aval)

    return _peak(events, jaxpr.invars, list(results), size)


def _bytes(aval: Any) -> int:
    return Value(aval, "").bytes if hasattr(aval, "dtype") else 0


def _work(equation: Equation | JaxprEqn) -> float:
    loop = control(equation.primitive, equation.params)
    inner = [sum(map(_work, jaxpr.eqns)) for jaxpr in inner_jaxprs(equation.params)]
    if inner:
        if isinstance(loop, Cond):
            return max(inner)
        return sum(inner) * (loop.length if isinstance(loop, Scan) else 1)
    outputs = equation.outputs if isinstance(equation, Equation) else equation.outvars
    made: float = sum(math.prod(v.aval.shape) for v in outputs if hasattr(v.aval, "shape"))
    if equation.primitive.name == "dot_general":
        inputs: Any = equation.inputs if isinstance(equation, Equation) else equation.invars
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = inputs[0].aval.shape
        return 2 * made * math.prod(shape[axis] for axis in contracted)
    return made
