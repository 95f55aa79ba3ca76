"""The cuts of a race: after which part of all rounds who is left."""

import builtins
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scipy.special import ndtri, stdtrit

from fedgrad.core.errors import ArgumentError, require_whole

# After a part of all rounds; or that, and at least so many. It is the key of a mapping, and mypy
# takes a mapping with keys of one kind for none with keys of either: they are Any there.
When = float | tuple[float, int]
Left = int | Mapping[str, int]  # how many are left: in all, or of each family
CHANCE = 1e-3  # how likely it may be that something looks better, or worse, and is not
SYNTAX = (
    "after a part of all rounds so many candidates are left, such as {0.1: 3, 0.25: 1}; or so many "
    'of each family, {0.1: {"adam": 2, "avgm": 1}, 0.25: 1}'
)


@dataclass(frozen=True)
class Cuts:
    """When candidates are judged, and who is left."""

    cuts: Mapping[Any, Left]
    order: list[str]  # of the candidates: of two that are equal, the first one stays
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
        """Return for each cut after which round judging begins, after which it ends, and how many
        are left then."""
        lefts: dict[int, Left] = {}
        for part in sorted(self.cuts, key=both):
            # The first round judges the model that all begin with, which tells nothing.
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
        """Who is left, by mean ranks that were summed over so many rounds, the squares of what each
        was ahead of the incumbent by, and how many clients judged, once for each round."""
        known = {n: float(scores[n]) for n in self.order if n in scores}
        ranked = sorted(known, key=lambda n: known[n])
        if isinstance(left, Mapping):
            each = {f: filter(_family(left, f), ranked) for f in left}
            best = [n for f, count in left.items() for n in [*each[f]][:count]]
        else:
            best = ranked[:left]
        if self.incumbent is None or self.incumbent in best:
            return best
        if len(best) > 1:  # of so many without families it is one
            return [*(best if isinstance(left, Mapping) else best[:-1]), self.incumbent]
        ahead = (known[self.incumbent] - known[best[0]]) / rounds
        if math.isinf(ahead):  # it has diverged
            return best
        spread = float(squares[best[0]]) / rounds - ahead**2
        if rounds == 1:  # which tells nothing of chance
            return [self.incumbent]
        error = math.sqrt(max(spread, 0) / (rounds - 1))
        # A few rounds may agree by chance. Clients that do not care at all would rank k candidates
        # in any order, so that two of them differ by the root of k (k + 1) / 6.
        k = len(known)
        careless = math.sqrt(k * (k + 1) / 6 / max(votes, 1))
        certain = max(by_chance(rounds - 1) * error, by_chance(math.inf) * careless)
        return best if ahead > certain else [self.incumbent]


def by_chance(freedom: float) -> float:
    """How many standard errors chance explains, if these are known by so many degrees of freedom:
    by Student's t, because rounds are few."""
    return float(stdtrit(freedom, 1 - CHANCE) if math.isfinite(freedom) else ndtri(1 - CHANCE))


def after(part: When, planned: int) -> int:
    """How many rounds are done after a part of all."""
    share, least = both(part)
    return max(least, round(share * planned))


def both(part: When) -> tuple[float, int]:
    """A part of all rounds, and at least how many."""
    return part if isinstance(part, tuple) else (part, 1)


def require_part(what: str, part: Any) -> None:
    """Refuse what does not say when."""
    share, least = part if isinstance(part, tuple) and len(part) == 2 else (part, 1)
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not 0 < share <= 1 or type(least) is not int or least < 1:
        raise ArgumentError.here(
            f"fg.race({what}=): something is to happen after {part!r} of all rounds. Give a part "
            "between 0 and 1, such as 0.25, or (0.25, 10): at least ten."
        )


def _family(families: Iterable[str], family: str) -> Callable[[str], bool]:
    """Whether a candidate is of this family: its name begins so, and with no longer one's name."""

    def of(name: str) -> bool:
        found = [f for f in families if name.startswith(f)]
        return bool(found) and max(found, key=len) == family

    return of
