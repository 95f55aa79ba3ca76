"""The best of n trials, trial against trial, trajectories, and a table of how trials ended."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from fedgrad.experiments.drawing import Drawing, Ink, band, legend, panels
from fedgrad.experiments.maximum import trials_to_reach
from fedgrad.experiments.results import Results
from fedgrad.experiments.server_optimizer.outcome import outcome, trajectories
from fedgrad.experiments.server_optimizer.training import LEARN
from fedgrad.experiments.tables import Table

# kind: (what it is called, its colour, its stroke). The guard is in the tables only: where it does
# not step in, nothing differs.
STYLES = {"fixed": ("fixed", 2, "--"), "learned": ("learned", 0, "-")}
TITLES = {"fixed": "fixed", "learned": "learned", "guarded": "learned, with guard"}
SHOWN = 20  # trajectories in a panel


def figures(results: Results) -> Mapping[str, Drawing]:
    """One row for each task, one column for each initialisation."""
    tasks = results.facts["tasks"]
    return {
        "best-of-n": lambda ink: _best_of_n(results, ink),
        "trial-by-trial": lambda ink: _trial_by_trial(results, ink),
        **{f"trajectories-{task}": partial(_trajectories, results, task) for task in tasks},
    }


def tables(results: Results) -> list[Table]:
    """One for each task."""
    return [_table(results, task) for task in results.facts["tasks"]]


def _table(results: Results, task: str) -> Table:
    rows = []
    for initialisation in results.facts["initialisations"]:
        fixed = outcome(results, task, initialisation, "fixed")
        for kind in results.facts["kinds"]:
            one = outcome(results, task, initialisation, kind)
            needed = trials_to_reach(one.best.mean, fixed.best.mean[-1])
            rows.append(
                [
                    f"{initialisation}: {TITLES[kind]}",
                    f"{100 * one.accuracy.max():.1f}",
                    f"{100 * np.median(one.accuracy):.1f}",
                    f"{100 * one.accuracy.mean():.1f}",
                    f"{one.diverged.sum()} of {len(one.diverged)}",
                    str(needed) if needed else f"> {len(one.accuracy)}",
                    str(np.count_nonzero(one.rejected)) if kind == "guarded" else "",
                ]
            )
    header = ["", "best %", "median %", "mean %", "diverged", "trials needed", "guard"]
    title = (
        f"{task}: test accuracy after the last round; trials that diverged (their training loss is "
        "not finite, or above its start); how many it takes to be as good as the best of all fixed "
        "ones; in how many the guard stepped in"
    )
    return Table(title, header, rows)


def _best_of_n(results: Results, ink: Ink) -> Any:
    tasks, initialisations = results.facts["tasks"], results.facts["initialisations"]
    figure, axes = panels(ink, len(tasks), len(initialisations), sharey="row")
    for row, task in zip(axes, tasks, strict=True):
        for one, initialisation in zip(row, initialisations, strict=True):
            for kind, (label, number, stroke) in STYLES.items():
                best = outcome(results, task, initialisation, kind).best
                n, colour = np.arange(1, len(best.mean) + 1), ink.curves[number]
                band(one, n, 100 * best.low, 100 * best.high, colour)
                one.plot(n, 100 * best.mean, stroke, color=colour, linewidth=1.7, label=label)
            one.set_xscale("log")
            ticks = [t for t in (1, 2, 5, 10, 20, 50) if t <= n[-1]]
            one.set_xticks(ticks, map(str, ticks))
            one.minorticks_off()
            one.set_title(initialisation)
        row[0].set_ylabel(f"{task}\ntest accuracy of the best, %")
    for one in axes[-1]:
        one.set_xlabel("trials")
    legend(axes[0, 0], ink, loc="lower right")
    return figure


def _trial_by_trial(results: Results, ink: Ink) -> Any:
    tasks, initialisations = results.facts["tasks"], results.facts["initialisations"]
    figure, axes = panels(ink, len(tasks), len(initialisations), sharex="row", sharey="row")
    for row, task in zip(axes, tasks, strict=True):
        for one, initialisation in zip(row, initialisations, strict=True):
            fixed = 100 * outcome(results, task, initialisation, "fixed").accuracy
            learned = 100 * outcome(results, task, initialisation, "learned").accuracy
            one.axline((0, 0), slope=1, color=ink.line, linewidth=1)
            one.plot(fixed, learned, "o", color=ink.curves[0], markersize=4, alpha=0.6)
            one.set_title(initialisation)
        row[0].set_ylabel(f"{task}\nlearned, test accuracy %")
    for one in axes[-1]:
        one.set_xlabel("fixed, test accuracy %")
    return figure


def _trajectories(results: Results, task: str, ink: Ink) -> Any:
    initialisations = results.facts["initialisations"]
    figure, axes = panels(ink, len(LEARN), len(initialisations), sharex=True, sharey="row")
    for row, name in zip(axes, LEARN, strict=True):
        for one, initialisation in zip(row, initialisations, strict=True):
            values = trajectories(results, task, initialisation, name)
            diverged = outcome(results, task, initialisation, "learned").diverged
            rounds = [0, *results.arrays["rounds"]]
            for trial, bad in zip(values[:SHOWN], diverged[:SHOWN], strict=True):
                # Diverging ones jump about; they should not hide the others.
                colour, alpha = (ink.curves[4], 0.35) if bad else (ink.curves[0], 0.8)
                one.plot(rounds, trial, color=colour, linewidth=1, alpha=alpha)
            if name == "server.learning_rate":
                one.set_yscale("log")
                one.set_ylim(5e-4, 20)
                one.set_title(initialisation)
        row[0].set_ylabel(name)
    for one in axes[-1]:
        one.set_xlabel("round")
    for label, colour in (("trial", ink.curves[0]), ("trial that diverged", ink.curves[4])):
        axes[1, 0].plot([], [], color=colour, linewidth=1.4, label=label)
    legend(axes[1, 0], ink, loc="lower left")
    return figure
