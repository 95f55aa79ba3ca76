"""A training that is watched: some rounds after which it is worse than before are undone.

What was good for a while need not stay so: rates that are right for the examples that train may be
too large when there are more of them. Nothing is sent for it. What clients tell of their loss in
every round is enough, if rounds are taken together.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from fedgrad.core.types import State
from fedgrad.tuning.cuts import after, by_chance

ASKED = 0.05  # after such parts of all rounds it is asked whether it got worse
LEAST = 3  # rounds that can tell something about chance
# Of what training has gained: so much of it may be lost. Where losses hardly differ from round to
# round, chance explains nothing, and what nobody would notice would count.
MATTERS = 0.1
# A loss that is higher above the first one counts as that: one of 1e20 in a race would make all
# others look alike.
MOST = 10.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    """The losses of some rounds, one after another."""

    rounds: jax.Array
    lost: jax.Array  # further rounds, that were undone or whose loss is not finite
    first: jax.Array
    last: jax.Array
    above: jax.Array  # the first one, summed
    jumps: jax.Array  # from one to the next, summed

    @staticmethod
    def none() -> "Losses":
        """Of no round yet."""
        return Losses(*(jnp.float32(0) for _ in range(6)))

    def plus(self, loss: jax.Array) -> "Losses":
        """One round more."""
        known = jnp.isfinite(loss)
        first = jnp.where(self.rounds > 0, self.first, loss)
        jump = jnp.where(self.rounds > 0, jnp.abs(loss - self.last), 0)
        above, jumps = self.above + loss - first, self.jumps + jump
        seen = Losses(self.rounds + 1, self.lost, first, loss, above, jumps)
        lost = replace(self, lost=self.lost + 1)
        return jax.tree.map(lambda a, b: jnp.where(known, a, b), seen, lost)

    @property
    def mean(self) -> float:
        """Their mean; worse than any, if more rounds were lost than not."""
        rounds = int(self.rounds)
        if int(self.lost) > rounds:
            return math.inf
        return float(self.first) + float(self.above) / max(rounds, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watch:
    """The states to go back to, the losses before these states and those since; and of all rounds
    up to these states how much losses differ from one to the next, however they fall or rise."""

    safe: dict[str, State]  # none, as long as nobody is watched
    began: jax.Array  # the first loss of all
    before: Losses
    since: Losses
    jumps: jax.Array  # summed
    pairs: jax.Array  # so many
    undone: jax.Array  # the mean loss of what was undone, if training has just gone back

    @staticmethod
    def begin(safe: dict[str, State]) -> "Watch":
        """Before the first round."""
        zero, unknown = jnp.float32(0), jnp.float32(jnp.nan)
        return Watch(safe, unknown, Losses.none(), Losses.none(), zero, zero, unknown)

    def plus(self, loss: jax.Array | None, kept: jax.Array | bool = True) -> "Watch":
        """One round more, if its loss is known; and whether it was `kept`, or undone at once."""
        if loss is None:
            return self
        loss = jnp.asarray(loss, jnp.float32)
        began = jnp.where(jnp.isnan(self.began) & jnp.isfinite(loss), loss, self.began)
        most = jnp.where(jnp.abs(began) > 0, began + MOST * jnp.abs(began), jnp.inf)
        told = jnp.where(kept & jnp.isfinite(loss), jnp.minimum(loss, most), jnp.nan)
        return replace(self, began=began, since=self.since.plus(told))

    def moved(self, safe: dict[str, State]) -> "Watch":
        """These are the states to go back to from now on."""
        seen = self.since
        return replace(
            self,
            safe=safe,
            before=seen,
            since=Losses.none(),
            jumps=self.jumps + seen.jumps,
            pairs=self.pairs + jnp.maximum(seen.rounds - 1, 0),
            undone=jnp.float32(jnp.nan),
        )

    def of_other_examples(self, safe: dict[str, State]) -> "Watch":
        """The same, where other examples train from now on: with losses of those before, theirs
        cannot be compared."""
        return replace(self.moved(safe), before=Losses.none())

    def asked(
        self, now: dict[str, State], done: int, planned: int
    ) -> tuple[dict[str, State], "Watch", float]:
        """The states to go on with, what is known from now on, and by how much the rates change: if
        it is time to ask, and losses have become worse, it goes back and they are halved."""
        rounds = after(ASKED, planned)
        seen = int(self.since.rounds) + int(self.since.lost)
        if done % rounds or seen < max(rounds, LEAST):
            return now, self, 1.0
        if not self.got_worse():
            return now, self.moved(now), 1.0
        (old, _), undone, new = self._known(), float(self.undone), self.since.mean
        if math.isfinite(undone) and new > (old + undone) / 2:
            # At half the rates it is as bad, so they are not the reason.
            return now, self.moved(now), 2.0
        back = replace(self, since=Losses.none(), undone=jnp.float32(new))
        return self.safe, back, 0.5

    def _known(self) -> tuple[float, int]:
        """What losses are compared with, and of how many rounds that is."""
        some = int(self.before.rounds)
        return (self.before.mean, some) if some >= LEAST else (float(self.began), 1)

    def got_worse(self) -> bool:
        """Whether losses are above what they were by more than chance explains, and by more than
        nobody would notice. Where nothing was seen before, they are compared with the first one."""
        (old, some), new, began = self._known(), self.since.mean, float(self.began)
        more, pairs = int(self.since.rounds), int(self.pairs)
        if math.isinf(new):
            return True
        if more < LEAST or pairs < LEAST - 1 or not math.isfinite(old):
            return False
        # How far losses are from one to the next tells how much they differ by chance, also where
        # they fall: 2 / sqrt(pi) deviations, if they are normal. Neighbors overlap, so that it is
        # known about as well as by half as many that do not. Those of the last rounds do not count:
        # what falls apart does it by and by.
        deviation = math.sqrt(math.pi) / 2 * float(self.jumps) / pairs
        chance = by_chance(pairs / 2) * deviation * math.sqrt(1 / some + 1 / more)
        return new - old > max(chance, MATTERS * (began - old))


def rates_of(names: Iterable[str], branch: str) -> list[str]:
    """The learning rates among dotted names of a branch: one, or one for each layer."""
    parts = [name.split(".") for name in names]
    return [".".join(n) for n in parts if n[0] == branch and "learning_rate" in n]


def eased_by(names: Iterable[str]) -> list[str]:
    """The rates to lower where training got worse: the server's, or its clients' if that has
    none."""
    known = [*names]
    return rates_of(known, "server") or rates_of(known, "client")
