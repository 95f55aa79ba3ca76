"""The derivative of a traced program, for any choice of rules.

The program is run as two halves. The first is differentiated forward: a basis of the inputs is
pushed through it. The second is differentiated backward: a basis of the outputs is pulled through
it. They meet at the server, which multiplies. All forward and all backward are the extreme cases.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.ad import branches
from fedgrad.ad.rules import (
    RULES,
    depends,
    differentiable,
    has_custom_vjp,
    is_complex,
    pull_basis,
    push_basis,
    replaced,
)
from fedgrad.core import evaluate as core
from fedgrad.core.control import Cond
from fedgrad.core.errors import PlanError
from fedgrad.core.evaluate import read
from fedgrad.core.graph import Equation, Exchange, Graph, Round, Value, inside, is_client
from fedgrad.core.primitives import ClosedJaxpr, bind, client_index, promoting, sum_p
from fedgrad.core.trace import Traced
from fedgrad.plan.cut import cut

Array = jax.Array
Blocks = list[list[Array]]  # derivative[j][i] of shape results[j] + wrt[i]
Rules = tuple[str, ...]  # the name of the rule of each active unit, in order
Unit = Exchange | Equation  # what gets a rule of its own: one round with one placement, or a loop

RuleOf = Callable[[Unit], str]  # the name of its rule


@dataclass(frozen=True, eq=False)
class Subject:
    """A program that is to be differentiated, in the view of the server and one client."""

    name: str
    placements: tuple[str, ...]
    jaxpr: ClosedJaxpr
    graph: Graph
    tree: Any  # of its result
    plan: Graph  # cut with recompute, so that every stage stands for itself
    wrt: tuple[int, ...]  # positions among the inputs
    results: tuple[int, ...]  # positions among the outputs
    active: set[Value]
    units: list[tuple[int, Unit]]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What the choice of rules depends on, besides the shapes of the arguments."""
        return tuple((number, type(unit).__name__, _sizes(unit)) for number, unit in self.units)

    @property
    def at_clients(self) -> bool:
        """Is one of the inputs that are differentiated at clients?"""
        return any(is_client(self.graph.inputs[i].at) for i in self.wrt)

    @property
    def complex(self) -> bool:
        """Is one of them complex? Pushing a basis forward would need its imaginary half too."""
        return any(is_complex(self.graph.inputs[i].aval) for i in self.wrt)

    @property
    def widens(self) -> bool:
        """Is it free to go forward, and the shorter way: are there fewer inputs than results?"""
        if self.at_clients or self.complex or any(map(has_custom_vjp, self.graph.equations)):
            return False
        inputs = sum(self.graph.inputs[i].size for i in self.wrt)
        return inputs < sum(self.graph.outputs[j].size for j in self.results)


def subject(
    name: str,
    made: Traced,
    placements: Sequence[str],
    wrt: Sequence[int],
    results: Sequence[int],
) -> Subject:
    """What was traced to be differentiated, by the inputs `wrt`; of the outputs `results`, those
    that can be."""
    graph = made.graph
    plan = cut(graph, recompute=True)
    chosen = tuple(i for i in results if differentiable(graph.outputs[i]))
    active = active_values(
        graph.equations, [graph.inputs[i] for i in wrt], [graph.outputs[i] for i in chosen]
    )
    return Subject(
        name,
        tuple(placements),
        made.jaxpr,
        graph,
        made.outputs,
        plan,
        tuple(wrt),
        chosen,
        active,
        active_units(plan, active),
    )


def _sizes(unit: Unit) -> tuple[int, ...]:
    if isinstance(unit, Exchange):
        return tuple(v.size for pair in (*unit.down, *unit.up) for v in pair[:1])
    return tuple(v.size for v in (*unit.inputs, *unit.outputs))


def is_while(unit: Unit) -> bool:
    """JAX cannot pull back through a while_loop."""
    return not isinstance(unit, Exchange) and unit.kind == "while"


def active_values(
    equations: Iterable[Equation], wrt: Iterable[Value], results: Iterable[Value]
) -> set[Value]:
    """Values that depend on `wrt` and influence `results`."""
    equations = list(equations)
    forward = depends(equations, wrt)
    backward = set(results)
    for equation in reversed(equations):
        if any(v in backward for v in equation.outputs):
            backward.update(equation.inputs)
    return forward & backward


def active_units(graph: Graph, active: set[Value]) -> list[tuple[int, Unit]]:
    """The active rounds and loops of a plan, each with its position among the equations."""
    units: list[tuple[int, Unit]] = []
    for i, equation in enumerate(graph.equations):
        parts = equation.exchanges if isinstance(equation, Round) else (equation,)
        for part in parts if equation.bodies else ():
            if speaks(part) and any(v in active for v in _sums(part)):
                units.append((i, part))
    return units


