"""Figures of the loss, the exponent and the differences between seeds, and tables."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

import fedgrad as fg
from fedgrad_experiments.client_weighting.on_task.outcome import (
    JUDGED,
    MEASURES,
    SCALE,
    Pair,
    compared,
    diverged,
    ended,
)
from fedgrad_experiments.client_weighting.shown import STYLES
from fedgrad_experiments.paired import LEVEL, POWER, Compared
from fedgrad_experiments.results import Results, Table

TITLES = {curve: label for curve, (label, _, _) in STYLES.items()}
SHORT = {"from 1": "from 1", "from 0": "from 0", "fixed 1": "q = 1", "fixed 0": "q = 0"}


@dataclass(frozen=True)
class Unit:
    """Formats values of a measure: fractions as percentages, their differences in points."""

    name: str  # of a difference
    percent: bool

    @staticmethod
    def of(results: Results, measure: str = "metric") -> "Unit":
        """Return the unit of the task's metric, or of its training loss."""
        if measure == "loss":
            return Unit("training loss", False)
        values = results.arrays["metric"]
        name = results.facts["metric"].replace("_", " ")
        share = name != "loss" and np.nanmin(values) >= 0 and np.nanmax(values) <= 1
        return Unit(f"points of {name}" if share else name, bool(share))

    def value(self, value: float) -> str:
        """Format a value: `71.25 %`."""
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4f}"

    def size(self, value: float) -> str:
        """Format the size of a difference: `0.25`."""
        return f"{100 * value:.2f}" if self.percent else f"{value:.4f}"

    def signed(self, value: float) -> str:
        """Format a difference: `+0.25`."""
        return f"{100 * value:+.2f}" if self.percent else f"{value:+.4f}"


def versus(pair: Pair) -> str:
    """Name a comparison: `learned from 1 − q = 1`."""
    first, second = (SHORT[curve] for curve in pair)
    return f"{'learned ' * (pair != SCALE)}{first} − {second}"


def figures(results: Results) -> Mapping[str, fg.charts.Figure]:
    """Draw the loss and the exponent over rounds, and the difference of every seed for each
    pair."""
    arrays, facts = results.arrays, results.facts
    each = np.arange(1, arrays["exponent"].shape[-1] + 1)
    loss = zip(facts["curves"], arrays["loss"], strict=True)
    exponent = zip(facts["learned"], arrays["exponent"], strict=True)
    over_rounds = [
        _over_rounds("training loss", arrays["rounds"], loss),
        _over_rounds("q", each, exponent),
    ]
    return {
        "loss-and-exponent": fg.charts.Figure([over_rounds]),
        "differences": fg.charts.Figure([_differences(results)]),
    }


def tables(results: Results) -> list[Table]:
    """Return a table of the final results, and one of the comparisons for each measure."""
    return [_ended(results), *(_compared(results, measure) for measure in MEASURES)]


def _ended(results: Results) -> Table:
    unit = Unit.of(results)
    rows = []
    for curve in results.facts["curves"]:
        values, loss = (ended(results, measure, curve) for measure in MEASURES)
        q = curve.removeprefix("fixed ")
        if curve in results.facts["learned"]:
            last = results.arrays["exponent"][results.facts["learned"].index(curve), :, -1]
            q = f"{last.mean():.2f} ({last.min():.2f} to {last.max():.2f})"
        rows.append(
            [
                TITLES[curve],
                f"{unit.value(np.nanmean(values))} ± {unit.size(np.nanstd(values))}",
                f"{np.nanmean(loss):.4f} ± {np.nanstd(loss):.4f}",
                q,
                f"{diverged(results, curve).sum()} of {len(values)}",
            ]
        )
    facts, settings = results.facts, results.settings
    title = (
        f"{facts['task']} after {settings['rounds']} rounds, mean ± deviation of "
        f"{settings['seeds']} seeds. {facts['about']}"
    ).strip()
    name = facts["metric"].replace("_", " ")
    return Table(title, ["", f"test {name}", "training loss", "last q", "diverged"], rows)


def _compared(results: Results, measure: str) -> Table:
    unit = Unit.of(results, measure)
    rows = []
    for pair, its in compared(results, measure).items():
        low, high = its.interval
        rows.append(
            [
                versus(pair),
                unit.signed(its.mean),
                f"{unit.signed(low)} to {unit.signed(high)}",
                f"{np.sum(its.differences > 0)} of {len(its.differences)}",
                f"{its.p:.3f}",
                f"{its.corrected:.3f}" if pair != SCALE else "",
                unit.size(its.detectable),
            ]
        )
    title = (
        f"Differences in {unit.name}: their mean and its 95 % interval, in how many seeds it is "
        f"higher, p of no difference, p corrected for {len(JUDGED)} comparisons, and the "
        f"difference that would be found at the {100 * LEVEL:.0f} % level {100 * POWER:.0f} times "
        "in 100"
    )
    header = ["", "mean", "95 % interval", "higher in", "p", "corrected", "detectable"]
    return Table(title, header, rows)


def _over_rounds(
    name: str, rounds: np.ndarray, curves: Iterable[tuple[str, np.ndarray]]
) -> fg.charts.Chart:
    """Draw means over seeds, with bands of one standard deviation to each side."""
    by_name = dict(curves)
    shown = []
    for curve in [c for c in STYLES if c in by_name]:
        label, color, look = STYLES[curve]
        mean, deviation = by_name[curve].mean(0), by_name[curve].std(0)
        band = (mean - deviation, mean + deviation)
        shown.append(fg.charts.Curve(label, rounds, mean, color, look, band))
    return fg.charts.Chart(name, shown, "round")


def _differences(results: Results) -> list[fg.charts.Chart]:
    unit = Unit.of(results)
    scale = 100 if unit.percent else 1

    def chart(pair: Pair, its: Compared) -> fg.charts.Chart:
        n = len(its.differences)
        ends = np.array([0.0, n + 1])
        low, high = (np.full(2, scale * end) for end in its.interval)
        seeds = np.arange(1, n + 1)
        return fg.charts.Chart(
            versus(pair),
            [
                fg.charts.Curve("seed", seeds, scale * its.differences, "p0", "dots"),
                fg.charts.Curve(
                    "mean, with its 95 % interval",
                    ends,
                    np.full(2, scale * its.mean),
                    "p1",
                    "line",
                    (low, high),
                ),
                fg.charts.Curve("no difference", ends, np.zeros(2), "line", "dashed"),
            ],
            "seed",
            f"difference, {unit.name}",
            x_axis=fg.charts.Axis(0, n + 1),
        )

    return fg.charts.alike(chart(*one) for one in compared(results, "metric").items())
