"""Tests whether two ways to train differ, by pairs of runs that share their seeds.

The only assumption is that, if there is no difference, the two runs of a pair are exchangeable.
Then the sign of every difference is as likely as its opposite, whatever the distribution of the
differences, and that is all the test needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

LEVEL = 0.05  # significance level, after correction
POWER = 0.8  # the probability of finding a difference that counts as detectable
EXACT = 16  # up to so many pairs all signs are enumerated; for more, DRAWN are sampled
DRAWN = 100_000


@dataclass(frozen=True)
class Compared:
    """The differences of pairs, and their statistics."""

    differences: np.ndarray
    p: float  # probability of signs as uneven as these by chance
    corrected: float  # p, corrected for the number of joint comparisons
    interval: tuple[float, float]  # 95 % interval of the mean by Student's t, uncorrected
    detectable: float  # the mean difference that so many pairs with this spread would detect

    @property
    def mean(self) -> float:
        """The mean difference."""
        return float(np.mean(self.differences))

    @property
    def significant(self) -> bool:
        """Whether the difference is significant after correction."""
        return self.corrected < LEVEL


def compare(pairs: Mapping[Any, np.ndarray]) -> dict[Any, Compared]:
    """Compare several sets of differences, corrected for their number, by name."""
    ps = [sign_flip(differences) for differences in pairs.values()]
    corrected = holm(ps)
    return {
        name: Compared(
            np.asarray(d, float), p, q, interval(d), detectable(d, LEVEL / max(1, len(pairs)))
        )
        for (name, d), p, q in zip(pairs.items(), ps, corrected, strict=True)
    }


def sign_flip(differences: np.ndarray) -> float:
    """Return the two-sided p-value of no difference: the fraction of sign choices for which the sum
    is at least as far from 0 as the observed one."""
    d = np.asarray(differences, float)
    n = len(d)
    if n <= EXACT:
        signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    else:
        drawn = np.random.default_rng(0).choice([-1, 1], (DRAWN, n))
        signs = np.concatenate([np.ones((1, n), int), drawn])  # the observed signs are one choice
    rounding = 1e-12 * np.abs(d).sum()
    return float(np.mean(np.abs(signs @ d) >= abs(d.sum()) - rounding))


def least_p(pairs: int, comparisons: int = 1) -> float:
    """Return the smallest corrected p that so many pairs can give: all differences have the same
    sign."""
    return min(1.0, comparisons * 2.0 ** (1 - pairs))


def holm(ps: list[float]) -> list[float]:
    """Apply Holm's correction: the probability of finding any difference where there is none stays
    below the level, however the comparisons depend on each other."""
    order = np.argsort(ps)
    raised = np.asarray(ps, float)[order] * np.arange(len(ps), 0, -1)
    corrected = np.empty(len(ps))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(raised))
    return [float(p) for p in corrected]


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean difference, by Student's t."""
    mean, error, free = float(np.mean(differences)), _error(differences), len(differences) - 1
    half = float(special.stdtrit(free, 0.975)) * error if free else np.inf
    return mean - half, mean + half


def detectable(differences: np.ndarray, level: float = LEVEL) -> float:
    """Return the mean difference that a two-sided t-test at this level finds with probability
    `POWER`, given this number of pairs and this spread."""
    free = len(differences) - 1
    if not free:
        return np.inf
    threshold = special.stdtrit(free, 1 - level / 2)
    return float(special.nctdtrinc(free, 1 - POWER, threshold)) * _error(differences)


def _error(differences: np.ndarray) -> float:
    """Return the standard error of the mean."""
    n = len(differences)
    return float(np.std(differences, ddof=1) / np.sqrt(n)) if n > 1 else np.inf