def _sums(unit: Unit) -> Iterable[Value]:
    return (total for _, total in unit.up) if isinstance(unit, Exchange) else unit.outputs


def speaks(unit: Unit) -> bool:
    """Is there communication in it?"""
    if isinstance(unit, Exchange):
        return unit.speaks
    return any(r.speaks for graph in inside(unit) for r in graph.rounds)


# --- the derivative ---


def derivative(
    subject: Subject, inputs: list[Any], rules: Rules, forward: bool | None = None
) -> tuple[list[Array], Blocks]:
    """All outputs, and the derivative of the results by the differentiated inputs.

    Rounds go by their rules. What the server does by itself goes the way of the fewer, inputs or
    results, where the rules leave it free: never a matrix of the model's size squared for a few
    hyperparameters. `forward` decides instead where no round is active.
    """
    if forward is None:
        forward = subject.widens
    by_unit = {unit: rule for rule, (_, unit) in zip(rules, subject.units, strict=True)}

    def rule_of(unit: Unit) -> str:
        return by_unit.get(unit, "push")  # an inactive round has no derivative to take

    special = {unit for unit, rule in by_unit.items() if rule == "local" or has_cond(unit)}
    if len(set(rules)) <= 1 and (not special or "push" in rules):
        pushed = "push" in rules or (forward and not rules)
        return _one_way(subject, inputs, _original(subject), pushed)
    turn = _turning_point(subject, rules)
    if turn in (0, len(subject.plan.equations)):
        run = _by_rules(subject, rule_of, back=turn == 0)
        return _one_way(subject, inputs, run, forward=turn > 0)
    return _meet(subject, inputs, rule_of, turn)


def _turning_point(subject: Subject, rules: Rules) -> int:
    """The equation from which on we go backward: the next round or loop behind the last one that
    is passed forward."""
    equations = subject.plan.equations
    ways = [RULES[rule].forward for rule in rules]
    forward = [
        at for way, (at, unit) in zip(ways, subject.units, strict=True) if way or is_while(unit)
    ]
    # With nothing to pull after that, go forward to the end: one way is simpler than two.
    if False not in ways and (
        subject.widens or (forward and max(forward) == max(at for at, _ in subject.units))
    ):
        return len(equations)
    if not forward:
        return 0
    behind = range(max(forward) + 1, len(equations))
    return next((i for i in behind if equations[i].bodies), len(equations))


def _original(subject: Subject) -> Callable[[list[Any]], list[Array]]:
    return lambda full: jax.core.eval_jaxpr(subject.jaxpr.jaxpr, subject.jaxpr.consts, *full)


def _by_rules(subject: Subject, rule_of: RuleOf, back: bool) -> Callable[[list[Any]], list[Array]]:
    return lambda full: evaluate(subject.plan, full, rule_of, back)


def _one_way(
    subject: Subject, inputs: list[Any], run: Callable[[list[Any]], list[Array]], forward: bool
) -> tuple[list[Array], Blocks]:
    fun, xs = _of_inputs(subject, inputs, run)
    if forward:
        refuse_forward_by_clients(subject)
        _, blocks, outputs = push_basis(fun, xs)
        return outputs, blocks
    outputs, _, blocks = _pulled(subject, fun, xs)
    blocks = [_at_home(subject, xs, row) for row in blocks]
    return outputs, _whole(subject, outputs, blocks)


def pulled_back(
    subject: Subject, inputs: list[Any], cotangents: list[Array]
) -> tuple[list[Array], list[Array]]:
    """All outputs; and cotangents of the results, pulled back to the differentiated inputs."""
    special = any(has_cond(unit) for _, unit in subject.units)
    run = _by_rules(subject, lambda unit: "pull", back=True) if special else _original(subject)

    fun, xs = _of_inputs(subject, inputs, run)
    _, pull, outputs = jax.vjp(fun, xs, has_aux=True)
    return outputs, _at_home(subject, xs, pull(cotangents)[0])


def _of_inputs(
    subject: Subject, inputs: list[Any], run: Callable[[list[Any]], list[Array]]
) -> tuple[Callable[[list[Array]], tuple[list[Array], list[Array]]], list[Array]]:
    """(the results, all outputs) as a function of the differentiated inputs; and those."""

    def fun(xs: list[Array]) -> tuple[list[Array], list[Array]]:
        outputs = run(replaced(inputs, subject.wrt, xs))
        return [outputs[j] for j in subject.results], outputs

    return fun, [inputs[i] for i in subject.wrt]


