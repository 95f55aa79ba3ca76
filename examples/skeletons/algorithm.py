"""A new algorithm: copy this to src/fedgrad/algorithms/, and add it to `ALGORITHMS` in variants.py.

If it is FedAvg with another server or another work of clients, it needs none of this: see
`fed_avgm` in variants.py, which is its difference and nothing more.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import fedgrad as fg


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SkeletonState:
    """The model, and what the server remembers from round to round."""

    params: Any
    momentum: Any


def skeleton(loss: Any, learning_rate: float = 0.1, momentum: float = 0.9) -> fg.Algorithm:
    """Return federated gradient descent with momentum.

    m = momentum m + mean gradient, x = x - learning_rate m

    Args:
      loss: `loss(params, batch)`, one number per example.
      learning_rate: of the server.
      momentum: of the server.

    Returns:
      An `fg.Algorithm`.
    """

    def init(params: Any, hyper: Any) -> SkeletonState:
        return SkeletonState(params, jax.tree.map(jnp.zeros_like, params))

    @fg.program(cohort=fg.CLIENTS)
    def round(state: SkeletonState, hyper: Any, cohort: Any, key: Any) -> Any:
        model = fg.broadcast(state.params)  # server -> clients

        def mean_loss(params: Any) -> Any:  # one client, on its own examples
            batch, exists = cohort.batch(0, 8)
            return jnp.mean(loss(params, batch), where=exists)

        value, slope = jax.value_and_grad(mean_loss)(model)
        slope = fg.mean(slope, weights=cohort.count)  # clients -> server
        moved = jax.tree.map(lambda m, g: hyper["momentum"] * m + g, state.momentum, slope)
        params = jax.tree.map(lambda x, m: x - hyper["learning_rate"] * m, state.params, moved)
        metrics = fg.Metrics(loss=fg.mean(value, weights=cohort.count))
        return replace(state, params=params, momentum=moved), metrics

    return fg.Algorithm(init, round, {"learning_rate": learning_rate, "momentum": momentum}, loss)
