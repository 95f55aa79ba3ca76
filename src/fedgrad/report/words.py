"""Names of what is measured, and values of it, as people read them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from fedgrad.show.numbers import number, percent


def measure(key: str) -> Callable[[float | None], str]:
    """How values of this name are written: an accuracy in percent."""
    return percent if key.endswith("accuracy") else number


def change(key: str, new: float, old: float) -> str:
    """`28 % lower`, `2.1 points higher`, `the same`; nothing if they cannot be compared."""
    if not (math.isfinite(new) and math.isfinite(old)):
        return ""
    if measure(key) is percent:
        size, unit = 100 * (new - old), "points"
    elif old:
        size, unit = 100 * (new - old) / abs(old), "%"
    else:
        return ""
    if abs(size) < 0.05:
        return "the same"
    digits = 0 if abs(size) >= 10 else 1
    return f"{abs(size):,.{digits}f} {unit} {'higher' if size > 0 else 'lower'}"


def title(key: str) -> str:
    """What a series of a history is called: `eval.test.loss` is `Test loss`."""
    if key == "loss":
        return "Training loss"
    return " ".join(key.removeprefix("eval.").replace("_", " ").split(".")).capitalize()


def said(value: Any) -> str:
    """A value of JSON in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {said(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(said, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
