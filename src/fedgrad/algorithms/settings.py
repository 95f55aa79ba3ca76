"""Names and settings of algorithms, in words: for config.json and reports."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ParamSpec

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.local_training import Work
from fedgrad.algorithms.optimizer import Optimizer
from fedgrad.core.errors import public

P = ParamSpec("P")

# As spelled in their papers, by the function that makes them.
NAMES = {
    "fed_adagrad": "FedAdagrad",
    "fed_adam": "FedAdam",
    "fed_auto": "fed_auto",
    "fed_avg": "FedAvg",
    "fed_avgm": "FedAvgM",
    "fed_dog": "DoG",
    "fed_dyn": "FedDyn",
    "fed_exp": "FedExP",
    "fed_hyper": "FedHyper-G",
    "fed_hypergradient": "hypergradient descent",
    "fed_mechanic": "Mechanic",
    "fed_nova": "FedNova",
    "fed_prodigy": "Prodigy",
    "fed_prox": "FedProx",
    "fed_sgd": "FedSGD",
    "fed_yogi": "FedYogi",
    "per_fed_avg": "Per-FedAvg",
    "scaffold": "SCAFFOLD",
}


def titled(make: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """Decorate a function that makes an algorithm, so that the algorithm has its name."""
    words = getattr(make, "__name__", "")

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
        found = make(*args, **kwargs)
        return replace(found, settings={**found.settings, "name": NAMES.get(words, words)})

    return public(made)


def settings_of(work: Work, server: Optimizer, weighting: str) -> dict[str, Any]:
    """Return the settings of `fed_opt`."""
    return {
        "name": "FedOpt",
        "client": {n: "a schedule" if callable(v) else v for n, v in work.settings.items()},
        "server": {"optimizer": server.words},
        "weighting": weighting,
    }


def settings_of_race(candidates: Mapping[str, Algorithm]) -> dict[str, Any]:
    """Return the settings that all candidates share, and those of each that differ."""
    first, *others = (one.described for one in candidates.values())
    same = {n: v for n, v in first.items() if all(other.get(n) == v for other in others)}
    own = {
        name: {n: v for n, v in one.described.items() if n not in same}
        for name, one in candidates.items()
    }
    return {**same, "name": "race", "candidates": own}
