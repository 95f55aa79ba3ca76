"""How the trials of one initialisation ended."""

from dataclasses import dataclass

import numpy as np

from fedgrad.experiments.maximum import BestOf, best_of
from fedgrad.experiments.results import Results
from fedgrad.experiments.server_optimizer.training import DEFAULT, key


@dataclass(frozen=True)
class Outcome:
    """One entry for each trial."""

    accuracy: np.ndarray  # on held-out examples, after the last round
    diverged: np.ndarray  # whether the training loss is not finite, or above where it started
    rejected: np.ndarray  # how often the guard stepped in

    @property
    def best(self) -> BestOf:
        """The best of n trials."""
        return best_of(self.accuracy)


def outcome(results: Results, task: str, initialisation: str, kind: str) -> Outcome:
    """A model that is not finite predicts nothing: its accuracy is 0."""

    def of(metric: str) -> np.ndarray:
        return results.arrays[key(task, initialisation, kind, metric)]

    first, last = results.arrays[f"{task}/first loss"], of("loss")[:, -1]
    first = first if initialisation == DEFAULT else first[0]  # trials side by side share a seed
    finite = np.isfinite(last)
    rejected = of("rejected")[:, -1] if kind != "fixed" else np.zeros(len(last), int)
    accuracy = np.where(finite, of("accuracy")[:, -1], 0.0)
    return Outcome(accuracy, ~finite | (np.where(finite, last, 0) > first), rejected)


def trajectories(results: Results, task: str, initialisation: str, name: str) -> np.ndarray:
    """A learned hyperparameter of each trial, from its start on: trials x (1 + evaluations)."""
    start = results.arrays[f"{task}/{initialisation}/{name}"]
    return np.column_stack([start, results.arrays[key(task, initialisation, "learned", name)]])
