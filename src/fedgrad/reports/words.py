"""Display names of metrics, and the formatting of their values."""

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from fedgrad.algorithms.settings import NAMES
from fedgrad.show.numbers import number, percent

# By their names on the command line, which have no underscores.
ALGORITHMS = {name.replace("_", ""): title for name, title in NAMES.items()}
# The better direction by the last part of a name; other metrics are not ranked.
HIGHER, LOWER = ("accuracy", "recall", "precision", "f1", "auc"), ("loss", "error", "perplexity")


def algorithm(name: str) -> str:
    """Return the display name: `FedAvgM` for `fedavgm` and `fed_avgm`; others stay unchanged."""
    return ALGORITHMS.get(name.replace("_", ""), name)


def direction(key: str) -> int:
    """Return 1 if higher is better, -1 if lower is, 0 if unknown."""
    last = key.rpartition(".")[2]
    if last in HIGHER or last.endswith("accuracy"):
        return 1
    return -1 if last in LOWER or last.endswith("loss") else 0


def measure(key: str) -> Callable[[float | None], str]:
    """Return the formatter for a metric: percent for accuracies."""
    return percent if key.endswith("accuracy") else number


def change(key: str, new: float, old: float) -> str:
    """Describe a change: `28 % lower`, `2.1 points higher`, `the same`; "" if not comparable."""
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
    """Return the title of a metric: `Test loss` for `eval.test.loss`."""
    if key == "loss":
        return "Training loss"
    return " ".join(key.removeprefix("eval.").replace("_", " ").split(".")).capitalize()


def date(iso: str) -> str:
    """Format a date: `17 November 2026, 18:05`; "" if it is not a date."""
    try:
        found = datetime.fromisoformat(iso)
    except ValueError:
        return ""
    return f"{found.day} {found:%B %Y, %H:%M}"


def written() -> str:
    """Return a sentence with the current date, for pages whose run has none."""
    return f"Written on {date(datetime.now().isoformat())}."


def listed(names: Iterable[str]) -> str:
    """Join names: `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def said(value: Any) -> str:
    """Format a JSON value as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {said(v)}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(said, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"  # 0.1, even if it was a 32-bit float
    return "none" if value is None else str(value)
