"""What is to be shown of each task, in numbers: how far ours are from the best of a sweep."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fedgrad.experiments.no_tuning.outcome import FIXED, Outcome, outcomes
from fedgrad.experiments.no_tuning.tasks import data_set
from fedgrad.experiments.results import Results

# Trainings of each method, without which nothing is decided.
ENOUGH = {"auto": 20, "fedavgm": 50, "fedadam": 25, "good": 5, "good-tuned": 5}
WITHIN, STAYS = 0.01, 0.003  # of accuracy: points that the worst tenth, and tuning, may lose
BYTES = 3.0  # of a fixed training, at most
ROUNDING = 1e-9


@dataclass(frozen=True)
class Goal:
    """A number of a task, and whether it is what was asked for; None where trainings are too few to
    tell."""

    value: float
    met: bool | None
    words: str


def sweep(found: Mapping[str, Outcome]) -> float:
    """The best of all fixed trainings, of their last models and of their averaged ones."""
    return max(found[name].best for name in FIXED)


def goals(results: Results, task: str) -> dict[str, Goal]:
    """Those that can be told of a task, by name."""
    found = outcomes(results, task)
    made: dict[str, Goal] = {}
    if {"auto", *FIXED} <= found.keys():
        auto, best = found["auto"], sweep(found)
        enough = _enough(found, "auto", *FIXED)

        def against(value: float) -> str:
            return f"{100 * value:.1f} against {100 * best:.1f}"

        low, middle = auto.worst, auto.median
        made["worst tenth"] = Goal(
            low - best, enough and bool(low >= best - WITHIN - ROUNDING), against(low)
        )
        made["median"] = Goal(middle - best, enough and bool(middle > best), against(middle))
    if "auto" in found and "fedavgm" in found:
        auto, enough = found["auto"], _enough(found, "auto")
        made["bytes"] = Goal(auto.bytes, auto.bytes <= BYTES + ROUNDING, f"{auto.bytes:.2f} times")
        lost = int((~auto.finite).sum())
        met = False if lost else (True if enough else None)
        made["finite"] = Goal(float(lost), met, f"{lost} of {len(auto)}")
    if {"good", "good-tuned"} <= found.keys():
        fixed, tuned = found["good"], found["good-tuned"]
        kept = max(fixed.accuracy.mean(), fixed.last.mean())
        gap = float(tuned.accuracy.mean() - kept)
        made["good start"] = Goal(
            gap,
            _enough(found, "good", "good-tuned") and gap >= -STAYS - ROUNDING,
            f"{100 * tuned.accuracy.mean():.1f} against {100 * kept:.1f}",
        )
    return made


@dataclass(frozen=True)
class Mean:
    """Of a method, over data sets."""

    title: str
    trainings: int  # on a task, at least
    worst: float
    median: float
    bytes: float


def means(results: Results) -> dict[str, Mean]:
    """Of each method. Tasks of one data set count as one; only tasks on which all methods were run
    count."""
    found = {task: outcomes(results, task) for task in results.facts["tasks"]}
    every = {name: one.title for each in found.values() for name, one in each.items()}
    sets: dict[str, list[dict[str, Outcome]]] = {}
    for task, each in found.items():
        if each.keys() == every.keys():
            sets.setdefault(data_set(task), []).append(each)

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


def _enough(found: Mapping[str, Outcome], *names: str) -> bool | None:
    """Whether all of them were trained often enough; None if not, which decides nothing."""
    return True if all(len(found[name]) >= ENOUGH[name] for name in names) else None
