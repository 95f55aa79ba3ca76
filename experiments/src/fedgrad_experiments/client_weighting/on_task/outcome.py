"""How seeds ended, and which differences between them are judged."""

from collections.abc import Iterable

import numpy as np

from fedgrad_experiments.paired import Compared, compare
from fedgrad_experiments.results import Results

Pair = tuple[str, str]  # of curves: the first minus the second
# Each start of what is learned against both fixed ones. So the better fixed one is among them
# without being chosen by its result, which would make chance look like a difference.
JUDGED: tuple[Pair, ...] = (
    ("from 1", "fixed 1"),
    ("from 1", "fixed 0"),
    ("from 0", "fixed 0"),
    ("from 0", "fixed 1"),
)
SCALE: Pair = ("fixed 0", "fixed 1")  # how much there is to be gained or lost by weighting
MEASURES = ("metric", "loss")  # on test examples, and on training examples


def ended(results: Results, measure: str, curve: str) -> np.ndarray:
    """One number for each seed, after the last round. A model that is not finite predicts nothing:
    its metric is 0, unless that is a loss."""
    values = results.arrays[measure][results.facts["curves"].index(curve)]
    last = values[:, -1] if measure == "loss" else values
    missing = np.nan if measure == "loss" or results.facts["metric"] == "loss" else 0.0
    return np.where(np.isfinite(last), last, missing)


def diverged(results: Results, curve: str) -> np.ndarray:
    """Of each seed, whether the training loss is not finite, or above where it started."""
    loss = results.arrays["loss"][results.facts["curves"].index(curve)]
    return ~(loss[:, -1] <= loss[:, 0])


def compared(results: Results, measure: str) -> dict[Pair, Compared]:
    """Every pair that is judged, corrected for their number; and for scale a pair of its own."""
    return _compared(results, measure, JUDGED) | _compared(results, measure, [SCALE])


def _compared(results: Results, measure: str, pairs: Iterable[Pair]) -> dict[Pair, Compared]:
    def differences(pair: Pair) -> np.ndarray:
        first, second = (ended(results, measure, curve) for curve in pair)
        return (first - second)[np.isfinite(first - second)]

    return compare({pair: differences(pair) for pair in pairs})


def alike(results: Results) -> bool:
    """Whether all clients have the same number of examples, so that q changes nothing."""
    examples = results.facts["examples"]
    return examples["least"] is not None and bool(examples["least"] == examples["most"])
