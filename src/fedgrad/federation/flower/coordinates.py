"""How a learned number moves: by factors, or between two bounds, which no step can leave."""

import math
from dataclasses import dataclass

Bounds = tuple[float, float]

FAR = 50.0  # a step of a coordinate that is as good as any longer one, and has an exponential
EDGE = 1e-6  # how near to its bounds, as a part of the range, a fraction comes


@dataclass(frozen=True)
class Coordinate:
    """A number as it is learned: its logarithm, or between 0 and a bound the logit of its part."""

    low: float
    high: float

    @property
    def fraction(self) -> bool:
        """Whether it is a part of its range; a rate has a lowest value above 0."""
        return self.low == 0.0

    def inside(self, value: float) -> float:
        """The nearest value inside of the bounds."""
        edge = EDGE * self.high if self.fraction else 0.0
        return min(max(value, self.low + edge), self.high - edge)

    def raw(self, value: float) -> float:
        """The coordinate of a value inside of the bounds."""
        return math.log(value / (self.high - value)) if self.fraction else math.log(value)

    def value(self, raw: float) -> float:
        """The value at a coordinate."""
        return self.high / (1 + math.exp(-raw)) if self.fraction else math.exp(raw)

    def slope(self, value: float) -> float:
        """The derivative of the value by its coordinate."""
        return value * (1 - value / self.high) if self.fraction else value

    def moved(self, value: float, step: float) -> float:
        """The value after a step of its coordinate, inside of the bounds."""
        if not step:
            return value  # to the last bit
        return self.inside(self.value(self.raw(value) + max(min(step, FAR), -FAR)))
