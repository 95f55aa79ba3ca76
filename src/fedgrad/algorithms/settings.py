"""What algorithms are called, and what they were made of, in words: for config.json and reports."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ParamSpec

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.local_training import LocalTraining
from fedgrad.algorithms.optimizer import Optimizer

P = ParamSpec("P")

# As their papers write them, by the function that makes them.
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
    """A function that makes an algorithm, which then has its name."""
    words = getattr(make, "__name__", "")

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
        found = make(*args, **kwargs)
        return replace(found, settings={**found.settings, "name": NAMES.get(words, words)})

    return made


def settings_of(work: Any, server: Optimizer, weighting: str) -> dict[str, Any]:
    """What the rounds of `fed_opt` are made of."""
    work = getattr(work, "work", work)  # FedNova's clients do the usual, and tell more of it
    client: dict[str, Any] = {"batch_size": work.batch_size}
    if isinstance(work, LocalTraining):
        amount = {"epochs": work.epochs or 1} if work.steps is None else {"steps": work.steps}
        client |= {"optimizer": _words(work.optimizer), **amount, "shuffle": work.shuffle}
    return {
        "name": "FedOpt",
        "client": {n: "a schedule" if callable(v) else v for n, v in client.items()},
        "server": {"optimizer": _words(server)},
        "weighting": weighting,
    }


def settings_of_race(candidates: Mapping[str, Algorithm]) -> dict[str, Any]:
    """What all candidates have in common, and of each what only it has."""
    first, *others = (one.settings for one in candidates.values())
    same = {n: v for n, v in first.items() if all(other.get(n) == v for other in others)}
    own = {
        name: {n: v for n, v in one.settings.items() if n not in same}
        for name, one in candidates.items()
    }
    return {**same, "name": "race", "candidates": own}


def _words(optimizer: Optimizer) -> str:
    """`sgd`, or `adaptive, second_moment=adam`."""
    name = getattr(optimizer.make, "__name__", type(optimizer.make).__name__)
    plain = {n: v for n, v in optimizer.fixed.items() if isinstance(v, str | int | bool)}
    parts = ["optax" if name == "<lambda>" else name, *(f"{n}={v}" for n, v in plain.items())]
    return ", ".join(parts)
