"""A new transformation, from an algorithm to an algorithm: copy this to src/fedgrad/tuning/.

Give one of the library its row in tests/algorithms/test_every_algorithm.py, around each of them.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import fedgrad as fg


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CountedState:
    """The state of the algorithm inside, and the transformation's own."""

    inner: Any
    rounds: jax.Array

    @property
    def params(self) -> Any:
        """The model: every state has one."""
        return self.inner.params


def counted(algorithm: fg.Algorithm) -> fg.Algorithm:
    """Return the algorithm with the number of its rounds among its metrics.

    Args:
      algorithm: any algorithm whose clients keep no state.

    Returns:
      An `fg.Algorithm` that trains alike.
    """
    algorithm.require_stateless_clients("counted")

    def init(params: Any, hyper: Any) -> CountedState:
        return CountedState(algorithm.init(params, hyper), jnp.int32(0))

    def round(state: CountedState, hyper: Any, *args: Any, **more: Any) -> Any:
        inner, metrics = algorithm.round(state.inner, hyper, *args, **more)
        rounds = state.rounds + 1
        extra = {**metrics.extra, "rounds": rounds}
        return CountedState(inner, rounds), replace(metrics, extra=extra)

    # It takes what the algorithm's own round takes, from the same clients, on the same executor.
    round.__signature__ = algorithm.round.signature  # type: ignore[attr-defined]
    made = fg.Program(round, dict(algorithm.round.placements), algorithm.round.executor)
    return replace(algorithm, init=init, round=made)
