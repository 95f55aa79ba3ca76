"""How good a model is on the examples of all clients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms.objective import per_example, takes_key
from fedgrad.clients.examples import Examples
from fedgrad.clients.sampling import Clients
from fedgrad.core.errors import ArgumentError
from fedgrad.core.operations import broadcast, sum
from fedgrad.core.placement import CLIENTS
from fedgrad.core.program import Executor, Program, program


@dataclass(frozen=True)
class Evaluation:
    """A function of the model, with the clients that it asks. Make one with `fg.evaluation`."""

    program: Program
    clients: Any

    def __call__(self, params: Any) -> dict[str, jax.Array]:
        """The metrics of a model."""
        return self.program(params, self.clients)

    def on(self, executor: Executor) -> "Evaluation":
        """The same evaluation, run by another executor."""
        return replace(self, program=self.program.on(executor))

    def side_by_side(self) -> "Evaluation":
        """The evaluation of many models at once, stacked along a leading axis."""
        one = self.program

        @program(clients=CLIENTS)
        def evaluate_each(params: Any, clients: Any) -> Any:
            return jax.vmap(lambda p: one(p, clients))(params)

        return replace(self, program=replace(evaluate_each, executor=one.executor))


def evaluation(
    metrics: Mapping[str, Callable[..., Any]], population: Clients, batch_size: int = 100
) -> Evaluation:
    """The mean of metrics over all examples of all clients of a population.

    `metrics`: functions `(params, batch)` that give one number per example, by name, such as
    `{"loss": loss, "accuracy": lambda params, batch: predict(params, batch["x"]) == batch["y"]}`.
    Only their sums leave a client. `batch_size` is how many examples a client works on at a time.
    """
    if not isinstance(metrics, Mapping) or not metrics:
        raise ArgumentError.here(
            'fg.evaluation takes functions by name, such as {"loss": loss}, got '
            f"{type(metrics).__name__}."
        )

    @program(clients=CLIENTS)
    def evaluate(params: Any, clients: Any) -> dict[str, jax.Array]:
        examples = clients if isinstance(clients, Examples) else Examples.of(clients)
        params = broadcast(params)

        def add(totals: dict[str, jax.Array], batch: Any, mask: jax.Array) -> dict[str, jax.Array]:
            return {
                name: totals[name] + _total(metric, params, batch, mask)
                for name, metric in metrics.items()
            }

        zero = jnp.zeros((), jnp.result_type(jnp.float32, *jax.tree.leaves(params)))
        totals = sum(examples.fold(add, dict.fromkeys(metrics, zero), batch_size))
        count = sum(examples.count)
        return {name: total / count.astype(total.dtype) for name, total in totals.items()}

    everyone = getattr(population, "everyone", None)
    if everyone is None:
        everyone = population.sample(jax.random.key(0), len(population))
    return Evaluation(evaluate, everyone)


def _total(metric: Callable[..., Any], params: Any, batch: Any, mask: jax.Array) -> jax.Array:
    # What is random in training (dropout) is drawn the same way in every evaluation.
    key = jax.random.key(0) if takes_key(metric) else None
    values = per_example(metric, params, batch, key)
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
    return jnp.sum(jnp.where(mask, values, 0).astype(dtype))
