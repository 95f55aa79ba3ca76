"""The evaluator: runs the equations of a graph under rules, also deep inside loops and calls.

A rule is a function of an equation and its inputs that returns the outputs, or None to leave the
equation unchanged. Executors use rules for operations that a backend does badly and for the
client's index. Equations with bodies, which are rounds and the loops around them, are left to the
caller.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedgrad.core.control import Cond, Control, While, control
from fedgrad.core.graph import Equation, Exchange, Graph, Round, Value, is_client
from fedgrad.core.primitives import (
    CALLS,
    CUSTOM_DERIVATIVES,
    ClosedJaxpr,
    JaxprEqn,
    Primitive,
    at_source,
    bind,
    broadcast_p,
    closed,
    communicates,
    interpret,
    jax_primitives,
    primitives_inside,
    sum_p,
)

Env = dict[Value, Any]
Rule = Callable[[Equation | JaxprEqn, Sequence[Any]], list[Any] | None]
Rules = Mapping[Primitive, Rule]
WithBodies = Callable[[Equation, list[Any]], Sequence[Any]]


def evaluate(
    equations: Iterable[Equation],
    env: Env,
    rules: Rules = {},
    with_bodies: WithBodies | None = None,
) -> None:
    """Run equations, adding their results to `env`."""
    for equation in equations:
        inputs = [read(env, v) for v in equation.inputs]
        here = rules
        if equation.indexed:
            *inputs, index = inputs
            here = {**rules, jax_primitives.axis_index_p: functools.partial(_answer, index)}
        with at_source(equation.source):
            outputs: Sequence[Any]
            if equation.bodies and with_bodies is not None:
                outputs = with_bodies(equation, inputs)
            else:
                outputs = _apply(equation, inputs, here)
        env.update(zip(equation.outputs, outputs, strict=True))


def bodies(loop: Equation, run: Callable[..., list[Any]]) -> list[Callable[..., list[Any]]]:
    """Return the bodies of a loop as functions that call `run(body, inputs, ..., at=places)`. Their
    results must be where the loop's outputs are, except for a condition's."""
    places = [v.at for v in loop.outputs]
    wanted = [None, places] if isinstance(loop.control, While) else [places] * len(loop.bodies)
    return [functools.partial(run, b, at=at) for b, at in zip(loop.bodies, wanted, strict=True)]


def read(env: Env, value: Value) -> Any:
    return value.constant if value.constant is not None else env[value]


def run(jaxpr: ClosedJaxpr, inputs: Sequence[Any], rules: Rules) -> list[Any]:
    """Evaluate a jaxpr under rules."""
    return interpret(jaxpr, inputs, lambda eqn, values: _apply(eqn, values, rules))


def _apply(eqn: Equation | JaxprEqn, inputs: list[Any], rules: Rules) -> list[Any]:
    """Evaluate one equation under rules."""
    if eqn.primitive in rules:
        outputs = rules[eqn.primitive](eqn, inputs)
        if outputs is not None:
            return outputs
    if not rules or not primitives_inside(eqn.params) & rules.keys():
        return bind(eqn.primitive, eqn.params, inputs)
    return _rebuilt(eqn, inputs, rules)


def _rebuilt(eqn: Equation | JaxprEqn, inputs: list[Any], rules: Rules) -> list[Any]:
    """Run the same control flow with rewritten bodies."""
    if eqn.primitive in CUSTOM_DERIVATIVES and jax_primitives.axis_index_p not in rules:
        # Keeping its custom derivative is worth more than a faster body.
        return bind(eqn.primitive, eqn.params, inputs)
    if eqn.primitive in CALLS:
        return run(closed(eqn.params[CALLS[eqn.primitive]]), inputs, rules)
    loop = control(eqn.primitive, eqn.params)
    if loop is None:
        return bind(eqn.primitive, eqn.params, inputs)
    return loop.rebuilt(inputs, [functools.partial(run, b, rules=rules) for b in loop.bodies])


# A value as clients are told it, and as the server continues with it.
Pair = tuple[Any, Any]


def run_apart(jaxpr: ClosedJaxpr, inputs: Sequence[Any]) -> list[Pair]:
    """Evaluate a jaxpr on pairs, of which the first is what is communicated: all sums are those of
    clients that were told the first. A value that is not a pair stands for both.

    What clients compute from the second is dead code.
    """
    return list(map(_pair, interpret(jaxpr, inputs, _apply_apart)))


def _pair(x: Any) -> Pair:
    return x if isinstance(x, tuple) else (x, x)


def _apply_apart(eqn: Equation | JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    pairs = list(map(_pair, inputs))
    told, kept = [list(side) for side in zip(*pairs, strict=True)] or [[], []]
    speaks = communicates(eqn.params)
    if speaks and eqn.primitive in CALLS and eqn.primitive not in CUSTOM_DERIVATIVES:
        return list(run_apart(closed(eqn.params[CALLS[eqn.primitive]]), pairs))
    loop = control(eqn.primitive, eqn.params) if speaks else None
    if loop is not None:
        return _loop_apart(loop, pairs)
    first = bind(eqn.primitive, eqn.params, told)
    # Keeping a custom derivative is worth more than the server's part of its inside.
    crosses = eqn.primitive in (broadcast_p, sum_p) or speaks
    if crosses or all(a is b for a, b in pairs):
        return [_pair(x) for x in first]
    return list(zip(first, bind(eqn.primitive, eqn.params, kept), strict=True))


def _loop_apart(loop: Control, pairs: Sequence[Pair]) -> list[Any]:
    """Run control flow on pairs, which are pytrees to JAX. The first of the predicate's pair
    decides."""
    runs = [functools.partial(run_apart, b) for b in loop.bodies]
    if isinstance(loop, While):
        goes_on, body = runs
        return loop.rebuilt(pairs, [lambda xs: [goes_on(xs)[0][0]], body])
    if isinstance(loop, Cond):
        return loop.rebuilt([pairs[0][0], *pairs[1:]], runs)
    return loop.rebuilt(pairs, runs)


def as_it_is(eqn: Equation | JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    return [inputs[0]]


# At a client, the remaining broadcasts are those of constants, which it can make itself.
AT_CLIENT: Rules = {broadcast_p: as_it_is}


def _answer(index: Any, eqn: Equation | JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    return [index]


class Walk(ABC):
    """Runs a plan. Server values are plain arrays; a subclass chooses the representation of all
    clients' values."""

    def run(
        self, graph: Graph, inputs: Sequence[Any], at: Sequence[str] | None = None
    ) -> list[Any]:
        """Run a plan, or a loop's body, whose outputs must be at the placements `at`."""
        env = self.start(graph, inputs)
        evaluate(graph.equations, env, with_bodies=self.with_bodies)
        outputs = [read(env, v) for v in graph.outputs]
        return self.placed(graph.outputs, outputs, at or [v.at for v in graph.outputs])

    def start(self, graph: Graph, inputs: Sequence[Any]) -> Env:
        """Return what is known before the first equation."""
        env: Env = dict(zip(graph.inputs, inputs, strict=True))
        env.update((v, self.index(placement)) for placement, v in graph.indices.items())
        return env

    def with_bodies(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        """Return the outputs of a round or a loop."""
        if isinstance(equation, Round):
            return self.round(equation, inputs)
        return self.loop(equation, self.placed(equation.inputs, inputs, equation.inputs_at))

    def round(self, equation: Round, inputs: list[Any]) -> list[Any]:
        """Return the outputs of all exchanges of a round."""
        return [y for x, sent, own in equation.split(inputs) for y in self.exchange(x, sent, own)]

    def placed(self, values: Sequence[Value], xs: Sequence[Any], at: Sequence[str]) -> list[Any]:
        """Convert values to the representation of their target placements: a constant may be needed
        at clients."""
        return [
            self.at_clients(x, place) if is_client(place) and not is_client(v.at) else x
            for v, x, place in zip(values, xs, at, strict=True)
        ]

    @abstractmethod
    def index(self, placement: str) -> Any:
        """Return every client's index."""

    @abstractmethod
    def at_clients(self, x: Any, placement: str) -> Any:
        """Return a constant in the representation of client values."""

    @abstractmethod
    def exchange(self, exchange: Exchange, sent: list[Any], own: list[Any]) -> list[Any]:
        """Send down, run the client stage, and sum up; return the sums and what clients keep."""

    @abstractmethod
    def loop(self, loop: Equation, inputs: list[Any]) -> list[Any]:
        """Run the bodies of a loop."""
