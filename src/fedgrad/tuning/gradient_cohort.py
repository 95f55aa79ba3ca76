"""The clients whose loss the hyperparameters follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedgrad.algorithms.objective import Loss, client_loss, sent
from fedgrad.clients.examples import Examples
from fedgrad.clients.held_out import HeldOut, require_rule
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError, known_fields, require_whole
from fedgrad.core.graph import CLIENTS, Placement
from fedgrad.core.program import Program, broadcast, mean, program
from fedgrad.core.program import sum as sum_
from fedgrad.core.types import Params

GRADIENT = Placement("gradient")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Comparison:
    """The difference between the losses of two models on the same clients and examples."""

    difference: jax.Array  # the mean over examples, positive if the first is worse
    error: jax.Array  # its standard error over clients
    spread: jax.Array  # the standard error of the second model's loss itself


@known_fields
@dataclass(frozen=True)
class GradientCohort:
    """The clients whose loss `fg.self_tuning` follows, and the loss itself.

    Attributes:
        clients: A "fresh" cohort of the training clients (the paper's choice), the "same" clients
            that train, or another population.
        loss: A loss other than the one that the algorithm minimizes.
        batch_size: How many examples a client processes at a time.
        held_out: Use only these examples of each client; train without them with
            `fg.holding_out(algorithm, held_out)`. If no client of a cohort has enough examples for
            the rule, the cohort's `gradient_loss` is NaN and no step is taken.
    """

    clients: Literal["fresh", "same"] | Population = "fresh"
    loss: Loss | None = None
    batch_size: int = 50
    held_out: HeldOut | None = None

    def __post_init__(self) -> None:
        if self.clients not in ("fresh", "same") and not isinstance(self.clients, Population):
            got = self.clients if isinstance(self.clients, str) else type(self.clients).__name__
            raise ArgumentError.here(
                f'gradient_from= takes "fresh", "same" or a population, got {got!r}. Write '
                "gradient_from=fg.population([client_0, client_1, ...])."
            )
        require_whole("batch_size", self.batch_size)
        if self.held_out is not None:
            require_rule("fg.GradientCohort", self.held_out)

    def require_some(self, populations: Mapping[str, Population]) -> None:
        """Refuse populations in which no client has an example that judges."""
        if self.held_out is not None:
            name = "gradient_cohort" if self.cohorts else "cohort"
            self.held_out.require_some("fg.GradientCohort(held_out=)", populations[name])

    @property
    def words(self) -> str:
        """A description of the clients and their loss."""
        who = self.clients if isinstance(self.clients, str) else "another population"
        loss = getattr(self.loss, "__name__", type(self.loss).__name__)
        what = "" if self.loss is None else f", loss {loss}"
        which = "" if self.held_out is None else f", {self.held_out}"
        return f"{who}, batches of {self.batch_size}{what}{which}"

    @property
    def placement(self) -> Placement:
        """The placement of these clients: that of the training clients, or a separate one."""
        return GRADIENT if self.cohorts else CLIENTS

    @property
    def cohorts(self) -> Mapping[str, Population | None]:
        """The extra cohort that a round needs, by argument, and the population to draw it from."""
        if isinstance(self.clients, str):
            return {} if self.clients == "same" else {"gradient_cohort": None}
        return {"gradient_cohort": self.clients}

    def program(self, loss: Loss) -> Program:
        """Return the program (params, before, gradient_cohort) -> (loss, (known, comparison)).

        `loss` is the mean over examples, NaN if there are none; `known` tells whether there are
        any; `comparison` compares the loss with that of the model `before`, if there is one.
        """
        at = self.placement

        @program(gradient_cohort=at)
        def gradient_loss(params: Params, before: Params | None, gradient_cohort: Any) -> Any:
            examples, judged = Examples.of(gradient_cohort), sent(self.loss or loss, at)
            if self.held_out is not None:
                _, examples = self.held_out.split(examples)

            def own(params: Params) -> jax.Array:
                return client_loss(judged, self.batch_size, broadcast(params, at), examples)

            value = own(params)
            with jax.named_scope("loss of the model, weighted"):
                total = mean(value, weights=examples.count, at=at, empty=jnp.nan)
                known = sum_(_as_weight(examples.count), at) > 0
            if before is None:
                return total, (known, None)
            with jax.named_scope("comparison with the model before"):
                value = jax.lax.stop_gradient(value)
                return total, (known, _compared(value, own(before), examples.count, at))

        return gradient_loss


def _as_weight(count: jax.Array) -> jax.Array:
    """Cast a number of examples as `fg.mean` does, so that the sum is not sent twice."""
    return count.astype(int).astype(float)


def _compared(value: jax.Array, before: jax.Array, count: jax.Array, at: Placement) -> Comparison:
    """Compare two losses; the server learns nothing but sums."""
    weight = count.astype(value.dtype)
    pair = {"difference": value - before, "before": before}
    first = sum_({n: weight * x for n, x in pair.items()}, at)
    second = sum_({n: weight**2 * jnp.stack([x, x**2]) for n, x in pair.items()}, at)
    total, squares = sum_(_as_weight(count), at).astype(value.dtype), sum_(weight**2, at)
    means = {n: x / total for n, x in first.items()}

    clients = total**2 / squares  # effective sample size: this many equal weights
    few = jnp.sqrt(clients / jnp.maximum(clients - 1, 1))

    def error(name: str) -> jax.Array:
        """Return the standard error of a weighted mean: sqrt(sum w^2 (x - mean)^2) / sum w."""
        mean, (linear, square) = means[name], second[name]
        left = square - 2 * mean * linear + mean**2 * squares
        return few * jnp.sqrt(jnp.maximum(left, 0)) / total

    found = means["difference"], error("difference"), error("before")
    return Comparison(*(x.astype(jnp.float32) for x in found))
