"""What a task is: clients with training and test examples, a model, and its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from fedgrad.clients.population import Population
from fedgrad.core.errors import FederatedError

PerExample = Callable[[Any, Any], jax.Array]  # (params, batch) -> one number per example


class TaskError(FederatedError):
    """A task is unknown, or cannot be made as asked for."""


@dataclass(frozen=True)
class Defaults:
    """Settings with which a task trains well, to start from."""

    cohort_size: int
    batch_size: int
    client_learning_rate: float
    rounds: int


@dataclass(frozen=True)
class Task:
    """A learning problem over clients. `train` and `test` hold the same clients' examples."""

    name: str
    train: Population
    test: Population
    init: Callable[[jax.Array], Any]
    loss: PerExample
    metrics: Mapping[str, PerExample]
    defaults: Defaults
