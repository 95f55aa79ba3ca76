"""Learned numbers: their values, their coordinates, and the optimizer that moves them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import optax

from fedgrad.core.primitives import promoting
from fedgrad.federation.flower.coordinates import Bounds, Coordinate
from fedgrad.federation.flower.learn_arguments import starting


@dataclass(frozen=True)
class Learned:
    """Learned numbers by name. The clients' ones are added when the first round begins."""

    optimizer: optax.GradientTransformation
    values: Mapping[str, float] = field(default_factory=dict)
    coordinates: Mapping[str, Coordinate] = field(default_factory=dict)
    state: Any = None  # of the optimizer

    def begin(self, name: str, value: object, bounds: Bounds | None, where: str) -> "Learned":
        """Return a copy with one more number; refuse a number that could not move."""
        number, coordinate = starting(name, value, bounds, where)
        values = {**self.values, name: number}
        start = self.optimizer.init(dict.fromkeys(values, np.float32(0)))
        return replace(
            self, values=values, coordinates={**self.coordinates, name: coordinate}, state=start
        )

    def nudged(self, name: str, by: float) -> float:
        """Return a number with its coordinate increased by `by`."""
        coordinate = self.coordinates[name]
        return coordinate.value(coordinate.raw(self.values[name]) + by)

    def stepped(self, gradient: Mapping[str, float]) -> "Learned":
        """Return a copy after an optimizer step; numbers without a derivative yet do not move."""
        whole = {name: np.float32(gradient.get(name, 0.0)) for name in self.values}
        with promoting():
            steps, state = self.optimizer.update(whole, self.state)
        values = {
            name: self.coordinates[name].moved(value, float(steps[name]) * (name in gradient))
            for name, value in self.values.items()
        }
        return replace(self, values=values, state=state)

    def halved(self) -> "Learned":
        """Return a copy with all numbers halved, clipped to their bounds."""
        halves = {n: self.coordinates[n].inside(value / 2) for n, value in self.values.items()}
        return replace(self, values=halves)
