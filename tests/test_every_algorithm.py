"""Laws over every algorithm x every hyperparameter x both schedules of self-tuning: what is learned
has an effect, what cannot have one is refused, and no derivative needs a model times a model."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import by_hand
import fedgrad as fg
from by_hand import START, as_params, loss
from fedgrad.algorithms.variants import ALGORITHMS

SCHEDULES = ("serial", "parallel")
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Row:
    """An algorithm, and where its hyperparameters start: by default, where it starts itself."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start: Mapping[str, float] = dataclasses.field(default_factory=dict)
    only: tuple[str, ...] = ()  # what this row is about; by default, everything

    def make(self, loss, **options):
        made = ALGORITHMS[self.name](loss, shuffle=False, **{**options, **self.options})
        return dataclasses.replace(made, hyper=fg.hyper.replace(made.hyper, self.start))

    @property
    def learn(self):
        return self.only or tuple(fg.hyper.paths(self.make(loss).hyper))


TABLE = {
    **{name: Row(name) for name in ALGORITHMS},
    # FedHyper's bounds have an effect where they bind, and they cannot both bind at once.
    "fedhyper": Row("fedhyper", start={"server.high": 1e-3}, only=("client", "server.high")),
    "fedhyper, low": Row("fedhyper", start={"server.low": 0.5}, only=("server.low",)),
    # FedExP's epsilon, where clients disagree so much that the rate is above 1.
    "fedexp": Row("fedexp", start={"client.learning_rate": 2.0}),
    "weights": Row("fedavg", {"weighting": "power"}),
    "layers": Row(
        "fedavg",
        {
            "client_learning_rate": {"b": 0.1, "w": 0.2},
            "server_learning_rate": {"b": 0.5, "w": 2.0},
        },
    ),
    "client adam": Row(
        "fedavg",
        {"client": fg.optimizer(optax.adam, learning_rate=0.1, b1=0.9, b2=0.99, eps=1e-3)},
    ),
}


def test_every_hyperparameter_is_in_the_table():
    found = {
        (row.name, path)
        for row in TABLE.values()
        for path in fg.hyper.select(row.make(loss).hyper, row.learn)
    }
    for name in ALGORITHMS:
        for path in fg.hyper.paths(ALGORITHMS[name](loss).hyper):
            assert (name, path) in found


# ---- what is learned has an effect

POPULATION = fg.population(by_hand.make_clients([7, 2, 4, 6, 9], seed=1))
TRAIN, FRESH = POPULATION.select([0, 1, 2]), POPULATION.select([3, 4])
ROUNDS = 4


def hypergradients(algorithm, learn, schedule, **options):
    """Of every round, by name; what is learned stays where it starts."""
    tuned = fg.self_tuning(
        algorithm, learn, schedule=schedule, optimizer=optax.sgd(0.0), guard=None, **options
    )
    state, seen = tuned.init(as_params(START)), []
    more = {name: FRESH for name in tuned.cohorts}
    for t in range(ROUNDS):
        key = jax.random.fold_in(KEY, t)
        state, metrics = tuned.round(state, tuned.hyper, TRAIN, key, **more)
        seen.append(metrics["hypergradient"])
    return {name: np.array([float(one[name]) for one in seen]) for name in seen[0]}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_no_hypergradient_is_always_zero(row, schedule):
    found = hypergradients(row.make(loss, batch_size=2), row.learn, schedule)
    assert all(np.isfinite(values).all() for values in found.values())
    assert [name for name, values in found.items() if not values.any()] == []
