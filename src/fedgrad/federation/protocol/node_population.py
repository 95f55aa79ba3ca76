"""All clients of a federation, from which cohorts are drawn."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedgrad.clients.cohort import Cohort
from fedgrad.clients.population import Population
from fedgrad.core.errors import CohortError
from fedgrad.core.program import Executor
from fedgrad.federation.protocol import state
from fedgrad.federation.protocol.node_values import choose


@dataclass(frozen=True, repr=False)
class NodePopulation(Population):
    """The clients that were connected when this was made, for `fg.fit` and its kind.

    `over_select`: a sampled cohort has so many times as many candidates as it wants clients, and
    those that answer first are the clients.
    """

    everyone: Cohort = field()
    executor: Executor = field()
    over_select: float = 1.0

    def __len__(self) -> int:
        return len(self.everyone)

    def __repr__(self) -> str:
        return f"NodePopulation({len(self)} clients)"

    def indices(self, key: jax.Array, size: int, round: int = 1, role: str = "cohort") -> Any:
        """Which clients are drawn, by their index in the federation."""
        return np.asarray(self.everyone.index)[super().indices(key, size, round, role)]

    def sample(self, key: jax.Array, size: int, round: int = 1, role: str = "cohort") -> Cohort:
        """A cohort of `size` different clients, drawn uniformly: with the same key the same as from
        `fg.population([client_0, client_1, ...])`, or the first to answer of those and others."""
        candidates = min(len(self), math.ceil(size * self.over_select))
        asked = self.indices(key, max(size, candidates), round, role).tolist()
        return choose(self.everyone, asked, size if size < len(asked) else None)

    def begin(self, one: Any) -> Any:
        """The states that clients keep on their nodes: handles."""
        return state.begin(one, np.asarray(self.everyone.index).tolist())

    def gather(self, states: Any, cohort: Any) -> Any:
        """Of the states of all clients, those of a cohort: an argument beside it."""
        return state.gather(states, cohort)

    def scatter(self, states: Any, cohort: Any, new: Any) -> Any:
        """The states of all clients, of which those who have answered have new ones."""
        return state.scatter(states, new)

    def select(self, clients: Any) -> Cohort:
        """The cohort of these clients, by their index in the federation."""
        wanted, known = np.asarray(clients).tolist(), np.asarray(self.everyone.index).tolist()
        if not isinstance(wanted, list) or not wanted or len(set(wanted)) != len(wanted):
            raise CohortError.here(
                f"Select clients by a non-empty list of different indices, got {wanted!r}."
            )
        absent = [client for client in wanted if client not in known]
        if absent:
            raise CohortError.here(f"There is no client {absent[0]}, only {known}.")
        return choose(self.everyone, wanted)
