"""The outcome of a run, for scripts and for a terminal."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from fedgrad.algorithms.metrics import Metrics
from fedgrad.cli import options as read
from fedgrad.planning.plan import Plan
from fedgrad.reports.plans_section import KeptPlan
from fedgrad.reports.run_source import Run
from fedgrad.reports.top_section import verdict
from fedgrad.reports.words import measure, title
from fedgrad.show.numbers import memory, number, short
from fedgrad.show.phases import Phases


@dataclass(frozen=True)
class Sent:
    """The communication of a whole run according to its plans, summed over all clients."""

    communication_rounds: int
    bytes: int

    @staticmethod
    def of(planned: Phases) -> "Sent":
        """Sum over the phases of a training."""
        return Sent(
            sum(phase.plan.rounds * phase.rounds for phase in planned.phases),
            sum(_bytes(phase.plan) * phase.rounds for phase in planned.phases),
        )


def _bytes(plan: Plan) -> int:
    """Return the bytes down and up in one training round."""
    return sum(KeptPlan(plan.name, plan.rounds, plan.clients, plan.traffic, {}, ()).sent())


def of_one(run: Run, sent: Sent) -> dict[str, Any]:
    """Summarize a run that was trained once, for scripts."""
    return {"folder": run.folder, "rounds": run.rounds, **_ended(run, run.main, sent)}


def of_each(run: Run) -> dict[str, Any]:
    """Summarize a learned run and its fixed counterpart, for scripts."""
    every = {
        name: Sent(run.plans[name].rounds * run.rounds, run.sent(name) or 0) for name in run.curves
    }
    runs = {name: _ended(run, name, sent) for name, sent in every.items()}
    return {"folder": run.folder, "rounds": run.rounds, "runs": runs}


def _ended(run: Run, name: str, sent: Sent) -> dict[str, Any]:
    curves, metrics = run.curves[name], run.metrics(name)
    return {
        "final": {k: float(curves[k].values[-1]) for k in run.measured if k in curves},
        "hyper": {k: float(v.values[-1]) for k, v in metrics.hyper.items()},
        "rejected": _rejected(metrics),
        "communication_rounds": sent.communication_rounds,
        "bytes": sent.bytes,
    }


def _rejected(found: Metrics) -> int:
    return 0 if found.rejected is None else int(found.rejected.values.sum())


def show(run: Run, sent: Sent | None = None) -> None:
    """Print a table and a sentence. `sent` is given for a run that was trained once."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), title_justify="left")
    table.add_column(f"after {run.rounds:,} rounds", style="dim")
    for name in run.curves:
        table.add_column(name if sent is None else "", justify="right")
    # An evaluation of all clients says more than the loss of the last cohort.
    shown = [key for key in run.measured if key in run.evaluated] or run.measured
    for key in shown:
        ends = [curves.get(key) for curves in run.curves.values()]
        table.add_row(title(key), *(measure(key)(end.values[-1]) if end else "" for end in ends))
    for name in run.learned:
        values = run.metrics().hyper[name].values
        table.add_row(name, *[number(values[-1]), short(values[0])][: len(run.curves)])
    every = [run.sent(name) or 0 for name in run.curves] if sent is None else [sent.bytes]
    table.add_row("Sent in all", *map(memory, every))
    console = read.console()
    console.print(table)
    if verdict(run):
        console.print(verdict(run), highlight=False)
