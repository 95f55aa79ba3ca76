"""An algorithm that finds its own learning rates: `fg.self_tuning(algorithm)`, nothing more said.

The recipe was chosen on digits and Synthetic(1, 1) and then tested on other tasks:
docs/no-tuning.md.
"""

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.averaged import averaged
from fedgrad.algorithms.race import RaceState, race
from fedgrad.algorithms.wrapped import wrapped
from fedgrad.core.errors import ArgumentError
from fedgrad.core.types import Hyper, Params

START = "as given"
# Rates that race with those that are given, and how many are left when.
CLIENT = {"1e-3": 1e-3, "1e-2": 1e-2, "1e-1": 1e-1, "1": 1.0}
SERVER = {"1e-1": 0.1, "1": 1.0, "10": 10.0}
CUTS = {0.05: 3, 0.25: 1}


def racing_own_rates(algorithm: Algorithm) -> Algorithm:
    """The algorithm as it is given races with itself at other rates, in clients and server; it
    gives way only to what is better by more than chance explains. The model is an average."""
    algorithm.require_stateless_clients("self_tuning")
    algorithm.require_one_form("self_tuning")
    branches = {"client": CLIENT, "server": SERVER}
    rates = {branch: _rates(algorithm, branch) for branch in branches}
    tried = {branch: branches[branch] for branch, found in rates.items() if found}
    if not tried:
        raise ArgumentError.here(
            f"self_tuning({algorithm.round.name}): it has no learning rate that is a number, so "
            "there is nothing to race. Make its optimizers with fg.optimizer(optax.sgd, "
            "learning_rate=...), or name what to learn: self_tuning(algorithm, learn=...)."
        )
    base = averaged(algorithm)
    others = {
        ", ".join(f"{branch} {word}" for branch, word in zip(tried, words, strict=True)): {
            branch: tried[branch][word] for branch, word in zip(tried, words, strict=True)
        }
        for words in itertools.product(*tried.values())
    }

    def raced(name: str, hyper: Hyper) -> dict[str, Any]:
        """The rates of a candidate, by dotted name."""
        found: dict[str, Any] = {}
        for branch, names in rates.items():
            values = {n: v for n, v in names_of.paths(hyper).items() if n in names}
            chosen = others[name].get(branch) if name != START else None
            found |= values if chosen is None else _scaled(values, chosen)
        return found

    def each(hyper: Hyper) -> Hyper:
        """The hyperparameters of all candidates, from those that are given."""
        return {n: names_of.replace(hyper, raced(n, hyper)) for n in (START, *others)}

    inner = race(dict.fromkeys((START, *others), base), CUTS, incumbent=START)

    def init(params: Params, hyper: Hyper | None = None) -> RaceState:
        assert hyper is not None  # `Algorithm` sees to it
        return inner.init(params, each(hyper))

    def round(state: RaceState, hyper: Hyper, *args: Any, **more: Any) -> Any:
        new, metrics = inner.round(state, each(hyper), *args, **more)
        if len(state.candidates) > 1:
            return new, metrics
        (name,) = state.candidates
        return new, replace(metrics, hyper=raced(name, hyper))

    return replace(
        algorithm,
        init=init,
        round=wrapped(inner.round, round, "self_tuning"),
        between=inner.between,
    )


def _rates(algorithm: Algorithm, branch: str) -> dict[str, Any]:
    """The learning rates of a branch by dotted name: one, or one for each layer."""
    return {
        name: value
        for name, value in names_of.paths(algorithm.hyper).items()
        if name.split(".")[0] == branch and "learning_rate" in name.split(".")
    }


def _scaled(rates: dict[str, Any], rate: float) -> dict[str, Any]:
    """Another rate; of several, all by one factor, so that the largest one has it. If all are 0,
    each has it."""
    values = {name: jnp.asarray(value) for name, value in rates.items()}
    largest = functools.reduce(jnp.maximum, map(jnp.max, values.values()))
    still = largest == 0
    return {
        n: jnp.where(still, rate, rate * (v / jnp.where(still, 1, largest)))
        for n, v in values.items()
    }
