"""The course of training: whom each round asks, and where it computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.clients.sampling import Clients, Draw, cohort_sizes, draws, sharding_of
from fedgrad.core.errors import ArgumentError
from fedgrad.federation.protocol.values import NodeValue
from fedgrad.training.client_state import first_state, play


@dataclass(frozen=True)
class Course:
    """An algorithm with the clients that it is trained on, and who of them takes part when."""

    algorithm: Algorithm
    populations: Mapping[str, Clients]  # by the argument of a round that they are drawn for
    clients: int  # in a round
    draw: Callable[[int], Draw]

    @staticmethod
    def of(algorithm: Algorithm, clients: Clients, cohort_size: int, key: jax.Array) -> "Course":
        """The course, or what is wrong with what is asked of it."""
        populations = {"cohort": clients} | {
            name: clients if other is None else other for name, other in algorithm.cohorts.items()
        }
        sizes = cohort_sizes(populations, cohort_size)
        return Course(algorithm, populations, sum(sizes.values()), draws(populations, sizes, key))

    def play(self, round: int, state: Any, hyper: Any) -> tuple[Any, Any]:
        """The state after a round, and its metrics."""
        return play(self.algorithm, state, hyper, self.draw(round))

    def first(self, params: Any) -> Any:
        """The state before the first round, where the clients' data are."""
        return self.placed(first_state(self.algorithm, params, self.populations["cohort"]))

    def placed(self, tree: Any) -> Any:
        """States or hyperparameters where the clients' data are. Otherwise the first round would be
        compiled for another place than all later ones."""

        def array(leaf: Any) -> Any:
            try:
                return leaf if isinstance(leaf, jax.Array | NodeValue) else jnp.asarray(leaf)
            except TypeError:
                raise ArgumentError.here(
                    f"States and hyperparameters are made of arrays, found {type(leaf).__name__}."
                ) from None

        sharding = sharding_of(self.populations["cohort"])
        tree = jax.tree.map(array, tree)
        return tree if sharding is None else jax.device_put(tree, sharding)
