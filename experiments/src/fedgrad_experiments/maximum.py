"""The expected best of n trials: the bootstrap of the maximum, in closed form."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BestOf:
    """For n = 1 ... all trials: the mean of the best of n, and its 10 % and 90 % quantiles."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def best_of(values: np.ndarray) -> BestOf:
    """Return the distribution of the best of n trials drawn with replacement.

    The best is at most the k-th smallest of N values with probability (k / N)^n, so nothing has to
    be sampled.
    """
    ordered = np.sort(np.asarray(values, float))
    size = len(ordered)
    n = np.arange(1, size + 1)[:, None]
    below = (np.arange(1, size + 1) / size) ** n  # n x k
    chance = np.diff(below, axis=1, prepend=0)

    def quantile(p: float) -> np.ndarray:
        return ordered[np.argmax(below >= p - 1e-12, axis=1)]

    return BestOf(chance @ ordered, quantile(0.1), quantile(0.9))


def trials_to_reach(curve: np.ndarray, target: float) -> int | None:
    """Return the smallest n at which the curve is at least `target`, or None if it never is."""
    reached = np.flatnonzero(curve >= target - 1e-12)
    return int(reached[0]) + 1 if len(reached) else None
