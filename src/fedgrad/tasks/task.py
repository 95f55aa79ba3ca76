"""The definition of a task: clients with examples, a model, and its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from fedgrad.clients.population import Population
from fedgrad.core.errors import known_fields
from fedgrad.tasks.task_checks import Defaults, PerExample, require_task

_USUAL = Defaults()


@known_fields
@dataclass(frozen=True, repr=False)
class Task:
    """A learning problem over clients. All of it is checked when it is made.

    Attributes:
        train: The population to train on.
        init: `init(key) -> params`.
        loss: The loss of each example of a batch, `loss(params, batch)` or, if it is random,
            `loss(params, batch, key)`.
        test: Clients with examples to evaluate on.
        validation: Separate clients, whose loss can be used to learn hyperparameters.
        metrics: Functions like the loss, by name.
        defaults: Settings with which the task trains well.
        name: The name of the task.
        about: A sentence that describes the data.

    Example:

        Task(train=fg.population(clients), init=init, loss=loss)
    """

    train: Population
    init: Callable[[jax.Array], Any]
    loss: PerExample
    test: Population | None = None
    validation: Population | None = None
    metrics: Mapping[str, PerExample] = field(default_factory=dict)
    defaults: Defaults = _USUAL
    name: str = ""
    about: str = ""

    def __post_init__(self) -> None:
        if self.defaults is _USUAL and isinstance(self.train, Population):
            fitting = replace(_USUAL, cohort_size=min(_USUAL.cohort_size, len(self.train)))
            object.__setattr__(self, "defaults", fitting)
        require_task(self)

    def __repr__(self) -> str:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        lines = [f"{name}: {clients!r}" for name, clients in parts.items() if clients is not None]
        lines += [f"metrics: {', '.join(self.metrics)}"] if self.metrics else []
        heading = f"Task {self.name}".rstrip() + (f": {self.about}" if self.about else "")
        return "\n  ".join([heading, *lines])
