"""Held-out splits: examples of each client that are not trained on, to judge the model."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.examples import Examples, Part
from fedgrad.core.errors import ArgumentError, known_fields


@known_fields
@dataclass(frozen=True)
class HeldOut:
    """A rule that selects the held-out examples of a client.

    It holds out a `fraction` of them, in a random order that depends only on the `seed` and on
    their number. Everything that uses the same rule therefore refers to the same examples: an
    algorithm that trains without them (`fg.holding_out`), an evaluation, hypergradients or a race
    judged by them. The rule is applied where the examples are, so it works on nodes too. A client
    keeps at least one example to train on; a client with a single example holds nothing out.

    Example:

        held_out = fg.HeldOut(0.2)
        algorithm = fg.holding_out(fg.fed_avg(loss), held_out)
    """

    fraction: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.fraction, float) or not 0 < self.fraction < 1:
            raise ArgumentError.here(
                f"fg.HeldOut(fraction={self.fraction!r}): give a part between 0 and 1, such as 0.2."
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ArgumentError.here(f"fg.HeldOut(seed={self.seed!r}): give a whole number.")

    def split(self, examples: Examples) -> tuple[Examples, Examples]:
        """Return a client's training examples and its held-out ones. If the examples are already
        the training split of the same rule, the rest is returned as held out."""
        if (part := examples.part) is not None:
            if part.held or part.rule != self:
                raise ArgumentError.here(
                    f"These examples are already what {part.rule} has left. Hold out once, or by "
                    "the same rule."
                )
            return examples, self._held(examples, part.all, examples.count)
        count = examples.count
        left = count - self.number(count)
        train = replace(examples, count=left, part=self._part(count, jnp.zeros_like(count), False))
        return train, self._held(examples, count, left)

    def number(self, count: jax.Array) -> jax.Array:
        """Return how many of `count` examples are held out."""
        nearest = jnp.floor(count.astype(jnp.float32) * self.fraction + 0.5).astype(count.dtype)
        # A node may have no examples at all.
        return jnp.clip(nearest, 0, jnp.maximum(count - 1, 0))

    def require_some(self, what: str, clients: Any) -> None:
        """Refuse a population in which no client holds an example out, if that is known."""
        counts = clients.counts
        if counts is not None and not np.any(self.number(jnp.asarray(counts))):
            raise ArgumentError.here(
                f"{what}: none of the {len(counts)} clients holds out an example by {self}; they "
                f"have at most {int(np.max(counts))} each, so there is nothing to judge by. Hold "
                "out a larger fraction, or judge by other clients."
            )

    def _held(self, examples: Examples, count: jax.Array, first: jax.Array) -> Examples:
        # An upper bound on `number`, which rounds in float32.
        room = int(examples.capacity * self.fraction + 0.5) + 1 + examples.capacity // 2**21
        most = min(examples.capacity, room)
        part = self._part(count, first, True)
        return replace(examples, count=count - first, capacity=most, part=part)

    def _part(self, count: jax.Array, first: jax.Array, held: bool) -> Part:
        return Part(jax.random.key(self.seed), count, first, self, held)


A_FIFTH = HeldOut()


def require_rule(what: str, given: object) -> None:
    """Refuse anything but a held-out rule."""
    if not isinstance(given, HeldOut):
        raise ArgumentError.here(
            f"{what}: held_out={given!r} does not say which examples. Write "
            f"held_out=fg.HeldOut({given if isinstance(given, float) else 0.2})."
        )
