"""Tasks whose clients come from files, with the same options for every model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedgrad.core.errors import nearest
from fedgrad.core.types import Key, Params
from fedgrad.tasks.data.conversion import populations
from fedgrad.tasks.data.dataset import DataSet
from fedgrad.tasks.task import Task
from fedgrad.tasks.task_checks import Defaults, PerExample, TaskError


@dataclass(frozen=True)
class Model:
    """The parts of a task other than its clients."""

    init: Callable[[Key], Params]
    loss: PerExample
    metrics: Mapping[str, PerExample]


@dataclass(frozen=True)
class FromData:
    """A factory of the task that reads these data.

    `sizes` has the configurations of a small model and of the paper's, `rates` the client learning
    rate for each; `model` makes a model from its configuration.
    """

    data: DataSet
    sizes: Mapping[str, Any]
    rates: Mapping[str, float]
    batch_size: int
    model: Callable[[Any], Model]

    def __call__(
        self,
        size: str = "small",
        data: Any = None,
        clients: int | None = None,
        validation: float = 0.0,
        seed: int = 0,
    ) -> Task:
        """Return the task; without `data`, with generated examples."""
        if not isinstance(size, str) or size not in self.sizes:
            known = list(self.sizes)
            raise TaskError.here(f"There is no size {size!r}.{nearest(str(size), known)}")
        found = populations(self.data, data, clients, validation, seed)
        return Task(
            name=self.data.name,
            **vars(found),  # train, test, validation, about
            **vars(self.model(self.sizes[size])),
            defaults=self._defaults(size, len(found.train)),
        )

    def _defaults(self, size: str, clients: int) -> Defaults:
        """Return the paper's cohorts of 50 and 1,500 rounds, or less; never more than all
        clients."""
        cohort, rounds = (50, 1500) if size == "paper" else (10, 100)
        return Defaults(min(cohort, clients), self.batch_size, self.rates[size], rounds)
