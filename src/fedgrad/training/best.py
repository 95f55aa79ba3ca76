"""Keep the best model of a run, as judged by an evaluation metric."""

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
    """The best model of a run: `result.best`. Each of several side-by-side trials has its own."""

    params: Params
    round: Any  # the round after which the model was the best
    value: Any  # of the metric, in that round
    metric: str

    def __repr__(self) -> str:
        return f"Best({self.metric} {span(self.value)}, of round {self.round})"


@known_fields
@dataclass(frozen=True)
class KeepBest:
    """The return value of `fg.keep_best`: the metric by which the best model is chosen."""

    metric: str
    maximize: bool = False

    def __post_init__(self) -> None:
        if not self.metric.startswith("eval."):
            raise ArgumentError.here(
                f"fg.keep_best({self.metric!r}): a model is judged by an evaluation of it, whose "
                'metrics begin with "eval.", such as fg.keep_best("eval.test.loss").'
            )

    def better(self, best: Best | None, round: int, value: Any, params: Params) -> Best:
        """Return the better of the best model so far and the model of this round."""
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
    """Keep the model with the best value of an evaluation metric, as `result.best`.

        fg.fit(..., callbacks=[fg.keep_best("eval.test.accuracy", maximize=True)])

    Models are compared in the rounds in which the metric is evaluated, including the evaluation
    before the first round. The best model is part of the checkpoint, so a resumed run has the same
    one.

    Args:
        metric: The name of an evaluation metric, such as `"eval.test.loss"`.
        maximize: Keep the model with the highest value instead of the lowest.

    Returns:
        A callback for `fg.fit`.

    Raises:
        ArgumentError: If `metric` does not begin with `"eval."`.
    """
    return KeepBest(metric, maximize)


def keeping(callbacks: Sequence[Any]) -> KeepBest | None:
    """Return the `fg.keep_best` among the callbacks, if any; refuse more than one."""
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
    """Return the best model after a round; unchanged if the metric was not evaluated in it."""
    if keep is None or keep.metric not in found:
        return best
    return keep.better(best, round, found[keep.metric], params)


def _rows(won: np.ndarray, leaf: Any) -> np.ndarray:
    return won.reshape(won.shape + (1,) * (jnp.ndim(leaf) - won.ndim))


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return array if array.ndim else array.item()
