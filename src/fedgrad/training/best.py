"""The best model of a run, by an evaluation: kept while training goes on to worse ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import ArgumentError, known_arguments, known_fields
from fedgrad.core.types import Params
from fedgrad.training.result_curves import span


@known_fields
@dataclass(frozen=True)
class Best:
    """The best model of a run: `result.best`. Of trials side by side, the best of each."""

    params: Params
    round: Any  # after which it was that
    value: Any  # of the metric
    metric: str

    def __repr__(self) -> str:
        return f"Best({self.metric} {span(self.value)}, of round {self.round})"


@known_fields
@dataclass(frozen=True)
class KeepBest:
    """What `fg.keep_best` gives: by which metric the best model is kept."""

    metric: str
    maximize: bool = False

    def __post_init__(self) -> None:
        if not self.metric.startswith("eval."):
            raise ArgumentError.here(
                f"fg.keep_best({self.metric!r}): a model is judged by an evaluation of it, whose "
                'metrics begin with "eval.", such as fg.keep_best("eval.test.loss").'
            )

    def better(self, best: Best | None, round: int, value: Any, params: Params) -> Best:
        """The best one so far, of the one before and of this."""
        here = Best(params, _plain(np.full(np.shape(value), round)), _plain(value), self.metric)
        if best is None or best.metric != self.metric:
            return here
        sign = -1 if self.maximize else 1
        values = [np.asarray(one.value) for one in (here, best)]
        signed = (sign * v.astype(float) for v in values)
        new, old = (np.where(np.isnan(v), np.inf, v) for v in signed)
        won = new < old
        if won.all() or not won.any():
            return here if won.all() else best
        chosen = jax.tree.map(lambda a, b: jnp.where(_rows(won, a), a, b), params, best.params)
        rounds = np.where(won, here.round, best.round)
        return Best(chosen, rounds, np.where(won, *values), self.metric)


@known_arguments()
def keep_best(metric: str, maximize: bool = False) -> KeepBest:
    """Keep the model with the lowest value of a metric (or the highest, with `maximize`), as
    `result.best`: `fg.fit(..., callbacks=[fg.keep_best("eval.test.accuracy", maximize=True)])`.

    The metric is one of an evaluation, in whose rounds the models are compared; that before the
    first round is one of them. It goes into the checkpoint, so a run that is resumed has the same.
    """
    return KeepBest(metric, maximize)


def keeping(callbacks: Sequence[Any]) -> KeepBest | None:
    """The one that is asked for, if it is."""
    found = [callback for callback in callbacks if isinstance(callback, KeepBest)]
    if len(found) > 1:
        raise ArgumentError.here(
            f"callbacks= has {len(found)} fg.keep_best, and a run keeps one best model. Choose one "
            "metric."
        )
    return found[0] if found else None


def after(
    keep: KeepBest | None, best: Best | None, round: int, found: Mapping[str, Any], params: Params
) -> Best | None:
    """The best one after these metrics of a round, if the one that counts is among them."""
    if keep is None or keep.metric not in found:
        return best
    return keep.better(best, round, found[keep.metric], params)


def _rows(won: np.ndarray, leaf: Any) -> np.ndarray:
    return won.reshape(won.shape + (1,) * (jnp.ndim(leaf) - won.ndim))


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return array if array.ndim else array.item()
