"""A training that is watched: some rounds after which it is worse than before are undone.

What was good for a while need not stay so: rates that are right for the examples that train may be
too large when there are more of them. Nothing is sent for it. What clients tell of their loss in
every round is enough, if rounds are taken together.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fedgrad.core.types import State

LEAST = 3  # rounds that can tell something about chance
CHANCE = 5.0  # standard errors that chance may explain: of few rounds, and it is asked many times


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    """The losses of some rounds, one after another."""

    rounds: jax.Array
    total: jax.Array
    squares: jax.Array  # of what they are above the first one
    first: jax.Array

    @staticmethod
    def none() -> "Losses":
        """Of no round yet."""
        return Losses(*(jnp.float32(0) for _ in range(4)))

    def plus(self, loss: jax.Array | None) -> "Losses":
        """One round more; where its loss is not known or not finite, as it was."""
        if loss is None:
            return self
        loss = jnp.asarray(loss, jnp.float32)
        first = jnp.where(self.rounds > 0, self.first, loss)
        above = loss - first
        new = Losses(self.rounds + 1, self.total + above, self.squares + above**2, first)
        return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(loss), a, b), new, self)

    def measured(self) -> tuple[float, float]:
        """Their mean, and their variance."""
        n = int(self.rounds)
        above = float(self.total) / n
        return float(self.first) + above, max(float(self.squares) / n - above**2, 0) * n / (n - 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watch:
    """The state to go back to, the losses before it and those since."""

    safe: State
    before: Losses
    since: Losses

    @staticmethod
    def begin(state: State, before: Losses | None = None) -> "Watch":
        """From here on; `before`: what was seen on the way here."""
        return Watch(state, before or Losses.none(), Losses.none())

    def got_worse(self, rounds: int) -> bool | None:
        """Whether losses are above what they were by more than chance explains; None if they are
        those of fewer rounds than that."""
        some, more = int(self.before.rounds), int(self.since.rounds)
        if more < max(rounds, LEAST):
            return None
        if some < LEAST:
            return False
        # What falls apart does it by and by: that these rounds differ is no chance.
        (old, spread), (new, _) = self.before.measured(), self.since.measured()
        return new - old > CHANCE * math.sqrt(spread / some + spread / more)
