"""Validation of the numbers to learn: one that cannot be learned fails before the first round."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedgrad.core.errors import ArgumentError
from fedgrad.federation.flower.coordinates import Bounds, Coordinate

# By substring of the name: these lie between 0 and a bound below 1. All others are rates.
FRACTIONS = {"momentum": 0.999, "beta_2": 0.9999, "beta": 0.999}
REACH = 1e4  # a rate changes by at most this factor from its start


def asked(names: str | Iterable[str] | Mapping[str, Bounds], side: str) -> dict[str, Bounds | None]:
    """Return the names to learn, with the bounds that were given."""
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
    """Return the initial value and its coordinate; refuse a value that could not move."""
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


def attribute(strategy: Any, name: str) -> object:
    """Return an attribute of a strategy."""
    if not hasattr(strategy, name):
        known = [n for n, value in vars(strategy).items() if type(value) is float]
        raise ArgumentError.here(
            f"{type(strategy).__name__} has no attribute {name!r}.", name, known
        )
    return getattr(strategy, name)


def setting(config: Mapping[str, object], name: str) -> object:
    """Return a setting from the config of the first round."""
    if name not in config:
        raise ArgumentError.here(
            f"train_config has no {name!r}, which clients are to learn. Give its first value: "
            f"start(..., train_config=ConfigRecord({{{name!r}: 0.1}})).",
            name,
            config,
        )
    return config[name]
