"""The race of a run: its candidates, and when and why each was dropped."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedgrad.reports.chart_html import html
from fedgrad.reports.page import table
from fedgrad.reports.run_source import Run
from fedgrad.reports.series import Series
from fedgrad.show.drawing import Chart, Curve
from fedgrad.show.markup import Content, element
from fedgrad.show.numbers import number

LOSS, RANK, WON, PACE = "race.loss.", "race.rank.", "race.won.", "race.pace."
COLORS = ("p0", "p1", "p2", "p3", "p4")
ABOUT = (
    "Candidates are trained in the same rounds by the same clients. Each client ranks their models "
    "by the loss on examples that are held out (0 is the best); those with the best mean rank in "
    "the second half of a stage go on, of each family where there are families. A candidate that "
    "was given first, and only gives way to what is better, trains on these examples too."
)


@dataclass(frozen=True)
class Race:
    """The candidates of a race by name, with their losses and ranks, and the winner."""

    losses: Mapping[str, Series]
    ranks: Mapping[str, Series]
    winner: str | None  # None if the race goes on, or the winner was not recorded
    over: bool
    pace: Series | None = None  # the factor on the winner's rates

    def until(self, name: str) -> int:
        """Return the last round in which a candidate raced."""
        return int(self.ranks[name].rounds[-1])

    def mean(self, name: str, of: Mapping[str, Series], end: int) -> float:
        """Return the mean over the rounds that counted for the cut after round `end`."""
        first = min(int(series.rounds[0]) for series in self.ranks.values())
        begin = max([first - 1, *(e for e in map(self.until, self.ranks) if e < end)])
        over = self.over or end < max(map(self.until, self.ranks))
        after = (begin + end) // 2 if over else begin
        series = of[name]
        values = series.values[(series.rounds > after) & (series.rounds <= end)]
        return float(np.mean(values)) if len(values) else math.nan

    def stays(self, name: str, end: int) -> bool:
        """Return whether a candidate was still in the race after round `end`."""
        return self.until(name) > end or name == self.winner

    def went_back(self) -> list[int]:
        """Return the rounds in which the winner was rolled back because its loss rose."""
        if self.pace is None:
            return []
        slower = np.diff(self.pace.values, prepend=1.0) < 0
        return [int(round) for round in self.pace.rounds[slower]]

    def order(self) -> list[str]:
        """Sort the candidates: the winner, then those that stayed longest, then by rank."""

        def place(name: str) -> tuple[bool, int, float]:
            end = self.until(name)
            return name != self.winner, -end, self.mean(name, self.ranks, end)

        return sorted(self.ranks, key=place)


def has_race(run: Run) -> bool:
    """Return whether the run had a race."""
    return any(name.startswith(RANK) for name in run.curves[run.main])


def won(run: Run) -> str:
    """Return a sentence that names the winner, or "" while the race goes on."""
    if not has_race(run) or (run.compared and not run.tuned):
        return ""
    whole = _races(run).get("")
    if whole is None or whole.winner is None:
        return ""
    end = max(map(whole.until, whole.ranks))
    return (
        f"{whole.winner} won the race of {len(whole.ranks)} and goes on alone since round {end:,}."
        f"{_slower(whole)}"
    )


def race(run: Run) -> list[Content]:
    """Return a chart of the candidates' losses, each of which ends where it was dropped, and a
    table; nested races inside of a candidate follow."""
    races = _races(run)
    return [
        element("p", f"Of {run.main}. {ABOUT}" if run.compared else ABOUT, class_="note"),
        [
            [element("h3", f"Inside of {name}") if name else None, *_shown(races[name])]
            for name in sorted(races)
        ],
    ]


def _slower(race: Race) -> str:
    """Return a sentence about the rollbacks of the winner, or "" if there were none."""
    back = race.went_back()
    if not back:
        return ""
    *first, last = (f"{round:,}" for round in back)
    rounds = f"rounds {', '.join(first)} and {last}" if first else f"round {last}"
    return f" Its loss rose, so in {rounds} it went back, to go on with half the rate."


def _shown(race: Race) -> list[Content]:
    names = race.order()
    curves = [
        Curve(
            name,
            race.losses[name].rounds,
            race.losses[name].values,
            COLORS[i] if i < len(COLORS) else "line",
            "line" if i < len(COLORS) else "thin",
        )
        for i, name in enumerate(names)
    ]
    rows = []
    for name in names:
        end = race.until(name)
        loss, rank = (race.mean(name, of, end) for of in (race.losses, race.ranks))
        then = _then(race, name, loss, name == names[0])
        rows.append((name, f"{end:,}", number(loss), f"{rank:.2f}", then))
    chart = Chart("Loss on held-out examples", curves, "round", note="of the received models")
    columns = ("candidate", "until round", "loss", "mean rank", "and then")
    return [element("div", html(chart), class_="charts"), table(columns, rows)]


def _then(race: Race, name: str, loss: float, first: bool) -> str:
    """Return what became of a candidate, and why."""
    end = race.until(name)
    if name == race.winner:
        slower = _slower(race)
        return f"goes on alone.{slower}" if slower else "goes on alone"
    stayed = [race.mean(n, race.ranks, end) for n in race.ranks if race.stays(n, end)]
    if not stayed and race.over:
        return "had the best rank" if first else ""
    if not stayed:  # no one was dropped at that round: the race goes on
        return "leads" if first else "is still in it"
    if not math.isfinite(loss):
        return "dropped: diverged"
    words = sorted({f"{rank:.2f}" for rank in (min(stayed), max(stayed))}, key=float)
    return f"dropped: those that stayed had {' to '.join(words)}"


def _races(run: Run) -> dict[str, Race]:
    """Return the races of a run: the main one as "", and nested ones by their candidate's name."""
    curves = run.curves[run.main]
    found: dict[str, Race] = {}
    for group in sorted(
        {n.removeprefix(RANK).rpartition(".")[0] for n in curves if n.startswith(RANK)}
    ):
        prefix = f"{group}." if group else ""

        def under(kind: str, start: str = prefix) -> dict[str, Series]:
            names = [n for n in curves if n.startswith(kind + start)]
            short = {n.removeprefix(kind + start): curves[n] for n in names}
            return {n: series for n, series in short.items() if "." not in n}

        winner = next(iter(under(WON)), None)
        pace = next(iter(under(PACE).values()), None)
        ranks = under(RANK)
        # A race inside of a candidate ends with that candidate, at the latest.
        alive = curves.get(WON + group, curves.get(RANK + group)) if group else None
        last = run.rounds if alive is None else int(alive.rounds[-1])
        over = winner is not None or last > max(int(s.rounds[-1]) for s in ranks.values())
        found[group] = Race(under(LOSS), ranks, winner, over, pace)
    return found
