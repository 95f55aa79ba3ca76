"""Many trials of one algorithm at once, on the same clients, vectorized over hyperparameters."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.wrapped import wrapped
from fedgrad.core.errors import ArgumentError, known_arguments
from fedgrad.core.types import Hyper, Params, State


@known_arguments()
def side_by_side(algorithm: Algorithm, hyper: Hyper | None = None) -> Algorithm:
    """An algorithm that runs trials with different hyperparameters together.

    All trials see the same cohorts and keys, so they differ in nothing but their hyperparameters.
    The state and the metrics get a leading axis over trials. `fg.fit` runs it like any other
    algorithm.

    Args:
        algorithm: The algorithm to run, whose clients keep no state.
        hyper: Hyperparameters. Leaves that differ between trials have one more axis than the
            algorithm's own, with one entry per trial (vectors in place of numbers); all trials
            share the others. By default the algorithm's own: vectors with one entry per trial, and
            shared numbers.

    Returns:
        An algorithm with all trials in its state.

    Raises:
        ArgumentError: If the vectors differ in length, or there are none.

    Example:

        hyper = fg.hyper.replace(algorithm.hyper, {"server.learning_rate": jnp.array([0.1, 1.0])})
        trials = fg.side_by_side(algorithm, hyper)
    """
    algorithm.require_stateless_clients("side_by_side")
    algorithm.require_one_form("side_by_side")
    own = {} if hyper is None else names_of.paths(algorithm.hyper)
    ranks = {name: jnp.ndim(leaf) for name, leaf in own.items() if jnp.ndim(leaf)}

    def init(params: Params, hyper: Hyper | None = None) -> Any:
        n = _trials(hyper, ranks)
        hyper = _stacked(hyper, ranks, n)
        # Vectorized, an algorithm sees no numbers that it could refuse.
        for extreme in (jnp.min, jnp.max):
            algorithm.init(params, jax.tree.map(partial(_extreme, extreme), hyper))
        one = jax.vmap(lambda h: algorithm.init(params, h), in_axes=(_axes(hyper),), axis_size=n)
        return one(hyper)

    def round(state: State, hyper: Hyper, *args: Any, **more: Any) -> Any:
        hyper = _stacked(hyper, ranks, len(jax.tree.leaves(state)[0]))
        each = jax.vmap(
            lambda s, h: algorithm.round(s, h, *args, **more), in_axes=(0, _axes(hyper))
        )
        return each(state, hyper)

    # Cached on the algorithm's round, so that a second search compiles nothing again.
    together = algorithm.round.once(
        ("side by side", *ranks.items()), lambda: wrapped(algorithm.round, round, "side_by_side")
    )
    together = together.on(algorithm.round.executor)
    stacked = algorithm.hyper if hyper is None else hyper
    if ranks:
        stacked = _stacked(stacked, ranks, _trials(stacked, ranks))
    return replace(algorithm, init=init, round=together, hyper=stacked)


def _extreme(of: Callable[..., jax.Array], leaf: Any) -> Any:
    return of(leaf, 0) if jnp.ndim(leaf) else leaf


def _axes(hyper: Hyper) -> Any:
    return jax.tree.map(lambda leaf: 0 if jnp.ndim(leaf) else None, hyper)


def _stacked(hyper: Hyper, ranks: Mapping[str, int], trials: int) -> Hyper:
    """Return hyperparameters whose arrays all have a leading axis of trials. `ranks`: the ranks of
    those that are arrays in a single trial already, by dotted name."""
    shared = {
        name: leaf
        for name, leaf in names_of.paths(hyper).items()
        if 0 < jnp.ndim(leaf) <= ranks.get(name, 0)
    }
    if not shared:
        return hyper
    rows = {n: jnp.broadcast_to(leaf, (trials, *jnp.shape(leaf))) for n, leaf in shared.items()}
    return names_of.replace(hyper, rows)


def _trials(hyper: Hyper, ranks: Mapping[str, int]) -> int:
    named = names_of.paths(hyper).items()
    sizes = {jnp.shape(leaf)[0] for n, leaf in named if jnp.ndim(leaf) > ranks.get(n, 0)}
    if len(sizes) != 1:
        raise ArgumentError.here(
            f"Hyperparameters of trials side by side are vectors of one length, found lengths "
            f"{sorted(sizes)}. Stack at least one of them: one entry for each trial."
        )
    return int(sizes.pop())
