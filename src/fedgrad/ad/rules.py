"""The three rules by which a derivative passes a round, as a table.

To the server, a round is one function from what is sent to what is summed (m numbers in, p out; n
inputs are differentiated, k results):

    rule    mode      what clients do                          down    up     asked again
    push    forward   push tangents through their stage        m n     p n    no
    local   mixed     send the sum of their own Jacobians      0       p m    no
    pull    reverse   pull cotangents back                     k p     k m    yes
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import PlanError
from fedgrad.core.evaluate import Env, evaluate, read
from fedgrad.core.graph import Equation, Exchange, Value
from fedgrad.core.primitives import (
    Primitive,
    at_source,
    broadcast_p,
    jax_primitives,
    primitives_inside,
    promoting,
    scope,
    sum_p,
    where,
    wide,
)

Array = jax.Array
# (what was sent, the client's own values) -> what is summed, in the view of one client
ClientStage = Callable[[list[Array], list[Array]], list[Array]]


Mode = Literal["auto", "forward", "reverse", "mixed"]
# How an exchange is evaluated, so that JAX will differentiate it by the rule: (the exchange, what
# is sent, what clients have of their own, what they have computed before) -> its outputs.
Evaluation = Callable[[Exchange, Sequence[Any], Sequence[Any], Env], list[Any]]


@dataclass(frozen=True)
class Rule:
    """One way to differentiate through a round. `mode` is the mode that uses it for every round."""

    name: str
    mode: Mode
    evaluate: Evaluation
    forward: bool | None  # the direction of the derivative; None: either
    by_clients: bool = True  # whether it works if the differentiated argument is at clients
    through_while: bool = True  # whether it works if the round is in a while_loop


def plain(exchange: Exchange, sent: Sequence[Any], own: Sequence[Any], clients: Env) -> list[Any]:
    """Evaluate with the two primitives' own derivatives. `clients` caches what a client has
    computed, so that no work is done twice."""
    clients.update(zip(exchange.own, own, strict=True))
    for (_, received), x in zip(exchange.down, sent, strict=True):
        if received not in clients:
            clients[received] = _at_its_line(broadcast_p, received, x, exchange.placement)
    stage = exchange.stage
    new = [e for e in stage.equations if not e.outputs or any(v not in clients for v in e.outputs)]
    evaluate(new, clients)
    results = [read(clients, v) for v in stage.outputs]
    totals = [
        _at_its_line(sum_p, total, x, exchange.placement)
        for (_, total), x in zip(exchange.up, results, strict=False)
    ]
    return [*totals, *results[len(totals) :]]


def _at_its_line(primitive: Primitive, made: Value, x: Any, placement: str) -> Any:
    """Attribute communication to the user's line that made `made` with it."""
    with at_source(made.origin.source):
        return primitive.bind(x, placement=placement)


def local(exchange: Exchange, sent: Sequence[Any], own: Sequence[Any], clients: Env) -> list[Any]:
    """Evaluate with a derivative of its own: the sum of the clients' Jacobians."""
    if not exchange.up or _complex(exchange):
        return plain(exchange, sent, own, clients)
    _refuse_custom_vjp(exchange)
    stage, received = exchange.stage, [r for _, r in exchange.down]
    operands = [v for v, _ in exchange.up]

    def run(received_values: list[Any], own_values: list[Any]) -> list[Any]:
        inner = dict(zip(stage.inputs, [*received_values, *own_values], strict=True))
        evaluate(stage.equations, inner)
        return [read(inner, v) for v in operands]

    reach = [depends(stage.equations, [r]) for r in received]
    table = [[v in reached for reached in reach] for v in operands]
    sums, lines = [v.aval for v in operands], [total.origin.source for _, total in exchange.up]
    totals = local_round(run, exchange.placement, sums, table, lines)(list(sent), list(own))
    if not exchange.kept:
        return totals
    return [*totals, *plain(exchange, sent, own, clients)[len(totals) :]]


def _complex(exchange: Exchange) -> bool:
    """Whether a value is complex. A Jacobian of complex values is not one matrix, so these are left
    to the primitives' own rules."""
    values = [v for pair in (*exchange.down, *exchange.up) for v in pair]
    return any(is_complex(v.aval) for v in values)


def _refuse_custom_vjp(exchange: Exchange) -> None:
    reached = depends(exchange.stage.equations, [r for _, r in exchange.down])
    for equation in exchange.stage.equations:
        if any(v in reached for v in equation.inputs) and has_custom_vjp(equation):
            raise PlanError(
                f"{where(equation.source)}: a custom_vjp at clients is not taken in mixed mode: "
                "its backward function need not be linear in the cotangent, and then a Jacobian is "
                "another derivative. Use mode='reverse', or a custom_jvp."
            )


