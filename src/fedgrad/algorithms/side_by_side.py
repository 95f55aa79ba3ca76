"""Many trials of one algorithm at once, on the same clients: vectorised over hyperparameters."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.wrapped import wrapped
from fedgrad.core.errors import ArgumentError, known_arguments
from fedgrad.core.types import Hyper, Params, State


@known_arguments()
def side_by_side(algorithm: Algorithm, hyper: Hyper | None = None) -> Algorithm:
    """An algorithm that runs trials with different hyperparameters together.

    Those leaves of `hyper` that differ are vectors with one entry for each trial, the others are
    numbers. Then the state and the metrics have a leading axis over trials. All trials see the same
    cohorts and keys, so they differ in nothing else. `fg.fit` runs it like any other algorithm.
    """
    algorithm.require_stateless_clients("side_by_side")
    algorithm.require_one_form("side_by_side")
    stacked = algorithm.hyper if hyper is None else hyper

    def init(params: Params, hyper: Hyper | None = None) -> Any:
        n = _trials(hyper)
        one = jax.vmap(lambda h: algorithm.init(params, h), in_axes=(_axes(hyper),), axis_size=n)
        return one(hyper)

    def round(state: State, hyper: Hyper, *args: Any, **more: Any) -> Any:
        each = jax.vmap(
            lambda s, h: algorithm.round(s, h, *args, **more), in_axes=(0, _axes(hyper))
        )
        return each(state, hyper)

    # Once for all that are made of this algorithm, so that a second search compiles nothing again.
    together = algorithm.round.once(
        "side by side", lambda: wrapped(algorithm.round, round, "side_by_side")
    )
    together = replace(together, executor=algorithm.round.executor)
    return replace(algorithm, init=init, round=together, hyper=stacked)


def _axes(hyper: Hyper) -> Any:
    return jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, hyper)


def _trials(hyper: Hyper) -> int:
    sizes = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(hyper) if jnp.ndim(leaf)}
    if len(sizes) != 1:
        raise ArgumentError.here(
            f"Hyperparameters of trials side by side are vectors of one length, found lengths "
            f"{sorted(sizes)}. Stack at least one of them: one entry for each trial."
        )
    return int(sizes.pop())
