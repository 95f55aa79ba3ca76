"""The loss and the exponent over rounds, and a table of the loss."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedgrad.experiments.client_weighting.training import SCHEDULES
from fedgrad.experiments.drawing import Drawing, Ink, band, legend, panels
from fedgrad.experiments.results import Results
from fedgrad.experiments.tables import Table

# name of the curve: (what it is called, its colour, its stroke)
STYLES = {
    "fixed 1": ("q = 1, by examples", 2, "--"),
    "fixed 0": ("q = 0, uniform", 4, "--"),
    "from 1": ("q learned from 1", 0, "-"),
    "from 0": ("q learned from 0", 1, "-"),
}


def figures(results: Results) -> Mapping[str, Drawing]:
    """The loss and the exponent, each serial and parallel."""
    return {
        "loss": lambda ink: _loss(results, ink),
        "exponent": lambda ink: _exponent(results, ink),
    }


def tables(results: Results) -> list[Table]:
    """The loss at a tenth, a quarter, a half and all of the rounds."""
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


def _loss(results: Results, ink: Ink) -> Any:
    figure, axes = panels(ink, 1, len(SCHEDULES), sharey=True)
    curves, rounds = results.facts["curves"], results.arrays["rounds"]
    for one, schedule in zip(axes[0], SCHEDULES, strict=True):
        for name in STYLES:
            curve = name if name in curves else f"{schedule} {name}"
            _plot(one, rounds, results.arrays["loss"][curves.index(curve)], STYLES[name], ink)
        one.set(title=schedule, xlabel="round", xlim=(0, rounds[-1]))
    axes[0, 0].set_ylabel("loss over all examples")
    legend(axes[0, -1], ink)
    return figure


def _exponent(results: Results, ink: Ink) -> Any:
    figure, axes = panels(ink, 1, len(SCHEDULES), sharey=True)
    learned, exponent = results.facts["learned"], results.arrays["exponent"]
    rounds = np.arange(1, exponent.shape[-1] + 1)
    for one, schedule in zip(axes[0], SCHEDULES, strict=True):
        for name in ("from 1", "from 0"):
            values = exponent[learned.index(f"{schedule} {name}")]
            _plot(one, rounds, values, STYLES[name], ink)
        one.set(title=schedule, xlabel="round", xlim=(0, rounds[-1]))
    axes[0, 0].set_ylabel("q")
    legend(axes[0, -1], ink)
    return figure


def _plot(
    axes: Any, x: np.ndarray, values: np.ndarray, style: tuple[str, int, str], ink: Ink
) -> None:
    """The mean over seeds (the first axis), and a band of one standard deviation to each side."""
    label, number, stroke = style
    colour = ink.curves[number]
    mean, deviation = values.mean(0), values.std(0)
    band(axes, x, mean - deviation, mean + deviation, colour)
    axes.plot(x, mean, stroke, color=colour, linewidth=1.6, label=label)
