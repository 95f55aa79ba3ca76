"""A training that is watched: some rounds after which it is worse than before are undone.

What was good for a while need not stay so: rates that are right for the examples that train may be
too large when there are more of them. Nothing is sent for it. What clients tell of their loss in
every round is enough, if rounds are taken together.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from scipy.special import stdtrit

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.stages import after
from fedgrad.core.types import Hyper, State

ASKED = 0.05  # after such parts of all rounds it is asked whether it got worse
LEAST = 3  # rounds that can tell something about chance
CHANCE = 1e-3  # how likely a rise may be without a reason: it is asked some twenty times
# Of what training has gained: so much of it may be lost. Where losses hardly differ from round to
# round, chance explains nothing, and what nobody would notice would count.
MATTERS = 0.1


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
        """One round more, if its loss is known. One that is not finite is worse than any."""
        if loss is None:
            return self
        loss = jnp.asarray(loss, jnp.float32)
        known = jnp.isfinite(loss)
        first = jnp.where(self.rounds > 0, self.first, jnp.where(known, loss, 0))
        above = jnp.where(known, loss - first, jnp.inf)
        return Losses(self.rounds + 1, self.total + above, self.squares + above**2, first)

    def measured(self) -> tuple[float, float]:
        """Their mean, and their variance."""
        n = int(self.rounds)
        above = float(self.total) / n
        return float(self.first) + above, max(float(self.squares) / n - above**2, 0) * n / (n - 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watch:
    """The states to go back to, the loss that training began with, the losses before these states
    and those since."""

    safe: dict[str, State]  # none, as long as nobody is watched
    began: jax.Array
    before: Losses
    since: Losses

    @staticmethod
    def begin(safe: dict[str, State]) -> "Watch":
        """Before the first round."""
        return Watch(safe, jnp.float32(jnp.nan), Losses.none(), Losses.none())

    def plus(self, loss: jax.Array | None) -> "Watch":
        """One round more."""
        if loss is None:
            return self
        began = jnp.where(jnp.isnan(self.began), jnp.asarray(loss, jnp.float32), self.began)
        return replace(self, began=began, since=self.since.plus(loss))

    def moved(self, safe: dict[str, State]) -> "Watch":
        """These are the states to go back to from now on."""
        return replace(self, safe=safe, before=self.since, since=Losses.none())

    def asked(
        self, now: dict[str, State], done: int, planned: int
    ) -> tuple[dict[str, State], "Watch", bool]:
        """The states to go on with, what is known from now on, and whether it went back: if it is
        time to ask, and losses have become worse."""
        rounds = after(ASKED, planned)
        if done % rounds or int(self.since.rounds) < max(rounds, LEAST):
            return now, self, False
        if not self.got_worse():
            return now, self.moved(now), False
        return self.safe, replace(self, since=Losses.none()), True

    def got_worse(self) -> bool:
        """Whether losses are above what they were by more than chance explains, and by more than
        nobody would notice."""
        some, more = int(self.before.rounds), int(self.since.rounds)
        if min(some, more) < LEAST:
            return False
        # What falls apart does it by and by: that these rounds differ is no chance. Of how much
        # they differ by chance, few rounds before know little: Student's t.
        (old, spread), (new, _) = self.before.measured(), self.since.measured()
        errors = float(stdtrit(some - 1, 1 - CHANCE))
        chance = errors * math.sqrt(spread / some + spread / more)
        gained = float(self.began) - old
        return new - old > max(chance, MATTERS * gained if math.isfinite(gained) else 0)


def rates_of(hyper: Hyper, branch: str) -> list[str]:
    """The learning rates of a branch by dotted name: one, or one for each layer."""
    names = [name.split(".") for name in names_of.paths(hyper)]
    return [".".join(n) for n in names if n[0] == branch and "learning_rate" in n]


def eased_by(hyper: Hyper) -> list[str]:
    """The rates to lower where training got worse: the server's, or its clients' if that has none.
    They are halved each time."""
    return rates_of(hyper, "server") or rates_of(hyper, "client")
