"""The race of a run: who took part, who was dropped, when and why."""

import math
from dataclasses import dataclass

import numpy as np

from fedgrad.report.charts import html
from fedgrad.report.page import table
from fedgrad.report.run import Run, Series
from fedgrad.show.charts import Chart, Curve
from fedgrad.show.markup import Content, element
from fedgrad.show.numbers import number

LOSS, RANK = "race.loss.", "race.rank."
COLOURS = ("p0", "p1", "p2", "p3", "p4")


@dataclass(frozen=True)
class Runner:
    """A candidate: its curves, and the numbers that decided."""

    name: str
    loss: Series
    until: int  # the last round that it raced in
    mean_loss: float  # of the rounds that counted
    mean_rank: float


def has_race(run: Run) -> bool:
    """Whether there was one."""
    return any(name.startswith(RANK) for name in run.curves[run.main])


def race(run: Run) -> list[Content]:
    """A chart of the candidates' losses, which end where they were dropped, and a table."""
    runners = _runners(run)
    ends = sorted({one.until for one in runners})
    curves = [
        Curve(
            one.name,
            one.loss.rounds,
            one.loss.values,
            COLOURS[i] if i < len(COLOURS) else "line",
            "line" if i < len(COLOURS) else "thin",
        )
        for i, one in enumerate(runners)
    ]
    about = (
        "Candidates are trained in the same rounds by the same clients. Each client ranks their "
        "models by the loss on examples that none of them trains on (0 is the best); those with "
        "the best mean rank in the second half of a stage go on."
    )
    best = {end: min(o.mean_rank for o in runners if o.until >= end) for end in ends}
    rows = [
        (
            one.name,
            f"{one.until:,}",
            number(one.mean_loss),
            f"{one.mean_rank:.2f}",
            "goes on alone"
            if i == 0
            else "dropped: diverged"
            if not math.isfinite(one.mean_loss)
            else f"dropped: the best had {best[one.until]:.2f}",
        )
        for i, one in enumerate(runners)
    ]
    shown = Chart("Loss on held-out examples", curves, "round", note="of the received models")
    return [
        element("p", about, class_="note"),
        element("div", html(shown), class_="charts"),
        table(("candidate", "raced until round", "loss", "mean rank", "and then"), rows),
    ]


def _runners(run: Run) -> list[Runner]:
    """The candidates, those that stayed longest first, then by rank."""
    curves = run.curves[run.main]
    ranks = {n.removeprefix(RANK): s for n, s in curves.items() if n.startswith(RANK)}
    ends = sorted({int(s.rounds[-1]) for s in ranks.values()})
    found = []
    for name, rank in ranks.items():
        end = int(rank.rounds[-1])
        begin = max((e for e in ends if e < end), default=0)
        loss = curves[LOSS + name]

        def counted(series: Series, after: int = (begin + end) // 2) -> float:
            values = series.values[series.rounds > after]
            return float(np.mean(values)) if len(values) else math.nan

        found.append(Runner(name, loss, end, counted(loss), counted(rank)))
    return sorted(found, key=lambda one: (-one.until, one.mean_rank))