# In the order in which the planner tries them: among equally good ones it takes the first.
RULES = {
    rule.name: rule
    for rule in (
        Rule("local", "mixed", local, forward=None),
        Rule("push", "forward", plain, forward=True, by_clients=False),
        Rule("pull", "reverse", plain, forward=False, through_while=False),
    )
}
# Every mode that takes one rule for all rounds, in the order in which they are shown.
MODES: dict[Mode, Rule] = {RULES[name].mode: RULES[name] for name in ("push", "pull", "local")}


# --- the local rule: a round is one function, and its clients can send its Jacobian -----------
# Seen from the server, broadcast -> client stage -> sum maps what was sent to what comes back. Its
# derivative is the sum of the clients' own Jacobians. Each client builds its Jacobian by itself,
# the Jacobians are summed like everything else, and the server multiplies. Nothing more goes down,
# and nobody is asked twice: pulled back through, the sum is simply a value of the server.


def local_round(
    stage: ClientStage,
    placement: str,
    sums: Sequence[Any],
    depends: Sequence[Sequence[bool]],
    lines: Sequence[Any],
) -> Callable[[list[Array], list[Array]], list[Array]]:
    """Return the round as a function of (server values, client values) with the local rule.

    `sums`: shapes and dtypes of what is summed, by which `lines` of the user. `depends[j][i]`:
    whether the j-th of them can have a derivative with respect to the i-th value that is sent.
    """

    def down(sent: Sequence[Array]) -> list[Array]:
        return [broadcast_p.bind(x, placement=placement) for x in sent]

    def total(x: Array, line: Any) -> Array:
        with at_source(line):
            return sum_p.bind(x, placement=placement)

    def up(values: Sequence[Array]) -> list[Array]:
        return [total(x, line) for x, line in zip(values, lines, strict=True)]

    @jax.custom_jvp
    def round_(sent: list[Array], own: list[Array]) -> list[Array]:
        return up(stage(down(sent), own))

    def rule(primals: Any, tangents: Any) -> Any:
        (sent, own), (d_sent, d_own) = primals, tangents
        received = down(sent)
        active = [i for i, t in enumerate(d_sent) if _nonzero(t)]
        values, jacobian = _jacobian(stage, received, own, active, sums, depends)
        totals = up(values)
        d_totals: list[Any] = [None] * len(totals)
        for (j, i), block in jacobian.items():
            name = scope(lines[j])
            with jax.named_scope(f"derivative of {name}") if name else at_source(lines[j]):
                block = sum_p.bind(block.astype(wide(block.dtype)), placement=placement)
            with promoting():
                product = jnp.tensordot(block, d_sent[i], d_sent[i].ndim)
            d_totals[j] = _add(d_totals[j], product.astype(wide(totals[j].dtype)))
        # A client's own values can be active too (state in a loop): those tangents are its own.
        mine = [i for i, t in enumerate(d_own) if _nonzero(t)]
        if mine:
            _, pushed = jax.jvp(
                lambda xs: stage(received, replaced(own, mine, xs)),
                ([own[i] for i in mine],),
                ([d_own[i] for i in mine],),
            )
            for j, t in enumerate(pushed):
                if t.dtype != jax.dtypes.float0:
                    own_total = sum_p.bind(t.astype(wide(t.dtype)), placement=placement)
                    d_totals[j] = _add(d_totals[j], own_total)
        # Cast last: a narrow dtype may hold the result even where it cannot hold a part.
        return totals, [
            _zero_array(x) if t is None else t.astype(x.dtype)
            for x, t in zip(totals, d_totals, strict=True)
        ]

    round_.defjvp(rule, symbolic_zeros=True)
    return round_


def _jacobian(
    stage: ClientStage,
    received: list[Array],
    own: list[Array],
    active: list[int],
    sums: Sequence[Any],
    depends: Sequence[Sequence[bool]],
) -> tuple[list[Array], dict[tuple[int, int], Array]]:
    """Return the stage's values and its Jacobian blocks (j, i), of shape values[j] +
    received[i]."""

    def of_active(xs: list[Array]) -> list[Array]:
        return stage(replaced(received, active, xs), own)

    xs = [received[i] for i in active]
    rows = [j for j, s in enumerate(sums) if is_float(s) and any(depends[j][i] for i in active)]
    if not rows:
        return of_active(xs), {}

    def chosen(xs: list[Array]) -> tuple[list[Array], list[Array]]:
        values = of_active(xs)
        return [values[j] for j in rows], values

    across, down = sum(x.size for x in xs), sum(math.prod(sums[j].shape) for j in rows)

    def push() -> tuple[list[list[Array]], list[Array]]:
        _, derivative, values = push_basis(chosen, xs)
        return derivative, values

    def pull() -> tuple[list[list[Array]], list[Array]]:
        _, back, values = jax.vjp(chosen, xs, has_aux=True)
        return pull_basis(lambda cts: back(cts)[0], [sums[j] for j in rows]), values

    # Fewer inputs than outputs: push a basis forward, in constant memory. JAX may support only one.
    first, second = (push, pull) if across <= down else (pull, push)
    try:
        derivative, values = first()
    except (ValueError, TypeError) as error:
        if impossible(error) is None:
            raise
        derivative, values = second()
    blocks = {
        (j, i): derivative[row][column]
        for row, j in enumerate(rows)
        for column, i in enumerate(active)
        if depends[j][i]
    }
    return values, blocks


