"""Figures of the best of n trials, of trial against trial and of trajectories, and tables."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

import fedgrad as fg
from fedgrad_experiments.maximum import trials_to_reach
from fedgrad_experiments.results import Results, Table
from fedgrad_experiments.server_optimizer.outcome import (
    PUBLISHED,
    PUBLISHED_FOR,
    metric_of,
    outcome,
    trajectories,
)
from fedgrad_experiments.server_optimizer.training import KINDS, LEARN

# kind: (label, color, stroke). The guard is in the tables only: where it does not intervene,
# nothing differs.
STYLES: dict[str, tuple[str, str, Any]] = {
    "learned": ("learned", "p0", "line"),
    "validation": ("learned from validation clients", "p1", "line"),
    "fixed": ("fixed", "p2", "dashed"),
}
TITLES = {
    "fixed": "fixed",
    "learned": "learned",
    "guarded": "learned, with guard",
    "validation": "learned from validation clients",
}
SHOWN = 20  # trajectories in a panel


def figures(results: Results) -> Mapping[str, fg.charts.Figure]:
    """Draw one row per task (or hyperparameter) and one column per initialization."""
    tasks = results.facts["tasks"]
    return {
        "best-of-n": _figure(results, tasks, _best_of_n),
        "trial-by-trial": _figure(results, tasks, _trial_by_trial),
        **{
            f"trajectories-{task}": _figure(results, LEARN, partial(_trajectories, task))
            for task in tasks
        },
    }


def tables(results: Results) -> list[Table]:
    """Return one table per task, and a comparison of the best trials with the paper's."""
    return [*(_table(results, task) for task in results.facts["tasks"]), best_accuracy([results])]


def best_accuracy(every: Iterable[Results]) -> Table:
    """Return table 1 of the paper: the best of all trials from the default server and random
    clients, next to the paper's values for tasks of the same name."""
    rows = []
    for results in every:
        for task in results.facts["tasks"]:
            fixed, learned = (outcome(results, task, PUBLISHED_FOR, k) for k in KINDS[:2])
            ours = fixed.accuracy.max(), learned.accuracy.max()
            paper = PUBLISHED.get(task)
            cells = [
                *(f"{100 * best:.1f}" for best in ours),
                f"{100 * (ours[1] - ours[0]):+.1f}",
                *([f"{best:.1f}" for best in paper] if paper else ["", ""]),
                f"{paper[1] - paper[0]:+.1f}" if paper else "",
            ]
            rows.append([f"{task}, {metric_of(results, task)}", str(len(fixed.accuracy)), *cells])
    header = ["", "trials", "fixed %", "learned %", "", "paper: fixed %", "learned %", ""]
    title = (
        "The best of all trials from the default server and random clients, here and in the paper "
        "(its table 1: 50 trials, its models, all of its data)"
    )
    return Table(title, header, rows)


def _table(results: Results, task: str) -> Table:
    rows = []
    for initialization in results.facts["initializations"]:
        fixed = outcome(results, task, initialization, "fixed")
        for kind in results.facts["kinds"]:
            one = outcome(results, task, initialization, kind)
            needed = trials_to_reach(one.best.mean, fixed.best.mean[-1])
            rows.append(
                [
                    f"{initialization}: {TITLES[kind]}",
                    f"{100 * one.accuracy.max():.1f}",
                    f"{100 * np.median(one.accuracy):.1f}",
                    f"{100 * one.accuracy.mean():.1f}",
                    f"{one.diverged.sum()} of {len(one.diverged)}",
                    str(needed) if needed else f"> {len(one.accuracy)}",
                    str(np.count_nonzero(one.rejected)) if kind == "guarded" else "",
                ]
            )
    header = ["", "best %", "median %", "mean %", "diverged", "trials needed", "guard"]
    metric = metric_of(results, task)
    title = (
        f"{task}: test {metric} after the last round; trials that diverged (their "
        "training loss is not finite, or above its start); how many it takes to be as good as the "
        "best of all fixed ones; in how many the guard stepped in"
    )
    about = results.facts.get("about", {}).get(task)
    title += f". The data: {about}" if about else ""
    return Table(title, header, rows)


def _figure(
    results: Results, rows: Iterable[str], draw: Callable[[Results, str, str], fg.charts.Chart]
) -> fg.charts.Figure:
    columns = results.facts["initializations"]
    made = [[draw(results, row, initialization) for initialization in columns] for row in rows]
    return fg.charts.Figure([row if row[0].y_axis else fg.charts.alike(row) for row in made])


def _best_of_n(results: Results, task: str, initialization: str) -> fg.charts.Chart:
    curves = []
    for kind, (label, color, look) in STYLES.items():
        if kind not in results.facts["kinds"]:
            continue
        best = outcome(results, task, initialization, kind).best
        n = np.arange(1, len(best.mean) + 1)
        band = (best.low, best.high)
        curves.append(fg.charts.Curve(label, n, best.mean, color, look, band))
    return fg.charts.Chart(
        initialization,
        curves,
        "trials",
        f"{task}: {metric_of(results, task)} of the best",
        y_unit="percent",
        x_axis=fg.charts.Axis(1, max(2, len(n)), logarithmic=True),
    )


def _trial_by_trial(results: Results, task: str, initialization: str) -> fg.charts.Chart:
    fixed = outcome(results, task, initialization, "fixed").accuracy
    learned = outcome(results, task, initialization, "learned").accuracy
    best = max(
        outcome(results, task, i, kind).accuracy.max()
        for i in results.facts["initializations"]
        for kind in KINDS[:2]
    )
    most = max(1, math.ceil(10 * best)) / 10
    whole = fg.charts.Axis(0, most, unit="percent")
    return fg.charts.Chart(
        initialization,
        [
            fg.charts.Curve("trial, learned", fixed, learned, "p0", "dots"),
            fg.charts.Curve("as accurate as fixed", (0, most), (0, most), "line", "thin"),
        ],
        f"{metric_of(results, task)}, fixed",
        f"{task}: {metric_of(results, task)}, learned",
        x_axis=whole,
        y_axis=whole,
    )


def _trajectories(task: str, results: Results, name: str, initialization: str) -> fg.charts.Chart:
    values = trajectories(results, task, initialization, name)
    diverged = outcome(results, task, initialization, "learned").diverged
    rounds = [0, *results.arrays["rounds"]]
    trials = list(zip(values[:SHOWN], diverged[:SHOWN], strict=True))
    # Diverging trials jump about; they should not hide the others.
    curves = [fg.charts.Curve("trial", rounds, y, "p0", "thin") for y, bad in trials if not bad]
    curves += [
        fg.charts.Curve("trial that diverged", rounds, y, "p4", "faint") for y, bad in trials if bad
    ]
    rate, share = fg.charts.Axis(5e-4, 20, logarithmic=True), fg.charts.Axis(0, 1)
    axis = rate if name == "server.learning_rate" else share
    return fg.charts.Chart(initialization, curves, "round", name, y_axis=axis)
