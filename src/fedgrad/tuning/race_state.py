"""The state of a race between candidates."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms.algorithm import last_of
from fedgrad.core.types import Params, State
from fedgrad.tuning.divergence import Watch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaceState:
    """The states of the remaining candidates, and their scores."""

    candidates: dict[str, Any]
    scores: dict[str, jax.Array]  # their mean ranks, summed over the rounds that count
    # With an incumbent: the squared leads of each candidate over it, summed likewise.
    squares: dict[str, jax.Array]
    leader: jax.Array  # the index of the best score, in the order of their names
    votes: jax.Array  # how many clients judged, summed over these rounds
    changed: jax.Array  # how many changes of hyperparameters have been made
    watch: Watch  # monitors the last candidate
    pace: jax.Array  # the factor on its rates

    @staticmethod
    def begin(states: dict[str, Any], incumbent: str | None, watch: Watch) -> "RaceState":
        """Return the state of a race, or of its part after a cut, with all scores at zero."""

        def zeros(names: Iterable[str]) -> dict[str, jax.Array]:
            return {n: jnp.float32(0) for n in names}

        others = [] if incumbent is None else [n for n in states if n != incumbent]
        return RaceState(
            states,
            zeros(states),
            zeros(others),
            leader=jnp.int32(0),
            votes=jnp.float32(0),
            changed=jnp.int32(0),
            watch=watch,
            pace=jnp.asarray(1.0),  # weakly typed, like learning rates
        )

    @property
    def params(self) -> Params:
        """The model of the leading candidate."""
        return self._of_the_leader([s.params for s in self._states])

    @property
    def last(self) -> Params:
        """The model that the leader's training continues from."""
        return self._of_the_leader([last_of(s) for s in self._states])

    @property
    def _states(self) -> list[State]:
        return [self.candidates[n] for n in sorted(self.candidates)]

    def _of_the_leader(self, models: list[Params]) -> Params:
        found = models[0]
        for i, model in enumerate(models[1:], 1):
            found = jax.tree.map(lambda a, b, i=i: jnp.where(self.leader == i, b, a), found, model)
        return found
