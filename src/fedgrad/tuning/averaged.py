"""Averaging of an algorithm's late models, without communication."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.optimizer import widened
from fedgrad.algorithms.wrapped import wrapped
from fedgrad.core.errors import ArgumentError, known_arguments
from fedgrad.core.types import Hyper, Params, State

POWER = 7.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AveragedState:
    """The state of the algorithm, and the average of its models."""

    inner: Any
    average: Params  # at least float32: narrower types would lose small steps
    rounds: jax.Array

    @property
    def params(self) -> Params:
        """The averaged model."""
        return jax.tree.map(lambda a, x: a.astype(x.dtype), self.average, self.last)

    @property
    def last(self) -> Params:
        """The model that training continues from."""
        return last_of(self.inner)


@known_arguments()
def averaged(algorithm: Algorithm, power: float = POWER) -> Algorithm:
    """Return the algorithm with the average of its models as its model.

    `state.params` is the average and `state.last` the model that training continues from; likewise
    `params` and `last` of the result of `fg.fit`. The model after round t has the weight
    t (t + 1) ... (t + `power` - 1), which is about t^`power` after many rounds; so about the last
    `1 / (power + 1)` of all rounds count, however many there will be. The server averages; nothing
    more is sent.

    Args:
        algorithm: The algorithm to average.
        power: The exponent of the weights; 0 is the mean of all models.

    Returns:
        An algorithm with an `AveragedState`.

    Example:

        algorithm = fg.averaged(fg.fed_avg(loss))

    Reference: polynomial averaging, Shamir and Zhang 2013.
    """
    if not isinstance(algorithm, Algorithm):
        raise ArgumentError.here(
            f"averaged: {algorithm!r} is no algorithm. Give one, such as fg.fed_avg(loss)."
        )
    if not isinstance(power, int | float) or isinstance(power, bool) or not (0 <= power < math.inf):
        raise ArgumentError.here(f"averaged(power={power!r}): give a number of at least 0.")

    def init(params: Params, hyper: Hyper | None = None) -> AveragedState:
        inner = algorithm.init(params, hyper)
        return AveragedState(inner, widened(last_of(inner)), jnp.int32(0))

    def round(state: AveragedState, hyper: Hyper, *args: Any, **more: Any) -> Any:
        inner, *rest = algorithm.round(state.inner, hyper, *args, **more)
        # The first model replaces the initial one.
        share = (power + 1) / (state.rounds.astype(jnp.result_type(float)) + power + 1)

        def moved(old: jax.Array, new: jax.Array) -> jax.Array:
            return old + share.astype(old.dtype) * (new.astype(old.dtype) - old)

        average = jax.tree.map(moved, state.average, last_of(inner))
        return AveragedState(inner, average, state.rounds + 1), *rest

    def before_round(state: AveragedState, done: int, planned: int) -> State:
        assert algorithm.before_round is not None
        inner = algorithm.before_round(state.inner, done, planned)
        if inner is state.inner:  # identity: `fit` places again whatever has changed
            return state
        old, new = last_of(state.inner), last_of(inner)
        same = all(map(np.array_equal, jax.tree.leaves(old), jax.tree.leaves(new)))
        # Training continues from another model, as after a rollback: restart the average.
        average = state.average if same else widened(new)
        return replace(state, inner=inner, average=average)

    return replace(
        algorithm,
        init=init,
        round=wrapped(algorithm.round, round, "averaged"),
        before_round=None if algorithm.before_round is None else before_round,
        settings={**algorithm.settings, "average": f"of late models, power {power:g}"},
    )
