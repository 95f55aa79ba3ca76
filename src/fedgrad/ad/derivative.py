"""The derivative of a traced program, for any choice of rules.

The program runs in two halves. The first is differentiated forward: a basis of the inputs is pushed
through it. The second is differentiated backward: a basis of the outputs is pulled through it. They
meet at the server, which multiplies. All forward and all backward are the extreme cases.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.ad.branches import pulled_cond
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
from fedgrad.core.control import Cond, Scan
from fedgrad.core.errors import PlanError
from fedgrad.core.evaluate import Env, Walk, bodies, evaluate, read
from fedgrad.core.graph import ANYWHERE, Equation, Exchange, Graph, Round, Value, inside, is_client
from fedgrad.core.primitives import bind, client_index, promoting, sum_p
from fedgrad.planning.cut import cut

Array = jax.Array
Blocks = list[list[Array]]  # derivative[j][i] of shape results[j] + wrt[i]
Rules = tuple[str, ...]  # the name of the rule of each active unit, in order
Unit = Exchange | Equation  # what a rule applies to: one round with one placement, or a loop
RuleOf = Callable[[Unit], str]  # the name of its rule


@dataclass(frozen=True, eq=False)
class Subject:
    """A program to be differentiated, as seen by the server and one client."""

    name: str
    placements: tuple[str, ...]
    graph: Graph
    tree: Any  # the structure of its result
    wrt: Sequence[int]  # positions among the inputs
    wanted: Sequence[int]  # positions among the outputs

    @functools.cached_property
    def results(self) -> list[int]:
        """The positions of the wanted outputs that can be differentiated."""
        return [j for j in self.wanted if differentiable(self.graph.outputs[j])]

    @functools.cached_property
    def plan(self) -> Graph:
        """The plan, cut with `recompute`, so that no stage depends on an earlier one."""
        return cut(self.graph, recompute=True)

    @functools.cached_property
    def active(self) -> set[Value]:
        """The values that depend on the differentiated inputs and influence the results."""
        found = {self.graph.outputs[j] for j in self.results}
        for equation in reversed(self.graph.equations):
            if any(v in found for v in equation.outputs):
                found.update(equation.inputs)
        return found & depends(self.graph.equations, [self.graph.inputs[i] for i in self.wrt])

    @functools.cached_property
    def units(self) -> list[tuple[int, Unit]]:
        """The active rounds and loops of the plan, each with its position among the equations."""
        return [
            (i, unit)
            for i, equation in enumerate(self.plan.equations)
            for unit in _units(equation)
            if _speaks(unit) and any(v in self.active for v in _sums(unit))
        ]

    @property
    def signature(self) -> tuple[Any, ...]:
        """A key for the choice of rules: all that it depends on besides the shapes of the
        arguments."""
        return tuple((number, type(unit).__name__, _sizes(unit)) for number, unit in self.units)

    @property
    def at_clients(self) -> bool:
        """Whether one of the differentiated inputs is at clients."""
        return any(is_client(self.graph.inputs[i].at) for i in self.wrt)

    @property
    def complex(self) -> bool:
        """Whether one of them is complex. Pushing a basis forward would need its imaginary half,
        too."""
        return any(is_complex(self.graph.inputs[i].aval) for i in self.wrt)

    @property
    def widens(self) -> bool:
        """Whether going forward is possible and shorter, because there are fewer inputs than
        results."""
        if self.at_clients or self.complex or any(map(has_custom_vjp, self.graph.equations)):
            return False
        inputs = sum(self.graph.inputs[i].size for i in self.wrt)
        return inputs < sum(self.graph.outputs[j].size for j in self.results)


def _sizes(unit: Unit) -> tuple[int, ...]:
    if isinstance(unit, Exchange):
        return tuple(v.size for pair in (*unit.down, *unit.up) for v in pair[:1])
    return tuple(v.size for v in (*unit.inputs, *unit.outputs))


def has(unit: Unit, kind: str) -> bool:
    """Whether a unit is or contains a "while" or a "cond" around communication. JAX cannot pull
    back through a while_loop, and our way back through a cond differs from JAX's (branches.py)."""
    if isinstance(unit, Exchange):
        return False
    return unit.kind == kind or any(e.kind == kind for g in inside(unit) for e in g.loops)


