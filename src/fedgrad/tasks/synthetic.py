"""Synthetic(alpha, beta): clients with their own models, features and sizes.

The generator of FedProx (Li et al., 2020), which the client weighting experiment of the paper uses.
`alpha` controls how much the clients' labeling models differ, `beta` how much their features do.
Sizes are log-normal: a few clients hold most of the examples.
"""

import math
from dataclasses import dataclass

import jax
import numpy as np

from fedgrad.clients.in_memory import population
from fedgrad.core.types import Key
from fedgrad.tasks import classifier, split
from fedgrad.tasks.task import Task
from fedgrad.tasks.task_checks import Defaults, TaskError

FEATURES, CLASSES = 60, 10


@dataclass(frozen=True)
class SyntheticClient:
    """One client's examples and the model that labeled them."""

    x: np.ndarray  # examples x 60
    y: np.ndarray  # argmax of x @ weights + bias
    mean: np.ndarray  # of x
    weights: np.ndarray
    bias: np.ndarray


def draw(
    alpha: float, beta: float, clients: int, rng: np.random.Generator
) -> list[SyntheticClient]:
    """Return the clients of Synthetic(alpha, beta), in double precision."""
    sizes = rng.lognormal(4.0, 2.0, clients).astype(int) + 50
    model_centers = rng.normal(0.0, alpha, clients)
    feature_centers = rng.normal(0.0, beta, clients)
    deviation = np.sqrt(np.arange(1, FEATURES + 1) ** -1.2)

    def client(size: int, u: float, center: float) -> SyntheticClient:
        mean = rng.normal(center, 1.0, FEATURES)
        weights = rng.normal(u, 1.0, (FEATURES, CLASSES))
        bias = rng.normal(u, 1.0, CLASSES)
        x = mean + deviation * rng.standard_normal((size, FEATURES))
        return SyntheticClient(x, np.argmax(x @ weights + bias, axis=1), mean, weights, bias)

    return [client(*each) for each in zip(sizes, model_centers, feature_centers, strict=True)]


def synthetic(alpha: float = 1.0, beta: float = 1.0, clients: int = 100, seed: int = 0) -> Task:
    """Softmax regression on Synthetic(alpha, beta), initialized at zero.

    Each client trains on 90 % of its examples.
    """
    if not (0 <= alpha < math.inf and 0 <= beta < math.inf):
        raise TaskError.here(
            f"alpha and beta are standard deviations, at least 0, got {alpha} and {beta}."
        )
    if clients < 1:
        raise TaskError.here(f"A task needs at least 1 client, got {clients}.")
    rng = np.random.default_rng(seed)
    examples = [
        {"x": c.x.astype(np.float32), "y": c.y.astype(np.int32)}
        for c in draw(alpha, beta, clients, rng)
    ]
    train, test = split.hold_out(examples, 0.1, rng)

    def init(key: Key) -> list[dict[str, jax.Array]]:
        return classifier.zeros((FEATURES, CLASSES))

    return Task(
        name="synthetic",
        train=population(train),
        test=population(test),
        init=init,
        loss=classifier.cross_entropy,
        metrics={"accuracy": classifier.accuracy},
        defaults=Defaults(
            cohort_size=max(1, clients // 2), batch_size=10, client_learning_rate=0.01, rounds=200
        ),
    )
