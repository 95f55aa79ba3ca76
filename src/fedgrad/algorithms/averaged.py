"""An algorithm whose model is an average of its late models, at no communication at all."""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.wrapped import wrapped
from fedgrad.core.errors import ArgumentError, known_arguments
from fedgrad.core.primitives import accumulator
from fedgrad.core.types import Hyper, Params, State

POWER = 7.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AveragedState:
    """The state of the algorithm, and the average of its models."""

    inner: Any
    average: Params  # in nothing narrower than float32, in which small steps would be lost
    rounds: jax.Array

    @property
    def params(self) -> Params:
        """The averaged model."""
        return jax.tree.map(lambda a, x: a.astype(x.dtype), self.average, self.last)

    @property
    def last(self) -> Params:
        """The model that training goes on with."""
        return last_of(self.inner)


@known_arguments()
def averaged(algorithm: Algorithm, power: float = POWER) -> Algorithm:
    """The algorithm, with the average of its models for a model: `state.params` is the average,
    `state.last` what training goes on with, and so are `params` and `last` of `fg.fit`'s result.

    The model after round t counts t (t + 1) ... (t + `power` - 1), which grows like t^`power` (of a
    power that is no whole number, Γ(t + power) / Γ(t)): a weighted mean of about the last
    `1 / (power + 1)` of all rounds, however many these will be (polynomial averaging; Shamir and
    Zhang 2013). A power of 0 is the mean of all. Averaging is the server's: nothing more is sent.
    """
    if not isinstance(algorithm, Algorithm):
        raise ArgumentError.here(
            f"averaged: {algorithm!r} is no algorithm. Give one, such as fg.fed_avg(loss)."
        )
    if not isinstance(power, int | float) or isinstance(power, bool) or not (0 <= power < math.inf):
        raise ArgumentError.here(f"averaged(power={power!r}): give a number of at least 0.")

    def init(params: Params, hyper: Hyper | None = None) -> AveragedState:
        inner = algorithm.init(params, hyper)
        return AveragedState(inner, _wide(last_of(inner)), jnp.int32(0))

    def round(state: AveragedState, hyper: Hyper, *args: Any, **more: Any) -> Any:
        inner, *rest = algorithm.round(state.inner, hyper, *args, **more)
        # The first model replaces the one that training began with.
        share = (power + 1) / (state.rounds.astype(jnp.result_type(float)) + power + 1)

        def moved(old: jax.Array, new: jax.Array) -> jax.Array:
            return old + share.astype(old.dtype) * (new.astype(old.dtype) - old)

        average = jax.tree.map(moved, state.average, last_of(inner))
        return AveragedState(inner, average, state.rounds + 1), *rest

    def between(state: AveragedState, done: int, planned: int) -> State:
        assert algorithm.between is not None
        inner = algorithm.between(state.inner, done, planned)
        if inner is state.inner:  # the same, not one like it: `fit` places anew what has changed
            return state
        old, new = last_of(state.inner), last_of(inner)
        same = all(map(np.array_equal, jax.tree.leaves(old), jax.tree.leaves(new)))
        # It goes on from another model, as a race does that goes back: the average is of that one.
        average = state.average if same else _wide(new)
        return replace(state, inner=inner, average=average)

    return replace(
        algorithm,
        init=init,
        round=wrapped(algorithm.round, round, "averaged"),
        between=None if algorithm.between is None else between,
        settings={**algorithm.settings, "average": f"of late models, power {power:g}"},
    )


def _wide(params: Params) -> Params:
    return jax.tree.map(lambda x: x.astype(accumulator(x)), params)
