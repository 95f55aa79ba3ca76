"""Goals for each task, in numbers: how far our methods are from the best of a sweep."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedgrad_experiments.no_tuning.outcome import FIXED, Outcome, outcomes, rivals
from fedgrad_experiments.no_tuning.tasks import data_set
from fedgrad_experiments.results import Results

# The number of runs of each method that a decision needs, and the methods that each goal compares.
ENOUGH = {"auto": 20, "blind": 20, "fedavgm": 50, "fedadam": 25, "good": 5, "good-tuned": 5}
NEEDS = {
    "worst tenth": ("auto", *FIXED),
    "median": ("auto", *FIXED),
    "blind worst tenth": ("blind", *FIXED),
    "blind median": ("blind", *FIXED),
    "bytes": ("auto", "fedavgm"),
    "finite": ("auto",),
    "good start": ("good", "good-tuned"),
}
WITHIN, STAYS = 0.01, 0.003  # accuracy that the worst tenth, and tuning, may lose
BYTES = 3.0  # at most, in multiples of a fixed run
ROUNDING = 1e-9
Found = Mapping[str, Outcome]


@dataclass(frozen=True)
class Goal:
    """A number of a task, and whether it meets the goal; None if there are too few runs to tell."""

    value: float
    met: bool | None
    words: str


def sweep(found: Found) -> float:
    """Return the best of all fixed runs, over their last and their averaged models."""
    return max(found[name].best for name in FIXED)


def goals(results: Results, task: str) -> dict[str, Goal]:
    """Return the goals of a task that can be evaluated, by name."""
    found = outcomes(results, task)
    return {
        name: _GOALS[name](found, all(len(found[m]) >= ENOUGH[m] for m in needed))
        for name, needed in NEEDS.items()
        if found.keys() >= set(needed)
    }


def _worst(found: Found, enough: bool, method: str = "auto") -> Goal:
    return _against(found[method].worst, sweep(found), -WITHIN - ROUNDING, enough)


def _median(found: Found, enough: bool, method: str = "auto") -> Goal:
    return _against(found[method].median, sweep(found), ROUNDING, enough)


def _bytes(found: Found, _: bool) -> Goal:
    size = found["auto"].bytes  # one run is enough to know it
    return Goal(size, size <= BYTES + ROUNDING, f"{size:.2f} times")


def _finite(found: Found, enough: bool) -> Goal:
    lost, of = int((~found["auto"].finite).sum()), len(found["auto"])
    return Goal(float(lost), lost == 0 if enough or lost else None, f"{lost} of {of}")


def _good_start(found: Found, enough: bool) -> Goal:
    fixed, tuned = found["good"], found["good-tuned"]
    kept = max(fixed.accuracy.mean(), fixed.last.mean())
    return _against(float(tuned.accuracy.mean()), float(kept), -STAYS - ROUNDING, enough)


def _against(ours: float, theirs: float, least: float, enough: bool) -> Goal:
    met = ours - theirs >= least if enough else None
    return Goal(ours - theirs, met, f"{100 * ours:.1f} against {100 * theirs:.1f}")


_GOALS: dict[str, Callable[[Found, bool], Goal]] = {
    "worst tenth": _worst,
    "median": _median,
    "blind worst tenth": partial(_worst, method="blind"),
    "blind median": partial(_median, method="blind"),
    "bytes": _bytes,
    "finite": _finite,
    "good start": _good_start,
}


@dataclass(frozen=True)
class Mean:
    """Means of a method over data sets."""

    title: str
    trainings: int  # the smallest number on any task
    worst: float
    median: float
    bytes: float


def means(results: Results) -> dict[str, Mean]:
    """Return the means of each method. Tasks of one data set count as one. Only tasks with runs of
    fed_auto and of all its rivals count, and only methods that were run on all of these tasks."""
    found = {task: outcomes(results, task) for task in results.facts["tasks"]}
    every = {name: one.title for each in found.values() for name, one in each.items()}
    needed = {*rivals(every), "auto"} & every.keys()
    sets: dict[str, list[dict[str, Outcome]]] = {}
    for task, each in found.items():
        if each.keys() >= needed:
            sets.setdefault(data_set(task), []).append(each)
    counted = [each for some in sets.values() for each in some]
    every = {n: title for n, title in every.items() if all(n in each for each in counted)}

    def mean(name: str, of: Callable[[Outcome], float]) -> float:
        return float(
            np.mean([np.mean([of(each[name]) for each in some]) for some in sets.values()])
        )

    return {
        name: Mean(
            title,
            min(len(each[name]) for some in sets.values() for each in some),
            mean(name, lambda one: one.worst),
            mean(name, lambda one: one.median),
            mean(name, lambda one: one.bytes),
        )
        for name, title in every.items()
        if sets
    }
