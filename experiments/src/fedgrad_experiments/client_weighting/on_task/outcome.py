"""Final results of all seeds, and which differences between curves are judged."""

from collections.abc import Iterable

import numpy as np

from fedgrad_experiments.paired import Compared, compare
from fedgrad_experiments.results import Results

Pair = tuple[str, str]  # two curves: the first minus the second
# Each learned start is compared with both fixed weightings. So the better fixed one is included
# without being chosen by its result, which would make chance look like a difference.
JUDGED: tuple[Pair, ...] = (
    ("from 1", "fixed 1"),
    ("from 1", "fixed 0"),
    ("from 0", "fixed 0"),
    ("from 0", "fixed 1"),
)
SCALE: Pair = ("fixed 0", "fixed 1")  # how much weighting matters at all
MEASURES = ("metric", "loss")  # on test examples, and on training examples


def ended(results: Results, measure: str, curve: str) -> np.ndarray:
    """Return one number per seed, after the last round. A model that is not finite predicts
    nothing: its metric is 0, unless the metric is a loss."""
    values = results.arrays[measure][results.facts["curves"].index(curve)]
    last = values[:, -1] if measure == "loss" else values
    missing = np.nan if measure == "loss" or results.facts["metric"] == "loss" else 0.0
    return np.where(np.isfinite(last), last, missing)


def diverged(results: Results, curve: str) -> np.ndarray:
    """Return, for each seed, whether the training loss is not finite or above its start."""
    loss = results.arrays["loss"][results.facts["curves"].index(curve)]
    return ~(loss[:, -1] <= loss[:, 0])


def compared(results: Results, measure: str) -> dict[Pair, Compared]:
    """Compare all judged pairs, corrected for their number, and separately the pair for scale."""
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
