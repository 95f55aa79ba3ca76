"""All clients of a federation, from which cohorts are drawn."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedgrad.clients.cohort import Cohort
from fedgrad.core.errors import CohortError
from fedgrad.federation.protocol.values import choose


@dataclass(frozen=True, repr=False)
class NodePopulation:
    """The clients that were connected when this was made, for `fg.fit` and its kind.

    `over_select`: a sampled cohort has so many times as many candidates as it wants clients, and
    those that answer first are the clients.
    """

    everyone: Cohort
    over_select: float = 1.0

    def __len__(self) -> int:
        return len(self.everyone)

    def __repr__(self) -> str:
        return f"NodePopulation({len(self)} clients)"

    def sample(self, key: jax.Array, size: int) -> Cohort:
        """A cohort of `size` different clients, drawn uniformly: with the same key the same as from
        `fg.population([client_0, client_1, ...])`."""
        if not 1 <= size <= len(self):
            raise CohortError.here(
                f"Cannot sample {size} of {len(self)} clients. Ask for 1 to {len(self)}."
            )
        order = jax.random.permutation(key, len(self))
        return self.take(order[: self.candidates(size)], size)

    def candidates(self, size: int) -> int:
        """How many clients are asked, of which `size` are wanted."""
        return min(len(self), math.ceil(size * self.over_select))

    def take(self, positions: Any, size: int) -> Cohort:
        """The first `size` to answer of the clients at these positions of the population."""
        candidates = np.asarray(self.everyone.index)[np.asarray(positions)].tolist()
        return choose(self.everyone, candidates, size if size < len(candidates) else None)

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
