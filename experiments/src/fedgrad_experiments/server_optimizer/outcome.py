"""Final results of the trials of one initialization."""

from dataclasses import dataclass

import numpy as np

from fedgrad_experiments.maximum import BestOf, best_of
from fedgrad_experiments.results import Results
from fedgrad_experiments.server_optimizer.training import DEFAULT, key

# Table 1 of the paper: the best of 50 trials in %, fixed and learned.
PUBLISHED_FOR = "default server, random client"
PUBLISHED = {
    "cifar100": (43.2, 45.6),
    "emnist": (87.0, 87.1),
    "shakespeare": (56.8, 57.3),
    "stackoverflow_tags": (32.2, 35.8),
    "stackoverflow_words": (25.0, 25.7),
}


def metric_of(results: Results, task: str) -> str:
    """Return the name of the metric by which models of this task are compared."""
    metric: str = results.facts.get("metrics", {}).get(task, "accuracy")
    return metric.replace("_", " ")


@dataclass(frozen=True)
class Outcome:
    """Final results, one entry per trial."""

    accuracy: np.ndarray  # or another metric, on held-out examples, after the last round
    diverged: np.ndarray  # whether the training loss is not finite, or above its start
    rejected: np.ndarray  # how often the guard intervened

    @property
    def best(self) -> BestOf:
        """The best of n trials."""
        return best_of(self.accuracy)


def outcome(results: Results, task: str, initialization: str, kind: str) -> Outcome:
    """Return the final results of all trials. A model that is not finite predicts nothing: its
    accuracy is 0."""

    def of(metric: str) -> np.ndarray:
        return results.arrays[key(task, initialization, kind, metric)]

    first, last = results.arrays[f"{task}/first loss"], of("loss")[:, -1]
    first = first if initialization == DEFAULT else first[0]  # trials side by side share a seed
    finite = np.isfinite(last)
    stepped_in = key(task, initialization, kind, "rejected") in results.arrays
    rejected = of("rejected")[:, -1] if stepped_in else np.zeros(len(last), int)
    accuracy = np.where(finite, of("accuracy")[:, -1], 0.0)
    return Outcome(accuracy, ~finite | (np.where(finite, last, 0) > first), rejected)


def trajectories(results: Results, task: str, initialization: str, name: str) -> np.ndarray:
    """Return a learned hyperparameter of each trial from its start: trials x (1 + evaluations)."""
    start = results.arrays[f"{task}/{initialization}/{name}"]
    return np.column_stack([start, results.arrays[key(task, initialization, "learned", name)]])
