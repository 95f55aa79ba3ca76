"""The distribution of metrics over clients, which shows who is worse off than the mean."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedgrad.reports.chart_html import html
from fedgrad.reports.curves_section import drawn, ordered
from fedgrad.reports.page import table
from fedgrad.reports.run_source import Run
from fedgrad.reports.series import Curves, Series, Spread, tenth_of
from fedgrad.reports.words import direction, measure, title
from fedgrad.show.axis import Axis, Unit, axis
from fedgrad.show.drawing import Chart, Curve
from fedgrad.show.markup import Content, Html, element
from fedgrad.show.numbers import percent
from fedgrad.training.per_client import PREFIX

BINS = 16  # at most
ABOUT = (
    "Each client counts alike here, however many examples it has. The worst tenth is the mean of "
    "the tenth of clients with the worst values."
)


def has_spread(run: Run) -> bool:
    """Return whether per-client metrics were evaluated."""
    return any(one.spreads for one in run.entries.values())


def clients(run: Run) -> list[Content]:
    """Return a histogram and a curve over rounds for each metric, and a table."""
    names = list(dict.fromkeys(name for one in run.entries.values() for name in one.spreads))
    charts = [chart for name in names for chart in (_histogram(run, name), _course(run, name))]
    return [
        element("p", ABOUT, class_="note"),
        element("div", charts, class_="charts"),
        _table(run, names),
    ]


def bins(values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the edges of equal bins of a round width that cover all finite values."""
    flat = np.concatenate([np.ravel(v) for v in values])
    flat = flat[np.isfinite(flat)]
    if not len(flat) or flat.min() == flat.max():
        middle = float(flat[0]) if len(flat) else 0.0
        half = abs(middle) / 20 or 0.05
        return np.array([middle - half, middle + half])
    low, high = float(flat.min()), float(flat.max())
    ticks = Axis(low, high).ticks(BINS)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return step * np.arange(first, max(last, first + 1) + 1)


def _name(spread: str) -> str:
    """Return the metric of a distribution: `eval.test.loss` for `eval.test.per_client.loss`."""
    return spread.replace(f".{PREFIX}.", ".")


def _unit(spread: str) -> Unit:
    return "percent" if measure(spread) is percent else ""


def _histogram(run: Run, name: str) -> Html:
    """Return a histogram: the first and the last evaluation of one run, or the last of several."""
    found = [(entry, run.entries[entry].spreads.get(name)) for entry in ordered(run)]
    there = [(entry, spread) for entry, spread in found if spread is not None][:3]
    shown = {entry: (spread.values[-1], "") for entry, spread in there}
    if len(there) == 1:
        ((_, spread),) = there
        ends = [_at(spread, i) for i in ((0, -1) if len(spread.rounds) > 1 else (-1,))]
        colors = ["line", "p0"][-len(ends) :]
        shown = {label: (v, c) for (label, v), c in zip(ends, colors, strict=True)}
    edges = bins([values for values, _ in shown.values()])
    middles = (edges[:-1] + edges[1:]) / 2
    curves = []
    for entry, (values, color) in shown.items():
        share = np.histogram(values, edges)[0] / len(values)
        curve = Curve(entry, middles, share, color, "bars")
        if not color:
            whole = drawn(run, entry, Series(middles, share))
            curve = replace(whole, look="bars", band=None)
        curves.append(curve)
    what = title(_name(name))
    highest = max(float(np.max(curve.y)) for curve in curves)
    chart = Chart(
        f"{what} of clients",
        curves[::-1] if len(there) == 1 else curves,
        what.lower(),
        note="percent of clients",
        y_unit="percent",
        x_axis=Axis(float(edges[0]), float(edges[-1]), unit=_unit(name)),
        y_axis=axis([0.0, highest], unit="percent"),
    )
    return html(chart)


def _at(spread: Spread, i: int) -> tuple[str, np.ndarray]:
    round = int(spread.rounds[i])
    return f"after round {round:,}" if round else "before training", spread.values[i]


def _course(run: Run, name: str) -> Html:
    """Return curves over rounds: for one run the median client, a band of 8 in 10 clients and the
    worst tenth; for several the worst tenth of each."""
    metric = name.rpartition(".")[2]
    there = [entry for entry in ordered(run) if name in run.entries[entry].spreads]
    if len(there) == 1:
        curves = _fan(run.entries[there[0]], name, metric)
        heading, note = f"{title(_name(name))} over rounds", "band: 8 of 10 clients"
        ends = [edge for curve in curves for edge in (curve.y, *(curve.band or ()))]
        up = axis(np.concatenate(ends), unit=_unit(name))
    else:
        tenths = {entry: _tenth(run.entries[entry], name, metric) for entry in there}
        curves = [drawn(run, entry, s) for entry, s in tenths.items() if s is not None]
        heading, note, up = f"{title(_name(name))}, worst tenth of clients", "", None
    return html(Chart(heading, curves, "round", note=note, y_unit=_unit(name), y_axis=up))


def _fan(one: Curves, name: str, metric: str) -> list[Curve]:
    spread = one.spreads[name]
    low, middle, high = np.nanpercentile(spread.values, [10, 50, 90], axis=1)
    curves = [Curve("median client", spread.rounds, middle, "p0", band=(low, high))]
    tenth = _tenth(one, name, metric)
    if tenth is not None:
        curves.append(Curve("worst tenth", tenth.rounds, tenth.values, "p2"))
    return curves


def _tenth(one: Curves, name: str, metric: str) -> Series | None:
    return tenth_of(one, name, direction(metric) > 0) if direction(metric) else None


def _table(run: Run, names: Sequence[str]) -> Html:
    rows = []
    for name, entry in itertools.product(names, ordered(run)):
        one = run.entries[entry]
        if name not in one.spreads:
            continue
        words = measure(name)
        kinds = ("mean", "lowest_tenth", "highest_tenth")
        mean, lowest, highest = (words(one.series[f"{name}.{k}"].values[-1]) for k in kinds)
        median = words(float(np.nanmedian(one.spreads[name].values[-1])))
        label = f"{title(_name(name))}, {entry}" if run.compared else title(_name(name))
        rows.append((label, mean, median, lowest, highest))
    columns = ("at the end", "mean", "median", "lowest tenth", "highest tenth")
    return table(columns, rows)
