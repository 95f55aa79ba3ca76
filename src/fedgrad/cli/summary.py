"""How a run went, for scripts and for a terminal."""

from typing import Any

from rich.table import Table

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
                "final": {key: float(curves[key][-1]) for key in run.measured if key in curves},
                "hyper": {key: float(values[-1]) for key, values in curves.under("hyper").items()},
                "rejected": int(curves["rejected"].sum()) if "rejected" in curves else 0,
                "communication_rounds": run.plans[name].rounds * run.rounds,
                "bytes": run.sent(name),
            }
            for name, curves in run.curves.items()
        },
    }


def show(run: Run) -> None:
    """Print a table and a sentence."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), title_justify="left")
    table.add_column(f"after {run.rounds:,} rounds", style="dim")
    for name in run.curves:
        table.add_column(name, justify="right")
    # The loss of the last cohort says less than an evaluation of everyone, where there is one.
    shown = [key for key in run.measured if key.startswith("eval.")] or run.measured
    for key in shown:
        ends = [curves[key][-1] if key in curves else None for curves in run.curves.values()]
        table.add_row(title(key), *("" if end is None else measure(key)(end) for end in ends))
    for name in run.learned:
        values = run.curves[run.main][f"hyper.{name}"]
        table.add_row(name, *[number(values[-1]), short(values[0])][: len(run.curves)])
    table.add_row("Sent in all", *(memory(run.sent(name) or 0) for name in run.curves))
    console = read.console()
    console.print(table)
    if verdict(run):
        console.print(verdict(run), highlight=False)
