"""Figures of the loss and the exponent over rounds, and a table of the loss."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import fedgrad as fg
from fedgrad_experiments.client_weighting.training import SCHEDULES
from fedgrad_experiments.results import Results, Table

# name of the curve: (label, color, stroke)
STYLES: dict[str, tuple[str, str, Any]] = {
    "from 1": ("q learned from 1", "p0", "line"),
    "from 0": ("q learned from 0", "p1", "line"),
    "fixed 1": ("q = 1, by examples", "p2", "dashed"),
    "fixed 0": ("q = 0, uniform", "p4", "dashed"),
}


def figures(results: Results) -> Mapping[str, fg.charts.Figure]:
    """Draw the loss and the exponent, each for the serial and the parallel schedule."""
    arrays, facts = results.arrays, results.facts
    loss = dict(zip(facts["curves"], arrays["loss"], strict=True))
    exponent = dict(zip(facts["learned"], arrays["exponent"], strict=True))
    each = np.arange(1, arrays["exponent"].shape[-1] + 1)
    return {
        "loss": _over_rounds("loss over all examples", arrays["rounds"], loss, STYLES),
        "exponent": _over_rounds("q", each, exponent, ("from 1", "from 0")),
    }


def tables(results: Results) -> list[Table]:
    """Tabulate the loss after a tenth, a quarter, half and all of the rounds."""
    rounds, loss = results.arrays["rounds"], results.arrays["loss"]
    last = int(rounds[-1])
    at = [int(np.abs(rounds - part * last).argmin()) for part in (0.1, 0.25, 0.5, 1)]
    rows = []
    for curve, of_seeds in zip(results.facts["curves"], loss, strict=True):
        cells = [f"{of_seeds[:, i].mean():.3f} ± {of_seeds[:, i].std():.3f}" for i in at]
        accuracy = results.arrays["accuracy"][results.facts["curves"].index(curve), :, -1]
        rows.append([_title(curve), *cells, f"{100 * accuracy.mean():.1f} %"])
    header = ["", *(f"round {rounds[i]}" for i in at), "test accuracy"]
    seeds = results.settings["seeds"]
    return [
        Table(
            f"Training loss over all examples of all clients, mean ± deviation of {seeds} seeds",
            header,
            rows,
        )
    ]


def _title(curve: str) -> str:
    schedule, _, rest = curve.partition(" ")
    return STYLES[curve][0] if curve in STYLES else f"{STYLES[rest][0]}, {schedule}"


def _over_rounds(
    y_name: str, rounds: np.ndarray, values: Mapping[str, np.ndarray], names: Iterable[str]
) -> fg.charts.Figure:
    """Draw one chart per schedule from curves by name (seeds x rounds)."""
    names = list(names)
    row = [
        fg.charts.Chart(
            schedule,
            [
                _curve(name, rounds, values[name if name in values else f"{schedule} {name}"])
                for name in names
            ],
            "round",
            y_name,
        )
        for schedule in SCHEDULES
    ]
    return fg.charts.Figure([fg.charts.alike(row)])


def _curve(name: str, rounds: np.ndarray, values: Any) -> fg.charts.Curve:
    """Draw the mean over seeds, with a band of one standard deviation to each side."""
    label, color, look = STYLES[name]
    mean, deviation = values.mean(0), values.std(0)
    return fg.charts.Curve(label, rounds, mean, color, look, (mean - deviation, mean + deviation))
