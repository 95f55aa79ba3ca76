"""Chart axes: the positions of ticks and of values."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fedgrad.show.numbers import memory, tick

Unit = Literal["", "bytes", "percent"]


@dataclass(frozen=True)
class Axis:
    """A range of values on a linear or a logarithmic scale."""

    low: float
    high: float
    logarithmic: bool = False
    unit: Unit = ""

    def place(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        places = [float(value), self.low, self.high]
        if self.logarithmic:
            places = [math.log(max(place, 1e-300)) for place in places]
        value, low, high = places
        return (value - low) / (high - low)

    def ticks(self, most: int = 6) -> list[float]:
        """Return at most `most` round numbers within the range."""
        if self.logarithmic:
            return _decades(self.low, self.high, most)
        power = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        for step in (factor * power for factor in (1, 2, 2.5, 5, 10, 20, 25, 50)):
            first = math.ceil(self.low / step - 1e-9)
            last = math.floor(self.high / step + 1e-9)
            if last - first < most:
                break
        return [i * step for i in range(first, last + 1)]

    def label(self, value: float) -> str:
        """Format a tick with no more digits than it needs."""
        if self.unit == "bytes":
            return memory(value).replace(".0 ", " ")
        if self.unit == "percent":
            return f"{100 * value:.6g} %"
        return tick(value)


def axis(
    values: Iterable[float], zero: bool = False, unit: Unit = "", logarithmic: bool | None = None
) -> Axis:
    """Return an axis that fits these values with a small margin. By default the scale is
    logarithmic if the values are positive, not percentages, and span more than a factor of 30."""
    found = [float(v) for v in values if math.isfinite(v)]
    low, high = min(found, default=0.0), max(found, default=1.0)
    if zero:
        return Axis(min(low, 0.0), high if high > low else low + 1, unit=unit)
    if logarithmic is None:
        logarithmic = low > 0 and high / low > 30 and unit != "percent"
    if low > 0 and logarithmic:
        return Axis(low / 1.15, high * 1.15, logarithmic=True, unit=unit)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    # If no value is negative, the margin does not extend below zero.
    return Axis(max(low - room, 0.0) if low >= 0 else low - room, high + room, unit=unit)


def _decades(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors, stride in (((1, 2, 5), 1), ((1, 3), 1), *(((1,), n) for n in range(1, 100))):
        powers = range(first - first % stride, last + 1, stride)
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) <= most:
            return found
    return []
