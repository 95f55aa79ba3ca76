"""Chooses the cheapest rules for a derivative: `mode="auto"`.

Rounds are few, so the search is exact: every sensible vector of rules is traced, cut into a plan
like any other program, and priced by what that plan sends. So the planner knows what the plan
knows: that a constant cotangent needs no second pass, that a constant tangent need not be sent,
that an inactive round costs nothing. From four rounds on, only the vectors are traced that are
cheapest if the prices of the rounds add up, as they do.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from fedgrad.ad.derivative import Rules, Subject, Unit, has, refuse_forward_by_clients
from fedgrad.ad.rules import RULES, impossible
from fedgrad.core.errors import ArgumentError, PlacementError, PlanError, known_fields
from fedgrad.core.graph import Graph
from fedgrad.core.trace import Traced
from fedgrad.planning.cut import cut
from fedgrad.planning.plan import Plan

EXHAUSTIVE = 3  # up to so many rounds, every vector of rules is traced


@known_fields
@dataclass(frozen=True)
class CostModel:
    """The cost of a plan, by which `mode="auto"` chooses.

    The server's prices are zero by default; then its memory and work decide only between plans that
    cost the network the same.

    Args:
        down: The price of a byte sent to a client.
        up: The price of a byte sent by a client.
        round_trip: The price of a round.
        readdress: Whether a derivative may address clients again that the program itself addresses
            only once. By default it may not: in most federations the same clients are not available
            twice.
        client_memory: The bytes that a client can keep between rounds; None is no limit.
        server_memory: The price of a byte of the server's peak memory.
        server_work: The price of one of the server's operations.
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
        """Return the price of running a plan once, per client."""
        down, up = plan.bytes
        price = self.down * down + self.up * up + self.round_trip * plan.rounds
        if self.server_memory or self.server_work:
            price += self.server_memory * plan.server_memory + self.server_work * plan.server_work
        return price

    @staticmethod
    def asked_more(plan: Plan, program: Plan) -> list[str]:
        """Return the placements that a derivative asks more often than the program itself does.
        Clients that are asked repeatedly anyway may report a count of their own first."""

        def more(p: str) -> bool:
            if program.addressed(p) > 1:
                return plan.asked(p) > program.asked(p)
            return plan.addressed(p) > 1

        return [p for p in plan.clients if more(p)]

    def allows(self, plan: Plan, program: Plan) -> bool:
        """Whether this derivative of `program` may be run."""
        if not self.readdress and self.asked_more(plan, program):
            return False
        if self.client_memory is None:
            return True
        return max(plan.client_memory.values(), default=0) <= self.client_memory


@dataclass(frozen=True, eq=False)
class Choice:
    """An allowed derivative and its price."""

    made: Traced
    plan: Plan
    price: float

    @property
    def server(self) -> tuple[int, int]:
        """The server's memory and work. They are estimates, so only a factor of four or more
        decides."""
        return self.plan.server_memory.bit_length() // 2, self.plan.server_work.bit_length() // 2


def choose(subject: Subject, cost: CostModel, make: Callable[[Rules], Traced]) -> Traced:
    """Return the cheapest derivative that the cost model allows; `make` traces it by a vector of
    rules."""

    @functools.cache
    def program() -> Plan:
        return _plan(subject, cut(subject.graph))

    taken: list[Traced] = []  # all derivatives that exist, at any price
    mixed: list[PlacementError] = []  # why some rules have none

    @functools.cache
    def priced(rules: Rules) -> list[Choice]:
        try:
            made = _possible(make, rules)
        except PlacementError as error:
            # The program itself is fine. Placements are mixed either by the residuals of a cond's
            # branches, which JAX stores in shared slots, so other rules may work; or by the user's
            # rule of a custom derivative, so none will.
            mixed.append(error)
            return []
        if made is None:
            return []
        taken.append(made)
        return _priced(subject, made, cost, program)

    few = len(subject.units) <= EXHAUSTIVE
    vectors = rule_vectors(subject) if few else _promising(subject, priced)
    found = [choice for rules in vectors for choice in priced(rules)]
    if not found:
        if mixed and not taken:
            raise mixed[0]
        if any(has(unit, "while") for _, unit in subject.units):
            refuse_forward_by_clients(subject)
        raise PlanError.here(
            f"no way to differentiate {subject.name} satisfies the cost model {cost}: "
            "every one asks clients again that the program asks only once, or needs more client "
            "memory. Allow it with fg.CostModel(readdress=True), or choose the mode yourself."
        )
    least = min(choice.price for choice in found)
    cheapest = [choice for choice in found if choice.price == least]
    if len(cheapest) == 1:
        return cheapest[0].made
    return min(cheapest, key=lambda choice: choice.server).made


