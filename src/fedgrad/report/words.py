"""Numbers and names as people read them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from fedgrad.show.layout import Size


def number(value: float | None) -> str:
    """Three or four digits that matter: 0.8312, 12.4, 3,120, 1.2e-7."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size and (size < 1e-4 or size >= 1e7):
        leading, _, power = f"{value:.2e}".partition("e")
        return f"{leading}e{int(power)}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    digits = 4 if size < 1 else 3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0
    return f"{value:,.{digits}f}"


def short(value: float) -> str:
    """The same without zeros at the end: 0.9."""
    words = number(value)
    return words.rstrip("0").rstrip(".") if "." in words and "e" not in words else words


def memory(count: float) -> str:
    """`2.4 kB`."""
    return Size(0, round(count)).memory


def percent(part: float | None) -> str:
    """`69.1 %`."""
    return number(part) if part is None or not math.isfinite(part) else f"{100 * part:.1f} %"


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
