"""Who says what the loss is whose derivative hyperparameters follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from fedgrad.algorithms.objective import Loss, client_loss
from fedgrad.clients.examples import Examples
from fedgrad.clients.held_out import HeldOut
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError, require_whole
from fedgrad.core.graph import CLIENTS, Placement
from fedgrad.core.program import Program, broadcast, mean, program
from fedgrad.core.types import Params

GRADIENT = Placement("gradient")


@dataclass(frozen=True)
class GradientCohort:
    """Whose loss `fg.self_tuning` follows, and which.

    `clients`: a "fresh" cohort of those that are trained on (the paper's choice), the "same"
    clients that train, or another population. `loss`: another one than the algorithm minimizes.
    `batch_size`: how many examples a client works on at a time. `held_out`: only of these examples
    of each client; train without them, `fg.holding_out(algorithm, held_out)`.
    """

    clients: Literal["fresh", "same"] | Population = "fresh"
    loss: Loss | None = None
    batch_size: int = 50
    held_out: HeldOut | None = None

    def __post_init__(self) -> None:
        if self.clients not in ("fresh", "same") and not isinstance(self.clients, Population):
            raise ArgumentError.here(
                f'gradient_from= takes "fresh", "same" or a population, got {self.clients!r}.'
            )
        require_whole("batch_size", self.batch_size)

    @property
    def placement(self) -> Placement:
        """Where they are: with those that train, or apart from them."""
        return GRADIENT if self.cohorts else CLIENTS

    @property
    def cohorts(self) -> Mapping[str, Population | None]:
        """The further cohort that a round needs, by argument, and what it is drawn from."""
        if isinstance(self.clients, str):
            return {} if self.clients == "same" else {"gradient_cohort": None}
        return {"gradient_cohort": self.clients}

    def program(self, loss: Loss) -> Program:
        """Their loss of a model: (params, gradient_cohort) -> the mean over examples."""
        at = self.placement

        @program(gradient_cohort=at)
        def gradient_loss(params: Params, gradient_cohort: Any) -> jax.Array:
            data = gradient_cohort
            examples = Examples.of(data)
            if self.held_out is not None:
                _, examples = self.held_out.split(examples)
            own = client_loss(self.loss or loss, self.batch_size, broadcast(params, at), examples)
            return mean(own, weights=examples.count, at=at)

        return gradient_loss
