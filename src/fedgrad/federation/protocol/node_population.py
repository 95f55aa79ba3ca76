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
    """The clients that were connected when this was created, for `fg.fit` and similar functions.

    `over_select`: a sampled cohort has this many times as many candidates as it needs clients; the
    first candidates to answer form the cohort.
    """

    everyone: Cohort = field()
    executor: Executor = field()
    over_select: float = 1.0

    def __len__(self) -> int:
        return len(self.everyone)

    def __repr__(self) -> str:
        return f"NodePopulation({len(self)} clients)"

    def indices(self, key: jax.Array, size: int, round: int = 1, role: str = "cohort") -> Any:
        """Return the drawn clients by their index in the federation."""
        return np.asarray(self.everyone.index)[super().indices(key, size, round, role)]

    def sample(self, key: jax.Array, size: int, round: int = 1, role: str = "cohort") -> Cohort:
        """Draw a cohort of `size` distinct clients uniformly. The same key draws the same clients
        as from `fg.population([client_0, client_1, ...])`; with `over_select`, the cohort is the
        first to answer of those and further candidates."""
        candidates = min(len(self), math.ceil(size * self.over_select))
        asked = self.indices(key, max(size, candidates), round, role).tolist()
        return choose(self.everyone, asked, size if size < len(asked) else None)

    def begin(self, one: Any) -> Any:
        """Return handles to the initial states, which clients keep on their nodes."""
        return state.begin(one, np.asarray(self.everyone.index).tolist())

    def gather(self, states: Any, cohort: Any) -> Any:
        """Return the states of a cohort's clients, an argument to pass along with the cohort."""
        return state.gather(states, cohort)

    def scatter(self, states: Any, cohort: Any, new: Any) -> Any:
        """Return the states of all clients, with new ones for the clients that answered."""
        return state.scatter(states, new)

    def select(self, clients: Any) -> Cohort:
        """Return the cohort of these clients, given by their index in the federation."""
        wanted, known = np.asarray(clients).tolist(), np.asarray(self.everyone.index).tolist()
        if not isinstance(wanted, list) or not wanted or len(set(wanted)) != len(wanted):
            raise CohortError.here(
                f"Select clients by a non-empty list of different indices, got {wanted!r}."
            )
        absent = [client for client in wanted if client not in known]
        if absent:
            raise CohortError.here(f"There is no client {absent[0]}, only {known}.")
        return choose(self.everyone, wanted)
