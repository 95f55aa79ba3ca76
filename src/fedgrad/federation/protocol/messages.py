"""Messages of one run. Clients that do not answer are dropped from every sum, or the call fails."""

from collections.abc import Collection
from dataclasses import dataclass

from fedgrad.federation.protocol.call_report import Dropped, Report
from fedgrad.federation.protocol.delivery import Arrays, Delivery, Terms, Work
from fedgrad.federation.protocol.federation import Federation
from fedgrad.federation.protocol.federation_errors import CohortMismatch, NoAnswer


@dataclass
class Group:
    """The clients of a placement, in the order in which their answers are summed."""

    clients: list[int]
    wanted: int | None = None  # the group becomes the first `wanted` clients to answer
    settled: bool = False  # sums over the group were used: it must not change any more

    @property
    def needed(self) -> int:
        """The number of answers to wait for."""
        return len(self.clients) if self.wanted is None else self.wanted


class BeginAgain(Exception):
    """Clients were lost after their values had been used. The groups no longer contain them."""


class Messages:
    """The messages of one run of a plan.

    Invariant: every sum of a placement is over the same clients, those of its group at the end.
    """

    def __init__(
        self, federation: Federation, groups: dict[str, Group], terms: Terms, report: Report
    ) -> None:
        self.federation, self.groups, self.terms, self.report = federation, groups, terms, report
        self.nodes = federation.locate({c for group in groups.values() for c in group.clients})

    def send(self, work: list[Work]) -> list[list[Arrays]]:
        """Send all work; return one row of arrays per client for each work, in group order."""
        placements = list(dict.fromkeys(w.placement for w in work))
        groups = {placement: self.groups[placement] for placement in placements}
        theirs: dict[int, list[tuple[Work, int]]] = {}
        for w in work:
            for client in groups[w.placement].clients:
                theirs.setdefault(client, []).append((w, groups[w.placement].needed))
        delivery = Delivery(self.federation, self.nodes, theirs, self.terms, self.report)

        def enough(good: Collection[int]) -> bool:
            return all(sum(c in good for c in g.clients) >= g.needed for g in groups.values())

        selecting = any(group.wanted is not None for group in groups.values())
        delivery.run(enough if selecting else None)
        again = [self._settle(p, delivery) for p in placements]  # all, to record every loss
        if any(again):
            self.report.restarts += 1
            raise BeginAgain
        for w in work:
            groups[w.placement].settled |= bool(w.sums)
        return [
            [_part(delivery.good[c], theirs[c], w) for c in groups[w.placement].clients]
            for w in work
        ]

    def _settle(self, placement: str, delivery: Delivery) -> bool:
        """Drop the clients that did not answer; return True if the run must begin again."""
        group = self.groups[placement]
        came = [c for c in delivery.good if c in group.clients]
        chosen = came[: group.needed]
        short = len(chosen) < group.needed
        if short and not (self.terms.restart if group.settled else self.terms.drop):
            self._fail(placement, delivery)
        left = [c for c in group.clients if c not in chosen]
        for client in left:
            reason = delivery.bad.get(client, "others answered first")
            self.report.dropped.append(Dropped(client, placement, reason))
        group.clients, group.wanted = [c for c in group.clients if c in chosen], None
        # A node cannot see who else answers, so the server enforces the minimum cohort of its site.
        sites = [self.federation.minimum_cohort[self.nodes[c]] for c in group.clients]
        least = max([self.terms.at_least, *sites])
        if len(group.clients) < least:
            raise NoAnswer.here(
                f"{self.report.program}: {len(group.clients)} {placement} answered, at least "
                f"{least} have to. {_reasons(placement, self.report.dropped)}"
            )
        return group.settled and bool(left)

    def _fail(self, placement: str, delivery: Delivery) -> None:
        group = self.groups[placement]
        bad = [c for c in group.clients if c in delivery.bad]
        dropped = [Dropped(c, placement, delivery.bad[c]) for c in bad]
        reasons = _reasons(placement, dropped)
        name = self.report.program
        if group.settled:
            raise CohortMismatch.here(
                f"{name}: a client that has to be asked again is lost. {reasons} The server has "
                "sums with it already. To begin again without it would show what it had sent: its "
                "term is the sum before minus the sum after. If that may be, missing='restart' "
                "does it."
            )
        if delivery.lost & set(bad):
            raise CohortMismatch.here(
                f"{name}: a client that has to be asked again is lost. {reasons} With "
                "missing='drop' the call is without it."
            )
        raise NoAnswer.here(
            f"{name}: not all clients answered within {self.terms.deadline} s. {reasons} With "
            "missing='drop' they are left out of the result and of its derivative."
        )


def _part(arrays: Arrays, theirs: list[tuple[Work, int]], wanted: Work) -> Arrays:
    """Return the part of a client's arrays that belongs to one work."""
    start = 0
    for work, _ in theirs:
        if work is wanted:
            break
        start += len(work.sums)
    return arrays[start : start + len(wanted.sums)]


def _reasons(placement: str, dropped: Collection[Dropped]) -> str:
    return " ".join(f"Client {d.client} ({placement}): {d.reason}." for d in dropped)
