"""The program of an evaluation: means of metrics over all examples; only sums leave a client."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms.objective import per_example, sent, takes_key
from fedgrad.clients.examples import Examples
from fedgrad.clients.held_out import HeldOut
from fedgrad.core.errors import known_fields
from fedgrad.core.graph import CLIENTS
from fedgrad.core.primitives import accumulator
from fedgrad.core.program import Program, broadcast, program, sum
from fedgrad.core.types import Batch, Params

# (params, batch) -> one number per example
Metric = Callable[..., Any]


@known_fields
@dataclass(frozen=True)
class Ratio:
    """A metric that is the ratio of two sums over all examples, such as correct tokens over tokens.

    `Ratio(right, tokens)` takes two functions `(params, batch)` that return one number per example.
    """

    part: Metric
    whole: Metric

    def __call__(self, params: Params, batch: Batch) -> jax.Array:
        """Return the ratio for each example; a denominator of 0 counts as 1."""
        part, whole = self.part(params, batch), self.whole(params, batch)
        return part / jnp.where(whole == 0, 1, whole).astype(part.dtype)


def of_portions(sums: list[dict[str, tuple[Any, Any]]]) -> dict[str, np.ndarray]:
    """Combine the sums of all portions into metrics."""

    def total(parts: Any) -> np.ndarray:
        return np.asarray(parts, np.float64).sum(0)

    def quotient(name: str) -> np.ndarray:
        tops, bottoms = zip(*(portion[name] for portion in sums), strict=True)
        with np.errstate(divide="ignore", invalid="ignore"):  # NaN and inf, as on the device
            return np.asarray(total(tops) / total(bottoms), tops[0].dtype)

    return {name: quotient(name) for name in sums[0]}


def means(
    metrics: Mapping[str, Metric], batch_size: int, held_out: HeldOut | None, per_client: bool
) -> Program:
    summed = dict(metrics)
    for name, metric in metrics.items():
        if isinstance(metric, Ratio):
            summed |= {name: metric.part, _whole(name): metric.whole}

    @program(clients=CLIENTS)
    def evaluate(params: Params, clients: Any) -> Any:
        """Return the metrics by name, and the two sums whose quotient each of them is: over all
        clients, and with `per_client` those of each client."""
        examples = Examples.of(clients)
        if held_out is not None:
            _, examples = held_out.split(examples)
        params, measured = broadcast(params), {n: sent(m) for n, m in summed.items()}

        def add(
            totals: dict[str, jax.Array], batch: Batch, mask: jax.Array
        ) -> dict[str, jax.Array]:
            return {
                name: totals[name] + _total(metric, params, batch, mask)
                for name, metric in measured.items()
            }

        zero = jnp.zeros((), accumulator(params))
        own = examples.fold(add, dict.fromkeys(summed, zero), batch_size)

        # The total may overflow an int32.
        own_count = examples.count.astype(zero.dtype)

        def pairs(totals: dict[str, jax.Array], count: jax.Array) -> dict[str, Any]:
            return {name: (totals[name], totals.get(_whole(name), count)) for name in metrics}

        totals = {}
        for name, value in own.items():
            with jax.named_scope(f"metric {name.replace('/', ' ')}"):
                totals[name] = sum(value)
        sums = pairs(totals, sum(own_count))
        found = {name: top / bottom for name, (top, bottom) in sums.items()}
        return found, sums, pairs(own, own_count) if per_client else {}

    return evaluate


def _whole(name: str) -> str:
    return f"{name}: whole"


def _total(metric: Metric, params: Params, batch: Batch, mask: jax.Array) -> jax.Array:
    # A fixed key, so that random metrics (dropout) are the same in every evaluation.
    key = jax.random.key(0) if takes_key(metric) else None
    values = per_example(metric, params, batch, key)
    return jnp.sum(jnp.where(mask, values.astype(accumulator(params)), 0))
