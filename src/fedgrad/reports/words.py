"""Names of what is measured, and values of it, as people read them."""

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from fedgrad.algorithms.settings import NAMES
from fedgrad.show.numbers import number, percent

# By their names on the command line, which have no underscores.
ALGORITHMS = {name.replace("_", ""): title for name, title in NAMES.items()}
# Which way is better, by the last word of a name; others are not judged.
HIGHER, LOWER = ("accuracy", "recall", "precision", "f1", "auc"), ("loss", "error", "perplexity")


def algorithm(name: str) -> str:
    """`fedavgm` and `fed_avgm` are `FedAvgM`; a name that is not ours is what it is."""
    return ALGORITHMS.get(name.replace("_", ""), name)


def direction(key: str) -> int:
    """1 where higher is better, -1 where lower is, 0 where nobody knows."""
    last = key.rpartition(".")[2]
    if last in HIGHER or last.endswith("accuracy"):
        return 1
    return -1 if last in LOWER or last.endswith("loss") else 0


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


def date(iso: str) -> str:
    """`17 November 2026, 18:05`; nothing if it is not a date."""
    try:
        found = datetime.fromisoformat(iso)
    except ValueError:
        return ""
    return f"{found.day} {found:%B %Y, %H:%M}"


def written() -> str:
    """When a page is written, which is now: for what nobody has dated."""
    return f"Written on {date(datetime.now().isoformat())}."


def listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def said(value: Any) -> str:
    """A value of JSON in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {said(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(said, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"  # 0.1, also where it was a number of 32 bits
    return "none" if value is None else str(value)