def _units(equation: Equation) -> Sequence[Unit]:
    if isinstance(equation, Round):
        return equation.exchanges
    return (equation,) if equation.bodies else ()


def _sums(unit: Unit) -> Iterable[Value]:
    return (total for _, total in unit.up) if isinstance(unit, Exchange) else unit.outputs


def _speaks(unit: Unit) -> bool:
    """Whether it communicates."""
    if isinstance(unit, Exchange):
        return unit.speaks
    return any(r.speaks for graph in inside(unit) for r in graph.rounds)


# --- the derivative ---------------------------------------------------------------------------


def derivative(
    subject: Subject, inputs: list[Any], rules: Rules, forward: bool | None = None
) -> tuple[list[Array], Blocks]:
    """Return all outputs, and the derivative of the results with respect to the differentiated
    inputs.

    Rounds follow their rules. Where the rules leave it free, the server's own work is
    differentiated forward or backward depending on whether inputs or results are fewer, so that a
    few hyperparameters never cost a matrix of the model's size squared. `forward` decides instead
    if no round is active.
    """
    by_unit = {unit: rule for rule, (_, unit) in zip(rules, subject.units, strict=True)}

    def rule_of(unit: Unit) -> str:
        return by_unit.get(unit, "push")  # an inactive round has no derivative

    turn = _turning_point(subject, rules, forward)
    if turn in (0, len(subject.plan.equations)):
        return _one_way(subject, inputs, rule_of, forward=turn > 0)
    return _meet(subject, inputs, rule_of, turn)


def _turning_point(subject: Subject, rules: Rules, way: bool | None) -> int:
    """Return the equation at which the derivative turns backward: the next round or loop after the
    last one that is passed forward."""
    equations = subject.plan.equations
    ways = [RULES[rule].forward for rule in rules] or [subject.widens if way is None else way]
    if None not in ways and len(set(ways)) == 1:
        return len(equations) if ways[0] else 0
    forward = [
        at for way, (at, unit) in zip(ways, subject.units, strict=True) if way or has(unit, "while")
    ]
    # If nothing after that must be pulled, go forward to the end: one way is simpler than two.
    if False not in ways and (
        subject.widens or (forward and max(forward) == max(at for at, _ in subject.units))
    ):
        return len(equations)
    if not forward:
        return 0
    behind = range(max(forward) + 1, len(equations))
    return next((i for i in behind if equations[i].bodies), len(equations))


def _one_way(
    subject: Subject, inputs: list[Any], rule_of: RuleOf, forward: bool
) -> tuple[list[Array], Blocks]:
    fun, xs = _of_inputs(subject, inputs, rule_of, back=not forward)
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
    """Return all outputs, and the cotangents of the results pulled back to the differentiated
    inputs."""
    fun, xs = _of_inputs(subject, inputs, lambda unit: "pull", back=True)
    _, pull, outputs = jax.vjp(fun, xs, has_aux=True)
    return outputs, _at_home(subject, xs, pull(cotangents)[0])


def _of_inputs(
    subject: Subject, inputs: list[Any], rule_of: RuleOf, back: bool
) -> tuple[Callable[[list[Array]], tuple[list[Array], list[Array]]], list[Array]]:
    """Return a function of the differentiated inputs that gives (results, all outputs), and those
    inputs."""

    def fun(xs: list[Array]) -> tuple[list[Array], list[Array]]:
        walk = _ByRules(rule_of, back)
        outputs = walk.run(subject.plan, replaced(inputs, subject.wrt, xs))
        return _results(subject, outputs), outputs

    return fun, [inputs[i] for i in subject.wrt]


def _results(subject: Subject, outputs: Sequence[Any]) -> list[Array]:
    """Return the results to be differentiated. A constant may still be a Python number."""
    return [jnp.asarray(outputs[j]) for j in subject.results]


def _at_home(subject: Subject, xs: list[Array], row: Sequence[Array]) -> list[Array]:
    """Place each derivative where its input is."""
    clients = [is_client(subject.graph.inputs[i].at) for i in subject.wrt]
    return [like(x, d) if c else d for c, x, d in zip(clients, xs, row, strict=True)]


