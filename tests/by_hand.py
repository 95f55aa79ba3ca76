"""Federated training by hand: plain numpy, one client and one batch after the other.

The model is logistic regression, as one vector: its first entry is the bias. `as_vector` and
`as_params` go between it and the pytree that the library trains.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedgrad as fg
from fedgrad.algorithms.variants import ALGORITHMS

SIZES = (53, 4, 17, 9)
FEATURES = 2
BATCH = 10


def make_clients(sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.normal(size=(k, FEATURES)) + 0.3 * i,
            "y": rng.choice([-1.0, 1.0], k, p=[0.9, 0.1] if i % 2 else [0.1, 0.9]),
        }
        for i, k in enumerate(sizes)
    ]


CLIENTS = make_clients()
POPULATION = fg.population(CLIENTS)
START = np.array([0.1, 0.5, -1.0])


def as_params(vector):
    return {"b": jnp.asarray(vector[0]), "w": jnp.asarray(vector[1:])}


def as_vector(params):
    return np.concatenate([np.atleast_1d(np.asarray(params[name], float)) for name in "bw"])


@jax.numpy_dtype_promotion("standard")  # models have every dtype, the data has one
def loss(params, batch):
    """What the library is given; everything below is independent of it."""
    return jax.nn.softplus(-batch["y"] * (batch["x"] @ params["w"] + params["b"]))


def value(vector, batch):
    """The mean loss of a batch."""
    margins = batch["y"] * (batch["x"] @ vector[1:] + vector[0])
    return np.mean(np.log1p(np.exp(-margins)))


def slope(vector, batch):
    """Its gradient, from the formula."""
    y = batch["y"]
    margins = y * (batch["x"] @ vector[1:] + vector[0])
    pull = -y / (1 + np.exp(margins))
    return np.concatenate([[np.mean(pull)], pull @ batch["x"] / len(y)])


def curvature(vector, batch):
    """The Hessian, from the formula."""
    y, x = batch["y"], np.column_stack([np.ones(len(batch["y"])), batch["x"]])
    right = 1 / (1 + np.exp(-y * (x @ vector)))
    return (right * (1 - right) * x.T) @ x / len(y)


def numerical_slope(fun, vector, h=1e-5):
    """The gradient of any function, by central differences."""
    moves = h * np.eye(len(vector))
    return np.array([(fun(vector + m) - fun(vector - m)) / (2 * h) for m in moves])


def batches(client, size=BATCH, epochs=1, steps=None):
    """A client's batches in data order; the last one of each epoch is as short as it is."""
    parts = [
        {name: leaf[start : start + size] for name, leaf in client.items()}
        for start in range(0, len(client["y"]), size)
    ]
    number = epochs * len(parts) if steps is None else steps
    return [parts[i % len(parts)] for i in range(number)]


@dataclass
class Sgd:
    """A client's optimizer: x -= rate m, m = momentum m + g."""

    rate: Any
    momentum: float = 0.0
    m: Any = 0.0

    def step(self, vector, gradient):
        self.m = self.momentum * self.m + gradient
        return vector - self.rate * self.m


@dataclass
class Adam:
    """Adam with bias correction (Kingma and Ba 2015, Algorithm 1)."""

    rate: float
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    m: Any = 0.0
    v: Any = 0.0
    t: int = 0

    def step(self, vector, gradient):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * gradient
        self.v = self.b2 * self.v + (1 - self.b2) * gradient**2
        m, v = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        return vector - self.rate * m / (np.sqrt(v) + self.epsilon)


def train(start, client, optimizer, gradient=None, **order):
    """A client's round: (how far it went, the mean loss of its examples when they were used)."""
    gradient = gradient or (lambda now, start, batch: slope(now, batch))
    now, total, seen = start, 0.0, 0
    for batch in batches(client, **order):
        total, seen = total + value(now, batch) * len(batch["y"]), seen + len(batch["y"])
        now = optimizer.step(now, gradient(now, start, batch))
    return start - now, total / seen


def mean(weights, values):
    return np.tensordot(weights, values, axes=1) / np.sum(weights)


# Those whose clients keep a state have tests of their own, in test_client_state.py.
STATELESS = {name: make for name, make in ALGORITHMS.items() if make(loss).client_init is None}


def sizes_of(clients):
    return np.array([len(client["y"]) for client in clients])
