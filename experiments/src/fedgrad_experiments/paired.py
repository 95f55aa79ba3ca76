"""Whether two ways to train differ, judged by pairs of runs that share their seeds.

What is asked of a pair is only that, if there is no difference, either run of it could as well have
been the other. Then every sign of every difference is as likely as its opposite, whatever the
distribution of the differences is, and that is all the test needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

LEVEL = 0.05  # of significance, after correction
POWER = 0.8  # how likely a difference that counts as detectable is found
EXACT = 16  # up to so many pairs all signs are gone through; of more, DRAWN are drawn
DRAWN = 100_000


@dataclass(frozen=True)
class Compared:
    """The differences of pairs, and what follows from them."""

    differences: np.ndarray
    p: float  # that signs as uneven as these come about by chance
    corrected: float  # p, corrected for the number of comparisons that were made together
    interval: tuple[float, float]  # of the mean: 95 %, by Student's t, of this comparison alone
    detectable: float  # the mean difference that so many pairs with this spread would find

    @property
    def mean(self) -> float:
        """The mean difference."""
        return float(np.mean(self.differences))

    @property
    def significant(self) -> bool:
        """Whether there is a difference, as far as this can be told."""
        return self.corrected < LEVEL


def compare(pairs: Mapping[Any, np.ndarray]) -> dict[Any, Compared]:
    """The differences of several comparisons that are judged together, by name."""
    ps = [sign_flip(differences) for differences in pairs.values()]
    corrected = holm(ps)
    return {
        name: Compared(
            np.asarray(d, float), p, q, interval(d), detectable(d, LEVEL / max(1, len(pairs)))
        )
        for (name, d), p, q in zip(pairs.items(), ps, corrected, strict=True)
    }


def sign_flip(differences: np.ndarray) -> float:
    """The two-sided p of no difference: how many ways to choose the signs of the differences give
    a sum at least as far from 0 as theirs."""
    d = np.asarray(differences, float)
    n = len(d)
    if n <= EXACT:
        signs = 1 - 2 * (np.arange(2**n)[:, None] >> np.arange(n) & 1)
    else:
        drawn = np.random.default_rng(0).choice([-1, 1], (DRAWN, n))
        signs = np.concatenate([np.ones((1, n), int), drawn])  # what was found is one of them
    rounding = 1e-12 * np.abs(d).sum()
    return float(np.mean(np.abs(signs @ d) >= abs(d.sum()) - rounding))


def least_p(pairs: int, comparisons: int = 1) -> float:
    """The least corrected p that so many pairs can give: all differences have the same sign."""
    return min(1.0, comparisons * 2.0 ** (1 - pairs))


def holm(ps: list[float]) -> list[float]:
    """Holm's correction: the probability to find any difference where there is none stays below
    the level, however the comparisons depend on each other."""
    order = np.argsort(ps)
    raised = np.asarray(ps, float)[order] * np.arange(len(ps), 0, -1)
    corrected = np.empty(len(ps))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(raised))
    return [float(p) for p in corrected]


def interval(differences: np.ndarray) -> tuple[float, float]:
    """95 % confidence of the mean difference, by Student's t."""
    mean, error, free = float(np.mean(differences)), _error(differences), len(differences) - 1
    half = float(special.stdtrit(free, 0.975)) * error if free else np.inf
    return mean - half, mean + half


def detectable(differences: np.ndarray, level: float = LEVEL) -> float:
    """The mean difference that a two-sided t test at this level finds with probability `POWER`, of
    so many pairs with the spread of these."""
    free = len(differences) - 1
    if not free:
        return np.inf
    threshold = special.stdtrit(free, 1 - level / 2)
    return float(special.nctdtrinc(free, 1 - POWER, threshold)) * _error(differences)


def _error(differences: np.ndarray) -> float:
    """The standard error of the mean."""
    n = len(differences)
    return float(np.std(differences, ddof=1) / np.sqrt(n)) if n > 1 else np.inf
