"""The derivative of a traced program, for any choice of rules.

The program is run as two halves. The first is differentiated forward: a basis of the inputs is
pushed through it. The second is differentiated backward: a basis of the outputs is pulled through
it. They meet at the server, which multiplies. All forward and all backward are the extreme cases.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.ad.activity import Unit, is_complex
from fedgrad.ad.evaluate import RuleOf, advance, evaluate, has_cond, start
from fedgrad.ad.local import pull_basis, push_basis
from fedgrad.ad.rules import RULES
from fedgrad.ad.subject import Rules, Subject, is_while
from fedgrad.core.dtypes import promoting
from fedgrad.core.errors import PlanError
from fedgrad.core.evaluate import read
from fedgrad.core.graph import Value, is_client
from fedgrad.core.primitives import sum_p

Array = jax.Array
Blocks = list[list[Array]]  # derivative[j][i] of shape results[j] + wrt[i]


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
        outputs = run(_replaced(inputs, subject.wrt, xs))
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
        env = start(graph, _replaced(inputs, subject.wrt, xs))
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


def _replaced(inputs: list[Any], positions: Sequence[int], xs: Sequence[Any]) -> list[Any]:
    full = list(inputs)
    for i, x in zip(positions, xs, strict=True):
        full[i] = x
    return full
