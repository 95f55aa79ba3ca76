"""How a learned number moves: by factors, or between two bounds, which no step can leave."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedgrad.core.errors import ArgumentError

Bounds = tuple[float, float]

# By what a name contains: these lie between 0 and a bound below 1. All others are rates.
FRACTIONS = {"momentum": 0.999, "beta_2": 0.9999, "beta": 0.999}
REACH = 1e4  # how many times smaller or larger than at the start a rate becomes, at most
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


def asked(names: str | Iterable[str] | Mapping[str, Bounds], side: str) -> dict[str, Bounds | None]:
    """What is to be learned, with the bounds that were given."""
    if isinstance(names, str):
        raise ArgumentError.here(f"{side}={names!r}: give a tuple of names, ({names!r},).")
    if not isinstance(names, Mapping):
        return dict.fromkeys(names)
    for name, bounds in names.items():
        if not (isinstance(bounds, tuple) and len(bounds) == 2 and 0 <= bounds[0] < bounds[1]):
            raise ArgumentError.here(
                f"{side}={{{name!r}: {bounds!r}}}: give bounds (low, high) with 0 <= low < high, "
                "such as (1e-4, 1.0) for a rate and (0.0, 0.99) for a fraction."
            )
    return {name: (float(low), float(high)) for name, (low, high) in names.items()}


def starting(
    name: str, value: object, bounds: Bounds | None, where: str
) -> tuple[float, Coordinate]:
    """The number that is learned, and its coordinate; refused where it could not move from."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ArgumentError.here(f"{where} is {value!r}, which is no number that can be learned.")
    value = float(value)
    high = next((high for part, high in FRACTIONS.items() if part in name), None)
    if value <= 0.0:
        example = 0.1 if bounds is None else math.sqrt(max(bounds[0], 1e-2 * bounds[1]) * bounds[1])
        raise ArgumentError.here(
            f"{where} is {value:g}, from where it would never move: its derivative there is zero, "
            f"or a step would not be a factor. Start above 0, with {name}={example:g}."
        )
    if bounds is None:
        bounds = (value / REACH, value * REACH) if high is None else (0.0, high)
    if not bounds[0] < value < bounds[1]:
        raise ArgumentError.here(
            f"{where} is {value:g}, which is not inside of its bounds {bounds}. Start between "
            f"them, or give others by the name: {{{name!r}: (low, high)}}."
        )
    return value, Coordinate(*bounds)
