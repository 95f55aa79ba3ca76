"""How a run went, for scripts and for a terminal."""

from typing import Any

from rich.table import Table

from fedgrad.algorithms.metrics import Metrics
from fedgrad.cli import options as read
from fedgrad.report.run import Run
from fedgrad.report.top import verdict
from fedgrad.report.words import measure, title
from fedgrad.show.numbers import memory, number, short


def summary(run: Run) -> dict[str, Any]:
    """What scripts want to know."""
    return {
        "folder": run.folder,
        "rounds": run.rounds,
        "runs": {
            name: {
                "final": {k: float(curves[k].values[-1]) for k in run.measured if k in curves},
                "hyper": {k: float(v.values[-1]) for k, v in run.metrics(name).hyper.items()},
                "rejected": _rejected(run.metrics(name)),
                "communication_rounds": run.plans[name].rounds * run.rounds,
                "bytes": run.sent(name),
            }
            for name, curves in run.curves.items()
        },
    }


def _rejected(found: Metrics) -> int:
    return 0 if found.rejected is None else int(found.rejected.values.sum())


def show(run: Run) -> None:
    """Print a table and a sentence."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), title_justify="left")
    table.add_column(f"after {run.rounds:,} rounds", style="dim")
    for name in run.curves:
        table.add_column(name, justify="right")
    # The loss of the last cohort says less than an evaluation of everyone, where there is one.
    shown = [key for key in run.measured if key in run.evaluated] or run.measured
    for key in shown:
        ends = [curves.get(key) for curves in run.curves.values()]
        table.add_row(title(key), *(measure(key)(end.values[-1]) if end else "" for end in ends))
    for name in run.learned:
        values = run.metrics().hyper[name].values
        table.add_row(name, *[number(values[-1]), short(values[0])][: len(run.curves)])
    table.add_row("Sent in all", *(memory(run.sent(name) or 0) for name in run.curves))
    console = read.console()
    console.print(table)
    if verdict(run):
        console.print(verdict(run), highlight=False)