def _at_home(subject: Subject, xs: list[Array], row: Sequence[Array]) -> list[Array]:
    """Derivatives by inputs, each where its input is."""
    clients = [is_client(subject.graph.inputs[i].at) for i in subject.wrt]
    return [like(x, d) if c else d for c, x, d in zip(clients, xs, row, strict=True)]


def like(x: Array, derivative: Array) -> Array:
    """A derivative by (or of) a client's value is at that client, also where it is a constant."""
    return jnp.where(jnp.any(x == x), derivative, derivative)


def refuse_forward_by_clients(subject: Subject) -> None:
    if subject.at_clients:
        raise PlanError.here(
            f"{subject.name} is differentiated by an argument at clients. Every client has its own "
            "derivative, and pushing tangents forward (which a while_loop around communication "
            "needs) only gives their sum. Use mode='reverse', and a scan instead of a while_loop."
        )


def _pulled(
    subject: Subject, fun: Callable[[list[Array]], tuple[list[Array], list[Array]]], xs: list[Array]
) -> tuple[list[Array], list[Array], Blocks]:
    """All outputs; the results as they are pulled back, and the derivative of those by `xs`. A
    complex result of real inputs is two real ones, because a cotangent has only one direction."""

    def parts(xs: list[Array]) -> tuple[list[Array], list[Array]]:
        results, outputs = fun(xs)
        return [part for y in results for part in _parts(subject, y)], outputs

    results, pull, outputs = jax.vjp(parts, xs, has_aux=True)
    return outputs, results, pull_basis(lambda cts: pull(cts)[0], results)


def _parts(subject: Subject, y: Array) -> list[Array]:
    return [y.real, y.imag] if is_complex(y) and not subject.complex else [y]


def _whole(subject: Subject, outputs: list[Array], blocks: Blocks) -> Blocks:
    """The derivatives of the results from those of their parts."""
    rest = iter(blocks)
    rows = [[next(rest) for _ in _parts(subject, outputs[j])] for j in subject.results]
    return [
        [x[0] if len(x) == 1 else jax.lax.complex(*x) for x in zip(*row, strict=True)]
        for row in rows
    ]


def _meet(
    subject: Subject, inputs: list[Any], rule_of: RuleOf, turn: int
) -> tuple[list[Array], Blocks]:
    refuse_forward_by_clients(subject)
    graph = subject.plan
    before, after = graph.equations[:turn], graph.equations[turn:]
    # Clients start the second half from what the server has: it was sent to them already.
    wanted = {*graph.outputs, *(v for e in after for v in e.inputs)}
    names: list[Value] = []  # what the second half needs, noted while JAX traces the first
    crossing: list[Value] = []  # the part of it that is differentiated

    def first(xs: list[Array]) -> tuple[list[Array], list[Array]]:
        env = start(graph, replaced(inputs, subject.wrt, xs))
        advance(before, env, rule_of, back=False)
        names[:] = [v for v in env if v in wanted]
        crossing[:] = [v for v in names if v in subject.active]
        return [env[v] for v in crossing], [env[v] for v in names]

    xs = [inputs[i] for i in subject.wrt]
    middle, pushed, everything = push_basis(first, xs)

    def second(middle: list[Array]) -> tuple[list[Array], list[Array]]:
        env = dict(zip(names, everything, strict=True))
        env.update(zip(crossing, middle, strict=True))
        advance(after, env, rule_of, back=True)
        outputs = [read(env, v) for v in graph.outputs]
        return [outputs[j] for j in subject.results], outputs

    outputs, results, pulled = _pulled(subject, second, middle)
    blocks = _multiply(pulled, pushed, crossing, xs, results)
    return outputs, _whole(subject, outputs, blocks)


def _multiply(
    pulled: Blocks,
    pushed: Blocks,
    crossing: Sequence[Value],
    xs: Sequence[Array],
    results: Sequence[Array],
) -> Blocks:
    """The server multiplies what was pulled with what was pushed; clients do so with their own
    part, and the products are summed."""

    def term(j: int, c: int, i: int) -> Array:
        value = crossing[c]
        product = jnp.tensordot(pulled[j][c], pushed[c][i], len(value.aval.shape))
        if not is_complex(results[j]):
            product = jnp.real(product)  # JAX's cotangent of a complex value: dy = Re(ct * dx)
        return sum_p.bind(product, placement=value.at) if is_client(value.at) else product

    with promoting():
        return [
            [
                sum(
                    (term(j, c, i) for c in range(len(crossing))),
                    start=jnp.zeros((*result.shape, *x.shape), result.dtype),
                )
                for i, x in enumerate(xs)
            ]
            for j, result in enumerate(results)
        ]


# --- running a program with a rule for each round, which JAX is about to differentiate ---


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
