"""Excludes clients that do not count from derivatives.

`fg.mean` leaves out a client of weight 0. In the backward pass, though, a zero cotangent would meet
whatever the client computed from bad data, and zero times infinity is not zero. So the values that
a client computes from (those it was sent and its own) are marked as *sources*: if the client does
not count, a cotangent that arrives there and is not finite is replaced by zero.

The law: a value is marked only if everything that it is summed into is a weighted mean, and the
client counts if it counts in one of them; so a NaN of a client that counts is never hidden. Not
covered: work done before a loop or branch for a mean inside of it, or carried around a loop;
weights that depend on other sums; rows of a vmap with weights of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.primitives import JaxprEqn, broadcast_p, communicates, counted_p, source_p, sum_p


class Key:
    """A placeholder for a value before it is computed."""

    def __init__(self, aval: Any) -> None:
        self.aval = aval


@dataclass(frozen=True, eq=False)
class Line:
    """One equation; its inputs are keys or known values."""

    eqn: JaxprEqn
    inputs: list[Any]
    outputs: list[Key]

    @property
    def speaks(self) -> bool:
        """Whether it communicates."""
        return self.eqn.primitive in (broadcast_p, sum_p) or communicates(self.eqn.params)


def masks(
    lines: Sequence[Line], inputs: Sequence[Key], lasting: Sequence[Any]
) -> dict[Key, list[Key]]:
    """Map each value to be marked to the masks of the means that it goes into. `lasting` are values
    that are used further, for unknown purposes."""
    into: dict[Key, set[Key] | None] = {}  # None: it goes into something in which everybody counts

    def add(value: Any, more: set[Key] | None) -> None:
        if isinstance(value, Key) and jnp.issubdtype(value.aval.dtype, jnp.inexact):
            before = into.get(value, set())
            into[value] = None if before is None or more is None else before | more

    for value in lasting:
        add(value, None)
    for line in reversed(lines):
        if line.eqn.primitive in (counted_p, source_p):
            value, counts = line.inputs
            add(value, {counts} if isinstance(counts, Key) else None)
        elif line.eqn.primitive is not broadcast_p:  # what is sent is the server's
            for part in [None] if line.speaks else [into[y] for y in line.outputs if y in into]:
                for value in line.inputs:
                    add(value, part)
    sources = [*inputs, *(y for line in lines if line.speaks for y in line.outputs)]
    found = {source: list(means) for source in sources if (means := into.get(source))}
    late = _late(lines)  # computing their masks first would request sums twice
    return {s: means for s, means in found.items() if not late.intersection(means)}


def _late(lines: Sequence[Line]) -> set[Any]:
    """Return the values that depend on sums."""
    found: set[Any] = set()
    for line in lines:
        asks = line.speaks and line.eqn.primitive is not broadcast_p
        if asks or any(isinstance(x, Key) and x in found for x in line.inputs):
            found.update(line.outputs)
    return found


def upstream(lines: Sequence[Line], wanted: Sequence[Key]) -> list[Line]:
    """Return the lines that these values are computed by."""
    found, needed = [], set(wanted)
    for line in reversed(lines):
        if not needed.isdisjoint(line.outputs):
            found.append(line)
            needed.update(x for x in line.inputs if isinstance(x, Key))
    return found[::-1]


def marked(x: Any, counts: Sequence[Any]) -> Any:
    """Mark a value as a source, for clients that count in none of these means."""
    mask = jnp.any(jnp.stack([jnp.any(c) for c in counts]))
    return source_p.bind(x, mask) if isinstance(x, jax.core.Tracer) else x
