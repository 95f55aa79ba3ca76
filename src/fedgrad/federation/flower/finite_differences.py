"""Derivatives of a strategy's aggregation by finite differences. They work with any strategy:
copies of it aggregate the replies with a number perturbed up and down."""

import copy
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgrad.core.errors import ArgumentError
from fedgrad.federation.flower.derivatives import (
    Array,
    ArrayRecord,
    Arrays,
    Message,
    numpy,
    shifted,
)

# Perturbations of a coordinate, by the precision of the model. They minimize rounding error (a
# round changes about a hundredth of the model) plus truncation error (the third derivative).
NUDGES = {"float16": 1e-1, "float32": 2e-2, "float64": 1e-4}

Aggregate = Callable[[float], ArrayRecord | None]


@dataclass(frozen=True)
class Nudged:
    """A strategy and the replies that it is about to aggregate. Neither is modified."""

    strategy: Any
    round: int
    replies: Sequence[Message]

    def by_attribute(self, name: str, value: Callable[[float], float]) -> Aggregate:
        """Return the new model as a function of the perturbation of an attribute."""

        def aggregate(nudge: float) -> ArrayRecord | None:
            strategy = copied(self.strategy)
            setattr(strategy, name, value(nudge))
            return self._made(strategy, [shifted(reply) for reply in self.replies])

        return aggregate

    def by_tangents(self, tangents: Sequence[ArrayRecord | None], slope: float) -> Aggregate:
        """Return the new model as a function of the step of each reply along its own tangent."""

        def aggregate(nudge: float) -> ArrayRecord | None:
            pairs = zip(self.replies, tangents, strict=True)
            moved = [shifted(reply, tangent, nudge * slope) for reply, tangent in pairs]
            return self._made(copied(self.strategy), moved)

        return aggregate

    def _made(self, strategy: Any, replies: list[Message]) -> ArrayRecord | None:
        arrays: ArrayRecord | None = strategy.aggregate_train(self.round, replies)[0]
        return arrays


def derivative(aggregate: Aggregate, names: Sequence[str], precision: str) -> Arrays | None:
    """Return the central difference of the named arrays of a new model; None without a model. Only
    one copy of the strategy and two models are alive at a time."""
    nudge = NUDGES[precision]
    with _unseen():
        up = aggregate(nudge)
    with _unseen():
        down = aggregate(-nudge)
    if up is None or down is None:
        return None
    # In double precision, so that the difference is not rounded.
    ends = zip(numpy(up, names).items(), numpy(down, names).values(), strict=True)
    return {n: ((a.astype(float) - b) / (2 * nudge)).astype(a.dtype) for (n, a), b in ends}


def precision(replies: Sequence[Message]) -> str:
    """Return the coarsest dtype in the models that clients trained."""
    records = [r for m in replies if not m.has_error() for r in m.content.array_records.values()]
    kinds = {array.dtype for record in records for array in record.values()} & {*NUDGES}
    return max(kinds, key=NUDGES.__getitem__, default="float32")


def copied(strategy: Any) -> Any:
    """Return a copy of a strategy that shares no mutable state with it."""
    try:
        return copy.deepcopy(strategy, {id(array): array for array in _arrays(strategy)})
    except Exception as error:  # it may hold anything: a lock, a file, a connection
        raise ArgumentError.here(
            f"{type(strategy).__name__} cannot be copied ({type(error).__name__}: {error}), and "
            "SelfTuning runs copies of it to see what its hyperparameters do. Keep what cannot be "
            "copied elsewhere, or give the class a __deepcopy__ that shares it."
        ) from error


def _arrays(strategy: Any) -> Iterator[Array]:
    """Yield Flower's arrays in a strategy. They never change, and once sent cannot be copied."""
    left: list[Any] = [strategy]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if isinstance(one, Array):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            left += one.values() if isinstance(one, Mapping) else []
            left += one if isinstance(one, (list, tuple)) else []
            left += vars(one).values() if hasattr(one, "aggregate_train") else []


@contextmanager
def _unseen() -> Iterator[None]:
    """Isolate a trial aggregation: it draws the same random numbers each time, leaves the random
    state unchanged, and logs nothing, since the log is about the round itself."""
    log = logging.getLogger("flwr")
    kept = random.getstate(), np.random.get_state(), log.disabled
    log.disabled = True
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        log.disabled = kept[2]
