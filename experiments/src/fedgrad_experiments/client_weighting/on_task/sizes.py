"""Sizes of the experiment on each task."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedgrad_experiments.client_weighting.on_task.training import Settings
from fedgrad_experiments.experiment import OnTask


@dataclass(frozen=True)
class Laptop:
    """About ten minutes of one core on real data. With ten seeds the test of `paired` has nearly
    the power of a t-test; with fewer than eight it cannot find any difference."""

    rounds: int = 100
    cohort_size: int = 10
    seeds: int = 10
    test_clients: int | None = None  # None: all
    client_learning_rate: float | None = None  # None: the task's default


LAPTOP: Mapping[str, Laptop] = {
    # All clients have the same number of images, so this only shows the effect of rounding.
    "cifar100": Laptop(rounds=10, seeds=4),
    "digits": Laptop(cohort_size=20),
    # The task's rate is for a server with momentum, whose steps are ten times as long.
    "emnist": Laptop(rounds=30, client_learning_rate=0.1),
    "shakespeare": Laptop(rounds=25, cohort_size=5, test_clients=300),
    "stackoverflow_tags": Laptop(rounds=150, cohort_size=50, client_learning_rate=0.3),
    "stackoverflow_words": Laptop(rounds=60, test_clients=1000),
    "synthetic": Laptop(rounds=200, cohort_size=50),
}


def sizes(task: str, options: Mapping[str, Any]) -> dict[str, Settings]:
    """Return the sizes of the experiment on this task, made with these options."""
    small = LAPTOP.get(task, Laptop())
    default = Settings(
        OnTask(task, options, small.cohort_size),
        seeds=small.seeds,
        rounds=small.rounds,
        eval_every=max(1, small.rounds // 5),
        test_clients=small.test_clients,
        client_learning_rate=small.client_learning_rate,
    )
    quick = replace(default, on=OnTask(task, options, 5), seeds=2, rounds=5, eval_every=1)
    paper = replace(
        default,
        on=OnTask.as_in_the_paper(task, options),
        seeds=50,
        rounds=1500,
        eval_every=50,
        eval_clients=1000,
        test_clients=None,
        client_learning_rate=None,
    )
    return {
        "quick": replace(quick, eval_clients=5, test_clients=20),
        "default": default,
        "full": replace(default, seeds=3 * small.seeds, rounds=2 * small.rounds),
        "paper": paper,
    }
