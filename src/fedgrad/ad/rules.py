"""The three rules by which a derivative passes a round, as a table.

To the server, a round is one function from what is sent to what is summed (m numbers in, p out; n
inputs are differentiated, k results):

    rule    mode      what clients do                          down    up     asked again
    push    forward   push tangents through their stage        m n     p n    no
    local   mixed     send the sum of their own Jacobians      0       p m    no
    pull    reverse   pull cotangents back                     k p     k m    yes
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedgrad.ad.activity import depends, has_custom_vjp, is_complex
from fedgrad.ad.local import local_round
from fedgrad.core.errors import PlanError
from fedgrad.core.evaluate import Env, evaluate, read
from fedgrad.core.graph import Exchange
from fedgrad.core.primitives import broadcast_p, sum_p, where

Mode = Literal["auto", "forward", "reverse", "mixed"]
# How an exchange is evaluated, so that JAX will differentiate it by the rule: (the exchange, what
# is sent, what clients have of their own, what they have computed before) -> its outputs.
Evaluation = Callable[[Exchange, Sequence[Any], Sequence[Any], Env], list[Any]]


@dataclass(frozen=True)
class Rule:
    """One way to pass a round. `mode`: the mode that passes every round so."""

    name: str
    mode: Mode
    evaluate: Evaluation
    forward: bool | None  # which way the derivative goes; None: either
    by_clients: bool = True  # is it possible if what is differentiated is at clients?
    through_while: bool = True  # is it possible if the round is in a while_loop?


def plain(exchange: Exchange, sent: Sequence[Any], own: Sequence[Any], clients: Env) -> list[Any]:
    """Left to the two primitives' own derivatives. `clients` remembers what a client has computed:
    it does not do the same work twice."""
    clients.update(zip(exchange.own, own, strict=True))
    for (_, received), x in zip(exchange.down, sent, strict=True):
        if received not in clients:
            clients[received] = broadcast_p.bind(x, placement=exchange.placement)
    stage = exchange.stage
    new = [e for e in stage.equations if not e.outputs or any(v not in clients for v in e.outputs)]
    evaluate(new, clients)
    results = [read(clients, v) for v in stage.outputs]
    count = len(exchange.up)
    totals = [sum_p.bind(x, placement=exchange.placement) for x in results[:count]]
    return [*totals, *results[count:]]


def local(exchange: Exchange, sent: Sequence[Any], own: Sequence[Any], clients: Env) -> list[Any]:
    """Given a derivative of its own: the sum of the clients' Jacobians (local.py)."""
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
    totals = local_round(run, exchange.placement, table)(list(sent), list(own))
    if not exchange.kept:
        return totals
    return [*totals, *plain(exchange, sent, own, clients)[len(totals) :]]


def _complex(exchange: Exchange) -> bool:
    """A Jacobian of complex values is not one matrix; the primitives' own rules know better."""
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


# In the order in which the planner tries them: of equally good ones it takes the first.
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
