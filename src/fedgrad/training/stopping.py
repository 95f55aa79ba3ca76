"""Early stopping: callbacks that end training before the last round."""

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
    """A callback that stops training based on the values of one metric so far.

    It reads nothing else, so a resumed run stops where it would have stopped, and a stopped run
    stays stopped.

        fg.Stop("loss", lambda values: values[-1] < 0.1 and "good enough")

    Args:
        metric: The name of the metric.
        judge: A function from its values so far to a reason (or True) to stop, or None (or False).
    """

    metric: str
    judge: Callable[[np.ndarray], str | bool | None]

    def reason(self, history: History) -> str | None:
        """Return the reason to stop now, or None."""
        evaluated = self.metric.startswith("eval.")
        if evaluated and not history.under(self.metric.rpartition(".")[0]):
            return None  # not evaluated yet
        values = history[self.metric]  # raises if there is no such metric
        found = self.judge(values) if len(values) else None
        return found if isinstance(found, str) else f"{self.metric} asked for it" if found else None


# (round, state, metrics) -> whether to stop, or the reason
Callback = Callable[[int, Any, Metrics], Any] | Stop | KeepBest


@known_arguments()
def early_stop(
    metric: str = "loss", patience: int = 20, improvement: float = 0.0, maximize: bool = False
) -> Stop:
    """Stop training when a metric has not improved for some time.

        fg.fit(..., callbacks=[fg.early_stop("eval.test.loss", patience=5)])

    Side-by-side trials stop when none of them improves.

    Args:
        metric: The name of the metric.
        patience: How many recorded values in a row may lack an improvement before training stops.
        improvement: The change that an improvement must exceed.
        maximize: Whether higher values are better; by default, lower ones are.

    Returns:
        A callback for `fg.fit`.
    """
    require_whole("patience", patience)
    sign = -1 if maximize else 1

    def judge(values: np.ndarray) -> str | None:
        values = np.asarray(values, float)  # unsigned integers cannot be negated
        values = np.where(np.isnan(values), np.inf, sign * values)  # NaN never improves
        recent, before = values[-patience:], values[:-patience]
        if not len(before) or np.any(recent.min(0) < before.min(0) - improvement):
            return None
        return (
            f"{metric} has not improved {patience} times in a row; best {sign * values.min():.6g}"
        )

    return Stop(metric, judge)


@known_arguments()
def non_finite(metric: str = "loss") -> Stop:
    """Stop training when a metric is not finite (with side-by-side trials, in all of them)."""
    return Stop(metric, lambda v: None if np.isfinite(v[-1]).any() else f"{metric} is not finite")


def require_stops(callbacks: Sequence[Callback], told: Callable[[], Iterable[str]]) -> None:
    """Refuse to wait for a metric that no round returns. `told` returns the names of the metrics of
    a round, and is only called if a callback waits for one that not every algorithm has."""
    asked = [c.metric for c in callbacks if isinstance(c, Stop)]
    own = [m for m in asked if m.partition(".")[0] not in ("eval", "loss", "seconds")]
    names = list(told()) if own else []
    for metric in own if names else []:
        if metric not in names:
            raise MetricError.here(f"No round gives a metric {metric!r}.", metric, names)


def check_callbacks(callbacks: Sequence[Callback], evaluated: Sequence[str]) -> None:
    """Refuse callbacks that are not callable, or wait for a metric that is never evaluated.

    `evaluated` lists the names of evaluation metrics; a name that ends with a dot is a prefix.
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