def _possible(make: Callable[[Rules], Traced], rules: Rules) -> Traced | None:
    """Return the derivative by these rules, or None if JAX cannot compute it that way."""
    try:
        return make(rules)
    except PlanError:
        return None
    except (ValueError, TypeError) as error:
        if impossible(error):
            return None
        raise


def _priced(
    subject: Subject, made: Traced, cost: CostModel, program: Callable[[], Plan]
) -> list[Choice]:
    """Return the allowed variants of a derivative: with clients that remember, or that
    recompute."""
    found = []
    # Recomputing is never cheaper: it only saves memory.
    for recompute in (False,) if cost.client_memory is None else (False, True):
        graph = cut(made.graph, recompute)
        plan = _plan(subject, graph)
        # If nobody is asked twice, or that is allowed, no comparison with the program is needed.
        compared = plan.readdressed and not cost.readdress
        if cost.allows(plan, program() if compared else plan):
            made = dataclasses.replace(made, recompute=recompute, plan=graph)
            found.append(Choice(made, plan, cost.price(plan)))
        if not recompute and not any(plan.client_memory.values()):
            break  # nothing is remembered, so there is nothing to recompute
    return found


def _plan(subject: Subject, graph: Graph) -> Plan:
    anyhow_many = dict.fromkeys(subject.placements, 2)  # no price depends on the number
    return Plan(subject.name, graph, anyhow_many, None)


def _promising(subject: Subject, priced: Callable[[Rules], list[Choice]]) -> list[Rules]:
    """Return the cheapest vectors, assuming that the price of a round does not depend on the rules
    of the others. Each rule of each round is priced alone, with all others local; then, for every
    turning point from forward to backward, each round takes its cheapest rule."""
    count = len(subject.units)
    local = ("local",) * count

    def cheap(rules: Rules) -> float:
        return min((choice.price for choice in priced(rules)), default=math.inf)

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


def rule_vectors(subject: Subject) -> list[Rules]:
    """Return every sensible choice of rules. A round that is pulled back gives no tangent to those
    that are pushed forward, so no round is pushed at or after it."""
    if subject.at_clients and any(has(unit, "while") for _, unit in subject.units):
        return []
    vectors: list[Rules] = [()]
    for number, unit in subject.units:
        vectors = [
            (*vector, name)
            for vector in vectors
            for name in RULES
            if possible(subject, unit, name) and not _crosses(subject, vector, name, number)
        ]
    return vectors


def possible(subject: Subject, unit: Unit, name: str) -> bool:
    """Whether this round can have this rule, whatever the others have."""
    rule = RULES[name]
    if subject.at_clients and not rule.by_clients:
        return False
    return rule.through_while or not has(unit, "while")


def _crosses(subject: Subject, vector: Rules, name: str, number: int) -> bool:
    """Whether a rule for the unit at `number` contradicts those of the units before it."""
    forward = RULES[name].forward
    before = [(RULES[n].forward, at) for n, (at, _) in zip(vector, subject.units, strict=False)]
    if forward is True:
        return any(way is False for way, _ in before)
    return forward is False and any(way is True and at == number for way, at in before)
