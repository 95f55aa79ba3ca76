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
    """The states of the candidates that are left, and how they stand."""

    candidates: dict[str, Any]
    scores: dict[str, jax.Array]  # their mean ranks, summed over rounds that count
    # Where there is an incumbent: the squares of what each was ahead of it by, summed likewise.
    squares: dict[str, jax.Array]
    leader: jax.Array  # who has the best score, in the order of their names
    votes: jax.Array  # how many clients have judged, once for each of these rounds
    changed: jax.Array  # how many changes of hyperparameters have come
    watch: Watch  # of who is left alone
    pace: jax.Array  # what its rates are multiplied with

    @staticmethod
    def begin(states: dict[str, Any], incumbent: str | None, watch: Watch) -> "RaceState":
        """Return the state of a race, or of its part after a cut, in which nobody has a score."""

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
            pace=jnp.asarray(1.0),  # weakly typed, as learning rates are
        )

    @property
    def params(self) -> Params:
        """The model of the candidate that leads."""
        return self._of_the_leader([s.params for s in self._states])

    @property
    def last(self) -> Params:
        """The model that its training goes on with."""
        return self._of_the_leader([last_of(s) for s in self._states])

    @property
    def _states(self) -> list[State]:
        return [self.candidates[n] for n in sorted(self.candidates)]

    def _of_the_leader(self, models: list[Params]) -> Params:
        found = models[0]
        for i, model in enumerate(models[1:], 1):
            found = jax.tree.map(lambda a, b, i=i: jnp.where(self.leader == i, b, a), found, model)
        return found
