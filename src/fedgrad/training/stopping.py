"""What may end training before the last round: callbacks, and those that read the history."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgrad.algorithms.metrics import Metrics
from fedgrad.core.errors import ArgumentError, known_arguments, known_fields, nearest, require_whole
from fedgrad.training.best import KeepBest, keeping
from fedgrad.training.history import History, MetricError


@known_fields
@dataclass(frozen=True)
class Stop:
    """A callback that judges by a metric alone: its values so far give a reason to end, or none.

    So a run that is resumed stops where it would have stopped, and one that has stopped stays so.
    `fg.Stop("loss", lambda values: values[-1] < 0.1 and "good enough")`
    """

    metric: str
    judge: Callable[[np.ndarray], str | bool | None]

    def reason(self, history: History) -> str | None:
        """Why training should end now, or None."""
        evaluated = self.metric.startswith("eval.")
        if evaluated and not history.under(self.metric.rpartition(".")[0]):
            return None  # evaluations come later than the first round
        values = history[self.metric]  # an error, if there is no such metric
        found = self.judge(values) if len(values) else None
        return found if isinstance(found, str) else f"{self.metric} asked for it" if found else None


# (round, state, metrics) -> whether to stop, or why
Callback = Callable[[int, Any, Metrics], Any] | Stop | KeepBest


@known_arguments()
def early_stop(
    metric: str = "loss", patience: int = 20, improvement: float = 0.0, maximize: bool = False
) -> Stop:
    """End training when a metric has not become better (lower, or higher if `maximize`) by more
    than `improvement` for the last `patience` times that it was taken.

    `fg.fit(..., callbacks=[fg.early_stop("eval.test.loss", patience=5)])`. Trials side by side end
    when none of them improves.
    """
    require_whole("patience", patience)
    sign = -1 if maximize else 1

    def judge(values: np.ndarray) -> str | None:
        values = np.asarray(values, float)  # the negative of an unsigned integer is not one
        values = np.where(np.isnan(values), np.inf, sign * values)  # no improvement
        recent, before = values[-patience:], values[:-patience]
        if not len(before) or np.any(recent.min(0) < before.min(0) - improvement):
            return None
        return (
            f"{metric} has not improved {patience} times in a row; best {sign * values.min():.6g}"
        )

    return Stop(metric, judge)


@known_arguments()
def non_finite(metric: str = "loss") -> Stop:
    """End training when a metric is not finite; of trials side by side, when none is."""
    return Stop(metric, lambda v: None if np.isfinite(v[-1]).any() else f"{metric} is not finite")


def require_stops(callbacks: Sequence[Callback], told: Callable[[], Iterable[str]]) -> None:
    """Refuse to wait for a metric that no round gives. `told`: the names of those that rounds give,
    which are asked for only where somebody waits for one that is not everybody's."""
    asked = [c.metric for c in callbacks if isinstance(c, Stop)]
    own = [m for m in asked if m.partition(".")[0] not in ("eval", "loss", "seconds")]
    names = list(told()) if own else []
    for metric in own if names else []:
        if metric not in names:
            raise MetricError.here(f"No round gives a metric {metric!r}.", metric, names)


def check_callbacks(callbacks: Sequence[Callback], evaluated: Sequence[str]) -> None:
    """Refuse what cannot be called, and what waits for an evaluation that never happens.

    `evaluated`: the names of what is evaluated; one that ends with a dot is the start of names.
    """
    if not isinstance(callbacks, Sequence):
        raise ArgumentError.here(f"callbacks= takes a list: callbacks=[...], got {callbacks!r}.")
    keeping(callbacks)
    for callback in callbacks:
        if not callable(callback) and not isinstance(callback, Stop | KeepBest):
            raise ArgumentError.here(
                "callbacks= takes functions of (round, state, metrics), and fg.early_stop and its "
                f"like, got {callback!r}."
            )
        metric = callback.metric if isinstance(callback, Stop | KeepBest) else ""
        known = any(metric == e or (e.endswith(".") and metric.startswith(e)) for e in evaluated)
        if metric.startswith("eval.") and not known:
            missing = f"that is not evaluated.{nearest(metric, list(evaluated))}"
            nothing = "nothing is evaluated. Give fg.fit evaluate=."
            raise ArgumentError.here(
                f"A callback looks at {metric!r}, but {missing if evaluated else nothing}"
            )
