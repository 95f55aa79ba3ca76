"""Choosing the cheapest rules for a derivative: `mode="auto"`.

Rounds are few, so the search is exact: every vector of rules that makes sense is traced, cut into
a plan like any other program, and priced by what that plan says it sends. What the planner knows is
therefore what the plan knows: that a constant cotangent needs no second pass, that a constant
tangent need not be sent, that an inactive round costs nothing. From four rounds on, only
those are traced that are cheapest if the prices of the rounds add up, as they do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedgrad.ad.derivative import derivative, refuse_forward_by_clients
from fedgrad.ad.local import impossible
from fedgrad.ad.rules import RULES
from fedgrad.ad.subject import Rules, Subject, is_while, possible, rule_vectors
from fedgrad.core.errors import ArgumentError, PlacementError, PlanError
from fedgrad.core.graph import Graph, Value
from fedgrad.core.primitives import ClosedJaxpr
from fedgrad.core.trace import Taken, check, struct, traced
from fedgrad.plan.cut import cut
from fedgrad.plan.plan import Plan

EXHAUSTIVE = 3  # rounds of which every vector of rules is traced


@dataclass(frozen=True)
class CostModel:
    """What a plan costs: prices per byte down and up (per client), and per round trip; and of the
    server, per byte that it holds at once and per operation that it does.

    The server's prices are zero by default: then what it holds and does decides between plans that
    cost the network the same.

    `readdress`: may a derivative ask clients again that the program itself asks only once? By
    default not: in most federations the same clients cannot be had twice. `client_memory`: bytes
    that a client can keep between rounds; None is no limit.
    """

    down: float = 1.0
    up: float = 1.0
    round_trip: float = 0.0
    readdress: bool = False
    client_memory: int | None = None
    server_memory: float = 0.0
    server_work: float = 0.0

    def __post_init__(self) -> None:
        for name in ("down", "up", "round_trip", "server_memory", "server_work"):
            price = getattr(self, name)
            if not (isinstance(price, int | float) and math.isfinite(price) and price >= 0):
                raise ArgumentError.here(f"CostModel({name}={price!r}): a price is a number >= 0.")

        if self.client_memory is not None and self.client_memory < 0:
            raise ArgumentError.here(f"CostModel(client_memory={self.client_memory}): negative.")

    def price(self, plan: Plan) -> float:
        """The price of running a plan once, per client."""
        down, up = plan.bytes
        network = self.down * down + self.up * up + self.round_trip * plan.rounds
        server = self.server_memory * plan.server_memory + self.server_work * plan.server_work
        return network + server

    def order(self, plan: Plan) -> tuple[float, int, int]:
        """What makes one plan better than another: its price, and then what the server needs. That
        is an estimate, so only a factor of four or more decides."""
        memory, work = plan.server_memory.bit_length() // 2, plan.server_work.bit_length() // 2
        return self.price(plan), memory, work

    @staticmethod
    def asked_more(plan: Plan, program: Plan) -> list[str]:
        """Placements that a derivative asks more often than the program itself does. Clients that
        are asked repeatedly anyway may report a count of their own first."""

        def more(p: str) -> bool:
            if program.addressed(p) > 1:
                return plan.asked(p) > program.asked(p)
            return plan.addressed(p) > 1

        return [p for p in plan.clients if more(p)]

    def allows(self, plan: Plan, program: Plan) -> bool:
        """May this derivative of `program` be run?"""
        if not self.readdress and self.asked_more(plan, program):
            return False
        if self.client_memory is None:
            return True
        return max(plan.client_memory.values(), default=0) <= self.client_memory


@dataclass(frozen=True, eq=False)
class Choice:
    """How a derivative is taken, and the derivative itself, if it was made to be priced: a function
    of the inputs that gives the outputs that are returned, and then the blocks."""

    taken: Taken
    order: tuple[float, int, int]  # what makes it better than another
    jaxpr: ClosedJaxpr | None = None


def choose(subject: Subject, cost: CostModel) -> Choice:
    """The cheapest choice that the cost model allows."""
    if not subject.units and cost.client_memory is None:
        return Choice(Taken(), (0, 0, 0))  # there is nothing to choose
    program = _plan(subject, subject.graph, recompute=False)
    prices: dict[Rules, Choice | None] = {}

    def price(rules: Rules) -> Choice | None:
        if rules not in prices:
            prices[rules] = _price(subject, rules, cost, program)
        return prices[rules]

    few = len(subject.units) <= EXHAUSTIVE
    vectors = rule_vectors(subject) if few else _promising(subject, price)
    found = [best for rules in vectors if (best := price(rules)) is not None]
    if not found:
        if any(is_while(unit) for _, unit in subject.units):
            refuse_forward_by_clients(subject)
        raise PlanError.here(
            f"no way to differentiate {subject.name} satisfies the cost model {cost}: "
            "every one asks clients again that the program asks only once, or needs more client "
            "memory. Allow it with fg.CostModel(readdress=True), or choose the mode yourself."
        )
    return min(found, key=lambda choice: choice.order)


def _price(subject: Subject, rules: Rules, cost: CostModel, program: Plan) -> Choice | None:
    made = derived(subject, rules)
    if made is None:
        return None
    jaxpr, graph = made
    best = None
    # Computing again is never cheaper: it is a way to live with little memory.
    for recompute in (False,) if cost.client_memory is None else (False, True):
        plan = _plan(subject, graph, recompute)
        if cost.allows(plan, program):
            order = cost.order(plan)
            if best is None or order < best.order:
                best = Choice(Taken(rules, recompute), order, jaxpr)
        if not recompute and not any(plan.client_memory.values()):
            break  # nothing is remembered, so there is nothing to recompute
    return best


def derived(subject: Subject, rules: Rules) -> tuple[ClosedJaxpr, Graph] | None:
    """The derivative by these rules as a program; None if JAX cannot take it that way."""
    values = [Value(v.aval, v.at, v.origin, v.shared) for v in subject.graph.inputs]

    def run(*leaves: Any) -> Any:
        outputs, blocks = derivative(subject, list(leaves), rules)
        return [outputs[i] for i in subject.returned], blocks

    try:
        jaxpr, _ = traced(run, subject.placements, *map(struct, values))
    except PlanError:
        return None
    except (ValueError, TypeError) as error:
        if impossible(error):
            return None
        raise
    try:
        return jaxpr, check(jaxpr, values, nested=True, derived=True)
    except PlacementError:
        # The program itself is fine, so what mixes placements is what JAX remembers of the two
        # branches of a cond, in slots that they share.
        return None


def _plan(subject: Subject, graph: Graph, recompute: bool) -> Plan:
    anyhow_many = dict.fromkeys(subject.placements, 2)  # nothing that is priced depends on it
    return Plan(subject.name, cut(graph, recompute), anyhow_many, None)


def _promising(subject: Subject, price: Callable[[Rules], Choice | None]) -> list[Rules]:
    """The cheapest vectors if the price of a round does not depend on the rules of the others:
    each rule of each round is priced alone, among local ones; then, for every place to turn from
    forward to backward, each round takes its cheapest rule."""
    count = len(subject.units)
    local = ("local",) * count

    def cheap(rules: Rules) -> float:
        found = price(rules)
        return math.inf if found is None else found.order[0]

    more = {
        (i, rule): cheap((*local[:i], rule, *local[i + 1 :]))
        for i, (_, unit) in enumerate(subject.units)
        for rule in RULES
        if possible(subject, unit, rule)
    }

    def best(i: int, rules: tuple[str, ...]) -> str:
        return min(rules, key=lambda rule: more.get((i, rule), math.inf))

    turns = sorted({number for number, _ in subject.units} | {math.inf})
    meeting = [
        tuple(
            best(i, ("local", "push") if number < turn else ("local", "pull"))
            for i, (number, _) in enumerate(subject.units)
        )
        for turn in turns
    ]
    pure = [
        (rule,) * count
        for rule in RULES
        if all(possible(subject, unit, rule) for _, unit in subject.units)
    ]
    return list(dict.fromkeys([*meeting, *pure]))
