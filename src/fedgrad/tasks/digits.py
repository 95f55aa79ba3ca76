"""Handwritten digits (scikit-learn's 1,797 images of 8 x 8), split over clients by label."""

import jax
import numpy as np

from fedgrad.clients.in_memory import population
from fedgrad.core.errors import needs
from fedgrad.core.types import Key
from fedgrad.tasks import classifier, split
from fedgrad.tasks.task import Task
from fedgrad.tasks.task_checks import Defaults


def digits(
    clients: int = 100,
    concentration: float = 0.3,
    hidden: int = 32,
    at_least: int = 5,
    seed: int = 0,
) -> Task:
    """A network with one hidden layer on digits.

    The images are split by Dirichlet(concentration); each client trains on 80 % of its examples.
    """
    x, y = _digits()
    rng = np.random.default_rng(seed)
    parts = split.dirichlet(y, clients, concentration, rng, at_least=max(at_least, 2))
    train, test = split.hold_out(split.divide({"x": x, "y": y}, parts), 0.2, rng)

    def init(key: Key) -> list[dict[str, jax.Array]]:
        return classifier.random(key, (64, hidden, 10))

    return Task(
        name="digits",
        train=population(train),
        test=population(test),
        init=init,
        loss=classifier.cross_entropy,
        metrics={"accuracy": classifier.accuracy},
        defaults=Defaults(
            cohort_size=min(20, clients), batch_size=10, client_learning_rate=0.1, rounds=200
        ),
    )


def _digits() -> tuple[np.ndarray, np.ndarray]:
    with needs("The task 'digits'", "tasks"):
        from sklearn.datasets import load_digits
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y.astype(np.int32)
