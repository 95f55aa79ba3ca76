"""What the server needs for a plan: memory at once, and work. Estimates, from the shapes alone.

A compiler fuses and reuses, so the program that runs needs less; what matters is that a plan whose
server keeps a matrix of the model's size squared is seen to be dearer than one that does not.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedgrad.core.control import Cond, Scan, control
from fedgrad.core.graph import Equation, Value
from fedgrad.core.placement import is_client
from fedgrad.core.primitives import JaxprEqn, Literal, inner_jaxprs
from fedgrad.plan.stages import Steps

# One thing after another: what it reads, what it makes, and what it needs besides while it runs.
Event = tuple[Sequence[Any], Sequence[Any], float]


def memory(steps: Steps) -> int:
    """Bytes that the server holds at once, at most."""
    inputs = [v for v in steps.inputs if not is_client(v.at)]
    results = [v for v in steps.outputs if not is_client(v.at)]
    return int(_peak(list(_events(steps)), inputs, results, lambda v: v.bytes))


def work(steps: Steps) -> int:
    """Operations on numbers that the server does."""
    total = 0.0
    for step in steps.steps:
        total += sum(map(_work, step.server))
        for loop in step.loops:
            bodies = [work(body) for body in loop.bodies]
            total += (
                max(bodies) if isinstance(loop.control, Cond) else sum(bodies) * (loop.times or 1)
            )
    return int(total)


def _events(steps: Steps) -> Iterator[Event]:
    for step in steps.steps:
        for x in step.exchanges:
            yield [sent for sent, _ in x.down], [total for _, total in x.up], 0
        for loop in step.loops:
            outputs = [v for v in loop.equation.outputs if not is_client(v.at)]
            inside = max((memory(body) for body in loop.bodies), default=0)
            yield [v for v in loop.equation.inputs if not is_client(v.at)], outputs, inside
        for equation in step.server:
            yield equation.inputs, equation.outputs, _inside(equation)


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
    """What an equation needs for the equations inside of it, besides its inputs and outputs."""
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
