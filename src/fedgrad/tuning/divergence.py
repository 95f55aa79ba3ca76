"""A divergence monitor: rolls training back when the loss rises.

Rates that were good for a while need not stay good: rates that suit the current training examples
may be too large once there are more of them. Monitoring sends nothing extra: the training loss that
clients report in every round is enough, if several rounds are pooled.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from fedgrad.core.types import State
from fedgrad.tuning.cuts import after, by_chance

ASKED = 0.05  # the fraction of all rounds between two checks
LEAST = 3  # the least number of rounds for an estimate of chance
# The fraction of the progress that may be lost. Where losses hardly vary from round to round, a
# purely statistical test would react to negligible increases.
MATTERS = 0.1
# Losses are clipped at the first one plus this many times its size: a loss of 1e20 in a race would
# make all others look alike.
MOST = 10.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Losses:
    """Running statistics of the losses of consecutive rounds."""

    rounds: jax.Array
    lost: jax.Array  # further rounds that were undone or whose loss is not finite
    first: jax.Array
    last: jax.Array
    above: jax.Array  # the sum of differences from the first loss
    jumps: jax.Array  # the sum of absolute differences between consecutive losses

    @staticmethod
    def none() -> "Losses":
        """Return the statistics of no rounds."""
        return Losses(*(jnp.float32(0) for _ in range(6)))

    def plus(self, loss: jax.Array) -> "Losses":
        """Add a round."""
        known = jnp.isfinite(loss)
        first = jnp.where(self.rounds > 0, self.first, loss)
        jump = jnp.where(self.rounds > 0, jnp.abs(loss - self.last), 0)
        above, jumps = self.above + loss - first, self.jumps + jump
        seen = Losses(self.rounds + 1, self.lost, first, loss, above, jumps)
        lost = replace(self, lost=self.lost + 1)
        return jax.tree.map(lambda a, b: jnp.where(known, a, b), seen, lost)

    @property
    def mean(self) -> float:
        """The mean loss, or infinity if more rounds were lost than not."""
        rounds = int(self.rounds)
        if int(self.lost) > rounds:
            return math.inf
        return float(self.first) + float(self.above) / max(rounds, 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watch:
    """The state of the monitor: the states to roll back to, the losses before and since these
    states, and how much losses differ between consecutive rounds, over all rounds up to these
    states, whatever their trend."""

    safe: dict[str, State]  # empty while nothing is monitored
    began: jax.Array  # the very first loss
    before: Losses
    since: Losses
    jumps: jax.Array  # differences between consecutive losses, summed
    pairs: jax.Array  # the number of these differences
    undone: jax.Array  # the mean loss of the undone rounds, right after a rollback

    @staticmethod
    def begin(safe: dict[str, State]) -> "Watch":
        """Return the monitor before the first round."""
        zero, unknown = jnp.float32(0), jnp.float32(jnp.nan)
        return Watch(safe, unknown, Losses.none(), Losses.none(), zero, zero, unknown)

    def plus(self, loss: jax.Array | None, kept: jax.Array | bool = True) -> "Watch":
        """Add a round, if its loss is known; `kept` is false if the round was undone at once."""
        if loss is None:
            return self
        loss = jnp.asarray(loss, jnp.float32)
        began = jnp.where(jnp.isnan(self.began) & jnp.isfinite(loss), loss, self.began)
        most = jnp.where(jnp.abs(began) > 0, began + MOST * jnp.abs(began), jnp.inf)
        told = jnp.where(kept & jnp.isfinite(loss), jnp.minimum(loss, most), jnp.nan)
        return replace(self, began=began, since=self.since.plus(told))

    def moved(self, safe: dict[str, State]) -> "Watch":
        """Make these the states to roll back to from now on."""
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
        """Like `moved`, for training that continues on other examples: their losses cannot be
        compared with those before."""
        return replace(self.moved(safe), before=Losses.none())

    def asked(
        self, now: dict[str, State], done: int, planned: int
    ) -> tuple[dict[str, State], "Watch", float]:
        """Check for divergence, if a check is due.

        Returns the states to continue with, the new monitor, and the factor on the rates. If losses
        have risen, training rolls back and the rates are halved.
        """
        rounds = after(ASKED, planned)
        seen = int(self.since.rounds) + int(self.since.lost)
        if done % rounds or seen < max(rounds, LEAST):
            return now, self, 1.0
        if not self.got_worse():
            return now, self.moved(now), 1.0
        (old, _), undone, new = self._known(), float(self.undone), self.since.mean
        if math.isfinite(undone) and new > (old + undone) / 2:
            # It is as bad at half the rates, so the rates are not the cause.
            return now, self.moved(now), 2.0
        back = replace(self, since=Losses.none(), undone=jnp.float32(new))
        return self.safe, back, 0.5

    def _known(self) -> tuple[float, int]:
        """Return the reference loss and the number of rounds that it averages."""
        some = int(self.before.rounds)
        return (self.before.mean, some) if some >= LEAST else (float(self.began), 1)

    def got_worse(self) -> bool:
        """Return whether losses rose significantly (t-test) and by more than 10 % of the progress
        so far. Without earlier rounds, they are compared with the first loss."""
        (old, some), new, began = self._known(), self.since.mean, float(self.began)
        more, pairs = int(self.since.rounds), int(self.pairs)
        if math.isinf(new):
            return True
        if more < LEAST or pairs < LEAST - 1 or not math.isfinite(old):
            return False
        # Differences between consecutive losses measure the noise even while losses fall: their
        # mean is 2 / sqrt(pi) standard deviations for normal noise. Neighboring differences
        # overlap, so the estimate is about as good as one from half as many independent
        # differences. The latest rounds are excluded, because divergence is gradual.
        deviation = math.sqrt(math.pi) / 2 * float(self.jumps) / pairs
        chance = by_chance(pairs / 2) * deviation * math.sqrt(1 / some + 1 / more)
        return new - old > max(chance, MATTERS * (began - old))


def rates_of(names: Iterable[str], branch: str) -> list[str]:
    """Return the learning rates of a branch among dotted names: one, or one per layer."""
    parts = [name.split(".") for name in names]
    return [".".join(n) for n in parts if n[0] == branch and "learning_rate" in n]


def eased_by(names: Iterable[str]) -> list[str]:
    """Return the rates to lower after a rollback: the server's, or the clients' if it has none."""
    known = [*names]
    return rates_of(known, "server") or rates_of(known, "client")