def like(x: Array, derivative: Array) -> Array:
    """Place a derivative with respect to (or of) a client's value at that client, even if it is a
    constant."""
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
    """Return all outputs, the results as they are pulled back, and their derivative with respect to
    `xs`. A complex result of real inputs is split into two real ones, because a cotangent has only
    one direction."""

    def parts(xs: list[Array]) -> tuple[list[Array], list[Array]]:
        results, outputs = fun(xs)
        return [part for y in results for part in _parts(subject, y)], outputs

    results, pull, outputs = jax.vjp(parts, xs, has_aux=True)
    return outputs, results, pull_basis(lambda cts: pull(cts)[0], results)


def _parts(subject: Subject, y: Array) -> list[Array]:
    return [y.real, y.imag] if is_complex(y) and not subject.complex else [y]


def _whole(subject: Subject, outputs: list[Array], blocks: Blocks) -> Blocks:
    """Combine the derivatives of real and imaginary parts into those of the results."""
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
    # Clients start the second half from what the server has, which was sent to them already.
    wanted = {*graph.outputs, *(v for e in after for v in e.inputs)}
    names: list[Value] = []  # what the second half needs, recorded while JAX traces the first
    crossing: list[Value] = []  # the differentiated part of it

    def first(xs: list[Array]) -> tuple[list[Array], list[Array]]:
        walk = _ByRules(rule_of, back=False)
        env = walk.start(graph, replaced(inputs, subject.wrt, xs))
        evaluate(before, env, with_bodies=walk.with_bodies)
        names[:] = [v for v in env if v in wanted]
        crossing[:] = [v for v in names if v in subject.active]
        return [env[v] for v in crossing], [env[v] for v in names]

    xs = [inputs[i] for i in subject.wrt]
    middle, pushed, everything = push_basis(first, xs)

    def second(middle: list[Array]) -> tuple[list[Array], list[Array]]:
        env = dict(zip(names, everything, strict=True))
        env.update(zip(crossing, middle, strict=True))
        evaluate(after, env, with_bodies=_ByRules(rule_of, back=True).with_bodies)
        outputs = [read(env, v) for v in graph.outputs]
        return _results(subject, outputs), outputs

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
    """Multiply what was pulled with what was pushed, at the server. Clients multiply their own
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


# --- running a program with a rule for each round, which JAX is about to differentiate --------


@dataclass(frozen=True, eq=False)
class _ByRules(Walk):
    """Runs a plan as the server and one client see it. The plan was cut with `recompute`, so that
    no stage depends on an earlier one. `back`: a derivative will be pulled back through it, not
    pushed forward."""

    rule_of: RuleOf
    back: bool
    clients: Env = field(default_factory=dict)  # what a client has computed
    changing: Any = 0  # in a scan: zero, but opaque to JAX, as if each iteration had another one

    def index(self, placement: str) -> Any:
        return client_index(placement)

    def at_clients(self, x: Any, placement: str) -> Any:
        return x

    def exchange(self, exchange: Exchange, sent: list[Any], own: list[Any]) -> list[Any]:
        return RULES[self.rule_of(exchange)].evaluate(exchange, sent, own, self.clients)

    def loop(self, loop: Equation, inputs: list[Any]) -> list[Any]:
        rule = self.rule_of(loop)
        ours = rule == "local" or (rule == "pull" and has(loop, "cond"))
        if loop.control is None or not ours:
            return bind(loop.primitive, loop.params, inputs)

        def run(back: bool, body: Graph, inputs: Sequence[Any], at: Any) -> list[Any]:
            mine, rest = inputs[: len(body.inputs)], inputs[len(body.inputs) :]
            return _ByRules(lambda unit: rule, back, changing=sum(rest)).run(body, mine)

        inside = bodies(loop, functools.partial(run, self.back))
        if self.back and isinstance(loop.control, Cond):
            return pulled_cond(
                inputs[0] + self.changing,
                inputs[1:],
                inside,
                bodies(loop, functools.partial(run, False)),
                constant=[v.at == ANYWHERE for v in loop.inputs[1:]],
                remember=rule == "local",
            )
        if self.back and isinstance(loop.control, Scan):
            # JAX hoists what is the same in each iteration out of a loop, including a cond that is
            # decided before the loop; and it would use its own way back through the cond, not ours
            # (branches.py).
            inputs = [*inputs, jnp.zeros(loop.control.length, jnp.int32) + self.changing]
        return loop.control.rebuilt(inputs, inside)
