"""The cuts of a race: who remains after which fraction of all rounds."""

import builtins
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scipy.special import ndtri, stdtrit

from fedgrad.core.errors import ArgumentError, require_whole

# After a fraction of all rounds, optionally with a least number of rounds. It is the key of a
# mapping; mappings are invariant in their keys for mypy, so the keys are Any there.
When = float | tuple[float, int]
Left = int | Mapping[str, int]  # how many remain: in total, or per family
CHANCE = 1e-3  # the significance level of comparisons
SYNTAX = (
    "after a part of all rounds so many candidates are left, such as {0.1: 3, 0.25: 1}; or so many "
    'of each family, {0.1: {"adam": 2, "avgm": 1}, 0.25: 1}'
)


@dataclass(frozen=True)
class Cuts:
    """The cuts of a race: when candidates are judged, and how many remain."""

    cuts: Mapping[Any, Left]
    order: list[str]  # of the candidates: the first one wins a tie
    incumbent: str | None

    def __post_init__(self) -> None:
        if not isinstance(self.cuts, Mapping):
            raise ArgumentError.here(f"cuts={self.cuts!r}: {SYNTAX}.")
        counts = []
        for part, left in self.cuts.items():
            require_part("cuts", part)
            families = left if isinstance(left, Mapping) else {"": left}
            for family, count in families.items():
                require_whole("cuts", count)
                if not any(map(_family(families, family), self.order)):
                    raise ArgumentError.here(
                        f"cuts={self.cuts}: no candidate is of the family {family!r}; their names "
                        f"begin with it. There are {', '.join(self.order)}."
                    )
            lost = [n for n in self.order if not any(map(n.startswith, families))]
            if lost:
                raise ArgumentError.here(f"cuts={self.cuts}: {SYNTAX}. {lost[0]!r} is of none.")
            counts.append((both(part), builtins.sum(families.values())))
        left_over = [count for _, count in sorted(counts)]
        if not counts or left_over[-1] != 1 or left_over != sorted(left_over, reverse=True):
            raise ArgumentError.here(
                f"cuts={self.cuts}: fewer and fewer candidates are left, at last 1: "
                "{0.1: 3, 0.25: 1}."
            )

    def ends(self, planned: int) -> list[tuple[int, int, Left]]:
        """Return (begin, end, left) for each cut.

        Judging begins after round `begin` and ends after round `end`; then `left` candidates
        remain.
        """
        lefts: dict[int, Left] = {}
        for part in sorted(self.cuts, key=both):
            # The first round judges the initial model that all share, which carries no information.
            lefts[max(2, after(part, planned))] = self.cuts[part]
        begins = [0, *lefts]
        return [
            ((begin + end) // 2, end, left)
            for begin, (end, left) in zip(begins, lefts.items(), strict=False)
        ]

    def best(
        self,
        scores: Mapping[str, Any],
        squares: Mapping[str, Any],
        left: Left,
        rounds: int,
        votes: float,
    ) -> list[str]:
        """Return who remains.

        Args:
            scores: Mean ranks, summed over `rounds`.
            squares: Squared leads of each candidate over the incumbent, summed likewise.
            left: How many remain.
            rounds: The number of rounds judged.
            votes: How many clients judged, summed over these rounds.
        """
        known = {n: float(scores[n]) for n in self.order if n in scores}
        ranked = sorted(known, key=lambda n: known[n])
        if isinstance(left, Mapping):
            each = {f: filter(_family(left, f), ranked) for f in left}
            best = [n for f, count in left.items() for n in [*each[f]][:count]]
        else:
            best = ranked[:left]
        if self.incumbent is None or self.incumbent in best:
            return best
        if len(best) > 1:  # without families, the incumbent takes the last place
            return [*(best if isinstance(left, Mapping) else best[:-1]), self.incumbent]
        ahead = (known[self.incumbent] - known[best[0]]) / rounds
        if math.isinf(ahead):  # the incumbent has diverged
            return best
        spread = float(squares[best[0]]) / rounds - ahead**2
        if rounds == 1:  # one round gives no estimate of chance
            return [self.incumbent]
        error = math.sqrt(max(spread, 0) / (rounds - 1))
        # A few rounds may agree by chance. Indifferent clients would rank k candidates in random
        # order; the difference of two ranks then has a standard deviation of sqrt(k (k + 1) / 6).
        k = len(known)
        careless = math.sqrt(k * (k + 1) / 6 / max(votes, 1))
        certain = max(by_chance(rounds - 1) * error, by_chance(math.inf) * careless)
        return best if ahead > certain else [self.incumbent]


def by_chance(freedom: float) -> float:
    """Return how many standard errors are significant at level CHANCE. The errors have `freedom`
    degrees of freedom; Student's t, because rounds are few."""
    return float(stdtrit(freedom, 1 - CHANCE) if math.isfinite(freedom) else ndtri(1 - CHANCE))


def after(part: When, planned: int) -> int:
    """Return how many rounds make up a fraction of all."""
    share, least = both(part)
    return max(least, round(share * planned))


def both(part: When) -> tuple[float, int]:
    """Return the fraction of all rounds, and the least number of rounds."""
    return part if isinstance(part, tuple) else (part, 1)


def require_part(what: str, part: Any) -> None:
    """Refuse anything but a fraction of all rounds, optionally with a least number."""
    share, least = part if isinstance(part, tuple) and len(part) == 2 else (part, 1)
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not 0 < share <= 1 or type(least) is not int or least < 1:
        raise ArgumentError.here(
            f"fg.race({what}=): something is to happen after {part!r} of all rounds. Give a part "
            "between 0 and 1, such as 0.25, or (0.25, 10): at least ten."
        )


def _family(families: Iterable[str], family: str) -> Callable[[str], bool]:
    """Return a predicate: whether `family` is the longest of `families` that prefixes a name."""

    def of(name: str) -> bool:
        found = [f for f in families if name.startswith(f)]
        return bool(found) and max(found, key=len) == family

    return of
