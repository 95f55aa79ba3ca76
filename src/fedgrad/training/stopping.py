"""When to end before the last round: functions of the history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedgrad.core.errors import ArgumentError
from fedgrad.training.history import History

# Why training should end now, or nothing. It sees the past only through the history, so a run that
# is resumed stops where it would have stopped.
Stop = Callable[[History], str | bool | None]


@dataclass(frozen=True)
class EarlyStop:
    """See `early_stop`."""

    metric: str
    patience: int
    improvement: float
    maximise: bool

    def __call__(self, history: History) -> str | None:
        """Why to stop, or None."""
        if not _taken(self.metric, history) or len(history[self.metric]) <= self.patience:
            return None
        sign = -1 if self.maximise else 1
        values = sign * history[self.metric]
        values = np.where(np.isnan(values), np.inf, values)  # no improvement
        recent, before = values[-self.patience :], values[: -self.patience]
        if np.any(recent.min(0) < before.min(0) - self.improvement):
            return None
        best = sign * values.min()
        return f"{self.metric} has not improved {self.patience} times in a row; best {best:.6g}"


def early_stop(
    metric: str = "loss", patience: int = 20, improvement: float = 0.0, maximise: bool = False
) -> EarlyStop:
    """End training when a metric has not become better (lower, or higher if `maximise`) by more
    than `improvement` for the last `patience` times that it was taken.

    `fg.fit(..., stop=fg.early_stop("eval.test.loss", patience=5))`. Trials side by side end when
    none of them improves.
    """
    if not isinstance(patience, int) or patience < 1:
        raise ArgumentError.here(
            f"patience={patience!r}: give a whole number of at least 1, how often the metric may "
            "fail to improve."
        )
    return EarlyStop(metric, patience, improvement, maximise)


@dataclass(frozen=True)
class NonFinite:
    """See `non_finite`."""

    metric: str

    def __call__(self, history: History) -> str | None:
        """Why to stop, or None."""
        if not _taken(self.metric, history) or np.isfinite(history[self.metric][-1]).any():
            return None
        return f"{self.metric} is not finite"


def non_finite(metric: str = "loss") -> NonFinite:
    """End training when a metric is not finite; of trials side by side, when none is."""
    return NonFinite(metric)


def _taken(metric: str, history: History) -> bool:
    """Whether there is something to look at yet; evaluations come later than the first round."""
    if metric.startswith("eval.") and not history.under("eval"):
        return False
    return len(history[metric]) > 0  # an error, if there is no such metric


def check_stops(stops: Sequence[Stop], evaluated: bool) -> None:
    """Nobody waits for an evaluation that never happens."""
    for stop in stops:
        metric = getattr(stop, "metric", "")
        if metric.startswith("eval.") and not evaluated:
            raise ArgumentError.here(
                f"stop= looks at {metric!r}, but nothing is evaluated. Give fg.fit an eval=."
            )
