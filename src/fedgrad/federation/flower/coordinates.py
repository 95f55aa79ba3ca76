"""Coordinates of learned numbers, which move by factors, or between bounds they cannot leave."""

import math
from dataclasses import dataclass

Bounds = tuple[float, float]

FAR = 50.0  # the longest step of a coordinate: a longer one adds nothing, and exp could overflow
EDGE = 1e-6  # the closest a fraction comes to its bounds, relative to the range


@dataclass(frozen=True)
class Coordinate:
    """The coordinate of a learned number: its logarithm, or the logit of its part of [0, high]."""

    low: float
    high: float

    @property
    def fraction(self) -> bool:
        """Whether the number is a part of its range; a rate has a lowest value above 0."""
        return self.low == 0.0

    def inside(self, value: float) -> float:
        """Clip a value to the bounds."""
        edge = EDGE * self.high if self.fraction else 0.0
        return min(max(value, self.low + edge), self.high - edge)

    def raw(self, value: float) -> float:
        """Return the coordinate of a value inside the bounds."""
        return math.log(value / (self.high - value)) if self.fraction else math.log(value)

    def value(self, raw: float) -> float:
        """Return the value at a coordinate."""
        return self.high / (1 + math.exp(-raw)) if self.fraction else math.exp(raw)

    def slope(self, value: float) -> float:
        """Return the derivative of the value with respect to its coordinate."""
        return value * (1 - value / self.high) if self.fraction else value

    def moved(self, value: float, step: float) -> float:
        """Return the value after a step of its coordinate, clipped to the bounds."""
        if not step:
            return value  # exactly: no rounding
        return self.inside(self.value(self.raw(value) + max(min(step, FAR), -FAR)))
