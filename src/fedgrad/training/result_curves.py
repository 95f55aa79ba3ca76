"""Summaries of a history: a line of text for each metric, and curves in a notebook."""

from collections.abc import Mapping

import numpy as np

from fedgrad.show.charts import Chart, Curve, Figure
from fedgrad.show.numbers import number
from fedgrad.show.pen import in_a_page
from fedgrad.show.terminal import columns as width
from fedgrad.training import per_client

# For each metric by name: (the rounds in which it was recorded, its values).
Columns = Mapping[str, tuple[np.ndarray, np.ndarray]]
CHARTS, TRIALS = 6, 5  # maximum numbers of charts, and of curves per chart


def changes(columns: Columns, most: int) -> list[str]:
    """Return a line for each metric with its first and last value, at most `most` lines."""
    names = _ordered(columns)
    shown = names if len(names) <= most else names[: most - 1]
    room = max(map(width, shown), default=0)
    lines = [f"{name:<{room}}  {_change(columns[name][1])}" for name in shown]
    return lines + [f"and {len(names) - len(shown)} more"] * (len(shown) < len(names))


def curves(columns: Columns) -> str:
    """Return curves over rounds as HTML, with as many charts per row as fit."""
    charts = [Figure([[_chart(n, *columns[n])]]).svg() for n in _ordered(columns)[:CHARTS]]
    return in_a_page(*charts)


def span(value: object) -> str:
    """Format a number; side-by-side trials as a range."""
    values = np.asarray(value, float).ravel()
    finite = values[np.isfinite(values)]
    if values.size == 1 or not finite.size:
        return number(values[0])
    return f"{number(finite.min())} to {number(finite.max())}"


def _ordered(columns: Columns) -> list[str]:
    """Order metrics by interest, and leave out diagnostics."""
    columns = {n: c for n, c in columns.items() if not per_client.is_for_a_histogram(n)}
    first = ("loss", "eval.", "hyper.")
    groups = [[n for n in columns if n == g or (g[-1] == "." and n.startswith(g))] for g in first]
    known = [name for group in groups for name in group]
    known.sort(key=lambda name: f".{per_client.PREFIX}." in name)  # many, so they come last
    behind = ("seconds", "gradient_loss", "hypergradient.", "race.")
    rest = [n for n in columns if n not in known and not n.startswith(behind)]
    quiet = [n for n in rest if n == "rejected" and not np.any(columns[n][1])]
    return [name for name in known + rest if columns[name][1].size and name not in quiet]


def _change(values: np.ndarray) -> str:
    start, end = span(values[0]), span(values[-1])
    return end if len(values) == 1 else f"{start} → {end}"


def _chart(name: str, rounds: np.ndarray, values: np.ndarray) -> Chart:
    trials = np.asarray(values, float).reshape(len(rounds), -1).T
    if len(trials) == 1:
        return Chart(name, [Curve("", rounds, trials[0])], "round")
    lines = [Curve(f"trial {i}", rounds, trial, f"p{i}") for i, trial in enumerate(trials[:TRIALS])]
    note = f"the first {TRIALS} of {len(trials)} trials" if len(trials) > TRIALS else ""
    return Chart(name, lines, "round", note=note)
