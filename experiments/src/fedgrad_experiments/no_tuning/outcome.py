"""Final results of each method on a task, and what follows from the fixed ones: the best of three,
and settings that were calibrated on other tasks."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from scipy.stats import rankdata

from fedgrad_experiments.no_tuning.ablation import ABLATIONS
from fedgrad_experiments.no_tuning.methods import AT_BEST, BLIND, METHODS, OURS
from fedgrad_experiments.no_tuning.rules import RATE
from fedgrad_experiments.no_tuning.tasks import data_set
from fedgrad_experiments.no_tuning.training import key
from fedgrad_experiments.results import Results

T = TypeVar("T")
FIXED = {"fedavgm": "FedAvgM", "fedadam": "FedAdam"}  # the methods of a sweep
TRIES = 3  # runs of a random search that costs as much as fed_auto may
WORST = 0.1  # the fraction of runs that counts as the worst


@dataclass(frozen=True)
class Outcome:
    """The final results of a method, one entry per run."""

    title: str
    accuracy: np.ndarray  # or another metric, of the averaged model, on test clients
    last: np.ndarray  # of the model of the last round; NaN if unknown
    loss: np.ndarray  # of the averaged model, on training clients
    finite: np.ndarray  # whether the averaged model is finite
    bytes: float  # as a multiple of a fixed run's

    @property
    def worst(self) -> float:
        """The accuracy that all but the worst tenth reach."""
        return float(np.quantile(self.accuracy, WORST, method="lower"))

    @property
    def median(self) -> float:
        """The median accuracy."""
        return float(np.median(self.accuracy))

    @property
    def best(self) -> float:
        """The best accuracy of both models of all runs."""
        return float(np.nanmax([self.accuracy, self.last]))

    def __len__(self) -> int:
        return len(self.accuracy)

    def only(self, some: np.ndarray, title: str) -> "Outcome":
        """Return the results of some of the runs."""
        kept = {name: getattr(self, name)[some] for name in ("accuracy", "last", "loss", "finite")}
        return replace(self, title=title, **kept)


def outcomes(results: Results, task: str) -> dict[str, Outcome]:
    """Return all results on a task, by method; a method with several client rates is listed once
    for each."""
    found: dict[str, Outcome] = {}
    for name in results.facts["methods"][task]:
        if name in ABLATIONS:
            continue
        one = _outcome(results, task, name)
        name = "blind" if METHODS[name].title == BLIND else name  # whichever recipe it was
        if METHODS[name].rates:
            starts = results.arrays[key(task, name, f"start/{RATE}")]
            for rate in METHODS[name].rates:
                title = f"{one.title}, client rate {rate:g}"
                found[f"{name} {rate:g}"] = one.only(np.isclose(starts, rate), title)
        else:
            found[name] = one
    for name in FIXED:
        if name in found and (chosen := calibrated(results, task, name)) is not None:
            title = f"{FIXED[name]} as is best on other tasks"
            found[f"{name} calibrated"] = found[name].only(np.array([chosen]), title)
    if len(found.get("fedavgm", ())) >= TRIES:
        found["random search"] = best_of_tries(found["fedavgm"])
    return found


def ablations(results: Results, task: str) -> dict[str, Outcome]:
    """Return the results of fed_auto without one of its parts, by name."""
    names = [name for name in results.facts["methods"][task] if name in ABLATIONS]
    return {name: _outcome(results, task, name) for name in names}


def rivals(found: Mapping[str, T]) -> dict[str, T]:
    """Return the methods that one could use instead of ours."""
    return {name: one for name, one in found.items() if name not in (*OURS, *AT_BEST)}


def calibrated(results: Results, task: str, name: str) -> int | None:
    """Return the index of the start with the best mean rank on tasks of other data sets, or None if
    there are none."""
    others = [
        results.arrays[key(other, name, "accuracy")]
        for other, methods in results.facts["methods"].items()
        if data_set(other) != data_set(task) and name in methods
    ]
    if not others:
        return None
    return int(np.argmin(np.mean([rankdata(-accuracy) for accuracy in others], axis=0)))


def best_of_tries(fixed: Outcome) -> Outcome:
    """Return, for every three fixed runs, the one with the lowest training loss."""
    triples = np.array(list(itertools.combinations(range(len(fixed)), TRIES)))
    loss = np.where(np.isfinite(fixed.loss) & fixed.finite, fixed.loss, np.inf)
    chosen = triples[np.arange(len(triples)), np.argmin(loss[triples], axis=1)]
    title = f"FedAvgM, best of {TRIES} random starts"
    return replace(fixed.only(chosen, title), bytes=TRIES * fixed.bytes)


def _outcome(results: Results, task: str, name: str) -> Outcome:
    def of(what: str, method: str = name) -> np.ndarray:
        return results.arrays[key(task, method, what)]

    # A search trains several models, some of them only partly.
    runs = of("runs").mean() if key(task, name, "runs") in results.arrays else 1.0
    return Outcome(
        METHODS[name].title,
        of("accuracy"),
        of("last"),
        of("loss"),
        of("finite").astype(bool),
        float(runs * of("bytes")[0] / of("bytes", "fedavgm")[0]),
    )
