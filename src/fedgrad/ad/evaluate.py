"""Running a program, as the server and one client see it, with a rule for each round.

What is evaluated here is about to be differentiated by JAX, round by round as the rules say.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fedgrad.ad import branches
from fedgrad.ad.activity import Unit
from fedgrad.ad.rules import RULES
from fedgrad.core import evaluate as core
from fedgrad.core.control import Cond
from fedgrad.core.graph import Equation, Exchange, Graph, Round, inside
from fedgrad.core.primitives import bind, client_index

RuleOf = Callable[[Unit], str]  # the name of its rule


def evaluate(graph: Graph, inputs: Sequence[Any], rule_of: RuleOf, back: bool) -> list[Any]:
    """The outputs of a program (cut with recompute, so that every stage stands for itself).

    `back`: a derivative will be pulled back through it, and not pushed forward.
    """
    env = start(graph, inputs)
    advance(graph.equations, env, rule_of, back)
    return [core.read(env, v) for v in graph.outputs]


def start(graph: Graph, inputs: Sequence[Any]) -> core.Env:
    env: core.Env = dict(zip(graph.inputs, inputs, strict=True))
    env.update((v, client_index(placement)) for placement, v in graph.indices.items())
    return env


def advance(equations: Sequence[Equation], env: core.Env, rule_of: RuleOf, back: bool) -> None:
    """Evaluate equations, adding what they compute to `env`."""
    clients: core.Env = {}

    def with_bodies(equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        if not isinstance(equation, Round):
            return _loop(equation, inputs, rule_of(equation), back)
        return [
            y
            for x, sent, own in equation.split(inputs)
            for y in RULES[rule_of(x)].evaluate(x, sent, own, clients)
        ]

    core.evaluate(equations, env, with_bodies=with_bodies)


def _loop(loop: Equation, inputs: list[Any], rule: str, back: bool) -> list[Any]:
    ours = rule == "local" or (rule == "pull" and has_cond(loop))
    if loop.control is None or not ours:
        return bind(loop.primitive, loop.params, inputs)

    def run(body: Graph, inputs: Sequence[Any], at: Any) -> list[Any]:
        return evaluate(body, inputs, lambda unit: rule, back)

    bodies = core.bodies(loop, run)
    if isinstance(loop.control, Cond) and back:
        return branches.pulled_cond(inputs[0], inputs[1:], bodies, remember=rule == "local")
    return loop.control.rebuilt(inputs, bodies)


def has_cond(unit: Unit) -> bool:
    """Is this a cond around communication, or is there one inside? JAX's own way back through a
    cond is not ours (branches.py)."""
    if isinstance(unit, Exchange):
        return False
    return unit.kind == "cond" or any(e.kind == "cond" for g in inside(unit) for e in g.loops)