def _nonzero(tangent: Any) -> bool:
    return not isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _add(a: Any, b: Array) -> Array:
    return b if a is None else a + b


def _zero_array(x: Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


# --- what can be differentiated, and by pushing or pulling a basis ----------------------------


def is_float(x: Any) -> bool:
    """Whether this array, or its abstract value, can have a derivative."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def differentiable(value: Value) -> bool:
    return is_float(value.aval)


def is_complex(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.complexfloating))


def depends(equations: Iterable[Equation], inputs: Iterable[Value]) -> set[Value]:
    """Return the values that can have a derivative with respect to these inputs."""
    found = set(inputs)
    for equation in equations:
        if equation.primitive is not jax_primitives.stop_gradient_p:
            if any(v in found for v in equation.inputs):
                found.update(v for v in equation.outputs if differentiable(v))
    return found


def has_custom_vjp(equation: Equation) -> bool:
    """Whether there is a custom_vjp, through which JAX cannot push tangents."""
    primitive = jax_primitives.custom_vjp_call_p
    return equation.primitive is primitive or primitive in primitives_inside(equation.params)


def replaced(values: Sequence[Any], positions: Sequence[int], xs: Sequence[Any]) -> list[Any]:
    """Return the values, with others at these positions."""
    full = list(values)
    for i, x in zip(positions, xs, strict=True):
        full[i] = x
    return full


def impossible(error: Exception) -> str | None:
    """Return why JAX cannot differentiate this way, if an error of JAX says so; otherwise None."""
    if isinstance(error, ValueError) and "Reverse-mode differentiation" in str(error):
        return "has a while_loop on the way of the derivative, and JAX cannot pull back through one"
    if isinstance(error, TypeError) and "custom_vjp" in str(error):
        return "has a custom_vjp on the way of the derivative, and JAX cannot push through one"
    return None


def push_basis(
    fun: Callable[[list[Array]], tuple[list[Array], Any]], xs: list[Array]
) -> tuple[list[Array], list[list[Array]], Any]:
    """For `out, aux = fun(xs)`, return out, its derivative by pushing a basis forward
    (derivative[j][i] of shape out[j] + xs[i]), and aux.

    The values are computed once, together with all tangents; nothing is stored for a backward pass.
    """

    def push(tangents: list[Array]) -> tuple[Any, Any, Any]:
        return jax.jvp(fun, (xs,), (tangents,), has_aux=True)

    if sum(x.size for x in xs) == 1:  # a single number needs no extra axis
        out, tangents, aux = push([jnp.ones_like(x) for x in xs])
        tangents = [t[None] for t in tangents]
    else:
        out, tangents, aux = jax.vmap(push, out_axes=(None, 0, None))(_basis(xs))

    def block(t: Array, x: Array, part: slice) -> Array:
        return jnp.moveaxis(t[part], 0, -1).reshape(*t.shape[1:], *x.shape)

    pairs = list(zip(xs, _parts(xs), strict=True))
    return out, [[block(t, x, part) for x, part in pairs] for t in tangents], aux


def pull_basis(
    pull: Callable[[list[Array]], list[Array]], outs: Sequence[Any]
) -> list[list[Array]]:
    """Return the derivative by pulling a basis of `outs` back: [j][i] of shape outs[j] + xs[i]."""
    if sum(math.prod(o.shape) for o in outs) == 1:
        pulled = [p[None] for p in pull([jnp.ones(o.shape, o.dtype) for o in outs])]
    else:
        pulled = jax.vmap(pull)(_basis(outs))
    return [
        [p[part].reshape(*o.shape, *p.shape[1:]) for p in pulled]
        for o, part in zip(outs, _parts(outs), strict=True)
    ]


def _basis(xs: Sequence[Any]) -> list[Array]:
    """Return a basis of the space of all these arrays together."""
    total = sum(math.prod(x.shape) for x in xs)
    return [
        jnp.eye(total, p.stop - p.start, k=-p.start, dtype=x.dtype).reshape(total, *x.shape)
        for x, p in zip(xs, _parts(xs), strict=True)
    ]


def _parts(xs: Sequence[Any]) -> list[slice]:
    """Return the slice of each array in the concatenation of all."""
    ends = list(itertools.accumulate((math.prod(x.shape) for x in xs), initial=0))
    return [slice(start, end) for start, end in itertools.pairwise(ends)]
