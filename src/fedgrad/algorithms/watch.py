"""A training that is watched: some rounds after which it is worse than before are undone.

What was good for a while need not stay so: rates that are right for the examples that train may be
too large when there are more of them. Nothing is sent for it. What clients tell of their loss in
every round is enough, if rounds are taken together.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.stages import after, by_chance
from fedgrad.core.types import Hyper, State

ASKED = 0.05  # after such parts of all rounds it is asked whether it got worse
LEAST = 3  # rounds that can tell something about chance
# Of what training has gained: so much of it may be lost. Where losses hardly differ from round to
# round, chance explains nothing, and what nobody would notice would count.
MATTERS = 0.1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    """The losses of some rounds, one after another."""

    rounds: jax.Array
    first: jax.Array
    last: jax.Array
    above: jax.Array  # the first one, summed
    jumps: jax.Array  # from one to the next, squared and summed

    @staticmethod
    def none() -> "Losses":
        """Of no round yet."""
        return Losses(*(jnp.float32(0) for _ in range(5)))

    def plus(self, loss: jax.Array) -> "Losses":
        """One round more. A loss that is not finite is worse than any."""
        loss = jnp.asarray(loss, jnp.float32)
        known = jnp.isfinite(loss)
        seen = jnp.where(known, loss, self.last)
        first = jnp.where(self.rounds > 0, self.first, seen)
        jump = jnp.where(self.rounds > 0, (seen - self.last) ** 2, 0)
        above = jnp.where(known, loss - first, jnp.inf)
        return Losses(self.rounds + 1, first, seen, self.above + above, self.jumps + jump)

    @property
    def mean(self) -> float:
        """Their mean."""
        return float(self.first) + float(self.above) / float(self.rounds)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watch:
    """The states to go back to, the losses before these states and those since; and of all rounds
    up to these states how much losses differ from one to the next, however they fall or rise."""

    safe: dict[str, State]  # none, as long as nobody is watched
    began: jax.Array  # the first loss of all
    before: Losses
    since: Losses
    jumps: jax.Array  # squared and summed
    pairs: jax.Array  # so many

    @staticmethod
    def begin(safe: dict[str, State]) -> "Watch":
        """Before the first round."""
        zero = jnp.float32(0)
        return Watch(safe, jnp.float32(jnp.nan), Losses.none(), Losses.none(), zero, zero)

    def plus(self, loss: jax.Array | None) -> "Watch":
        """One round more, if its loss is known."""
        if loss is None:
            return self
        began = jnp.where(jnp.isnan(self.began), jnp.asarray(loss, jnp.float32), self.began)
        return replace(self, began=began, since=self.since.plus(loss))

    def moved(self, safe: dict[str, State]) -> "Watch":
        """These are the states to go back to from now on."""
        seen = self.since
        jumps, pairs = self.jumps + seen.jumps, self.pairs + jnp.maximum(seen.rounds - 1, 0)
        return Watch(safe, self.began, seen, Losses.none(), jumps, pairs)

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
        some, more, pairs = (int(n) for n in (self.before.rounds, self.since.rounds, self.pairs))
        if min(some, more) < LEAST:
            return False
        # The mean square of differences is twice the variance, also of losses that fall; of half as
        # many more of them it is known as well as by deviations from a mean (von Neumann 1941).
        # Those of the last rounds do not count: what falls apart does it by and by.
        variance = float(self.jumps) / (2 * pairs)
        chance = by_chance(2 / 3 * pairs) * math.sqrt(variance / some + variance / more)
        old, new = self.before.mean, self.since.mean
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
