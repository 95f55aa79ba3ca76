"""The middle of a run's report: training curves and learned hyperparameters."""

from dataclasses import replace

import numpy as np

from fedgrad.reports.chart_html import html
from fedgrad.reports.page import table
from fedgrad.reports.run_source import FIXED, LEARNED, Run
from fedgrad.reports.series import Series
from fedgrad.reports.top_section import best_first
from fedgrad.reports.words import direction, measure, title
from fedgrad.show.drawing import Chart, Curve, Look
from fedgrad.show.markup import Content, Html, element
from fedgrad.show.numbers import duration, percent

COLORS = ("p0", "p2", "p1", "p3", "p4")
MILESTONES = 6
SMOOTHED = 20  # a noisy curve is averaged over 1/SMOOTHED of its rounds
MARKED = 40  # with more evaluations than this, single ones are not marked
CAVEATS = {
    "tuned": "Both runs start from the same model and hyperparameters and see the same clients in "
    "the same order. It is one seed: run others before trusting a small difference.",
    "seeds": "Lines are means over seeds; a band is from the lowest seed to the highest.",
    "trials": "All trials start from the same model and see the same clients in the same order.",
}


def training(run: Run) -> list[Content]:
    """Return curves of all measured metrics over rounds and over bytes, then a table."""
    priced = all(run.sent(name) for name in run.entries)
    charts = []
    for key in run.measured:
        charts.append(_measured(run, key))
        if priced:
            charts.append(_measured(run, key, by_traffic=True))
    many = run.compared and not run.tuned
    return [
        _switch() if priced else None,
        element("div", charts, class_="charts"),
        _ends(run) if many else _milestones(run),
        element("p", CAVEATS[_kind(run)], class_="note") if _kind(run) else None,
    ]


def hyperparameters(run: Run) -> list[Content]:
    """Return curves of the learned hyperparameters and of their hypergradients."""
    found = run.metrics()
    about = "The derivative of the loss by each hyperparameter, along which its optimizer moves it."
    charts = [
        html(Chart(name, [Curve("hypergradient", slope.rounds, slope.values, "p3")], "round"))
        for name, slope in found.hypergradient.items()
    ]
    return [
        element("div", [_values(run, name) for name in run.learned], class_="charts"),
        element(
            "details",
            element("summary", "Hypergradients"),
            element("p", about, class_="note"),
            element("div", charts, class_="charts"),
        )
        if charts and not (run.compared and not run.tuned)
        else None,
    ]


def ordered(run: Run) -> list[str]:
    """Return the entries in the order of their colors; the best trials come first."""
    names = list(run.entries)
    if not run.trials or not run.measured:
        return names
    _, values = run.ends(run.measured[0])
    first = best_first(run.measured[0], values) if direction(run.measured[0]) else []
    return [*first, *(name for name in names if name not in first)]


def drawn(run: Run, name: str, series: Series, label: str = "") -> Curve:
    """Return a curve in the color of its entry; those after the fifth are thin."""
    place = ordered(run).index(name)
    known = place < len(COLORS)
    look: Look = "line" if known else "thin"
    color = COLORS[place] if known else "line"
    if run.compared:  # a single run is always blue
        color = {LEARNED: "p0", FIXED: "p2"}.get(name, color)
    return Curve(label or name, series.rounds, series.values, color, look, series.band)


def _kind(run: Run) -> str:
    if run.tuned or run.trials:
        return "tuned" if run.tuned else "trials"
    return "seeds" if any(one.seeds > 1 for one in run.entries.values()) else ""


def _values(run: Run, name: str) -> Html:
    curves = []
    for entry in ordered(run):
        series = run.metrics(entry).hyper.get(name)
        if series is not None:
            curves.append(drawn(run, entry, series))
    if len(curves) == 1:
        rounds, learned = curves[0].x, curves[0].y
        ends = Curve("start", [rounds[0], rounds[-1]], [learned[0]] * 2, "line", "dashed")
        curves.append(ends)
    return html(Chart(name, curves, "round"))


def _switch() -> list[Html]:
    """Return two radio buttons; the style sheet shows the charts of the selected one."""
    buttons = {"by-round": "rounds", "by-traffic": "bytes sent"}
    inputs = [
        element("input", type="radio", name="axis", id=key, class_="axis", checked=i == 0)
        for i, key in enumerate(buttons)
    ]
    labels = [element("label", words, for_=key) for key, words in buttons.items()]
    return [*inputs, element("div", "compare at equal", labels, class_="switch")]


def _measured(run: Run, key: str, by_traffic: bool = False) -> Html:
    lines, behind, window = [], [], 1
    for name in ordered(run):
        if key not in run.curves[name]:
            continue
        scale = (run.sent(name, 1) or 0) if by_traffic else 1
        series = run.curves[name][key]
        curve = drawn(run, name, series)
        curve = replace(curve, x=scale * series.rounds)
        if key in run.evaluated:
            lines.append(replace(curve, marks=curve.told and len(series.rounds) <= MARKED))
            continue
        window = max(1, len(series.rounds) // SMOOTHED)
        lines.append(replace(curve, y=_smooth(series.values, window)))
        if window > 1 and curve.told and series.band is None:
            behind.append(replace(curve, look="faint"))
    during = "of clients while they train, weighted as in the round"
    note = "" if key in run.evaluated else during
    note += f", averaged over {window} rounds" if window > 1 else ""
    chart = Chart(
        title(key),
        [*lines, *behind],
        "sent" if by_traffic else "round",
        note=note,
        x_unit="bytes" if by_traffic else "",
        y_unit="percent" if measure(key) is percent else "",
    )
    return html(chart, "by-traffic" if by_traffic else "by-round")


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the trailing mean; it is NaN while a non-finite value is in the window."""
    values = np.where(np.isfinite(values), values, np.nan)
    begin = [values[:end].mean() for end in range(1, min(window, len(values) + 1))]
    whole = np.lib.stride_tricks.sliding_window_view(values, min(window, len(values)))
    return np.concatenate([begin, whole.mean(axis=1)])[: len(values)]


def _milestones(run: Run) -> Html | None:
    """Return a table of the curves at a few rounds that all of them have."""
    shown = [
        (key, name, run.by_round(name, key))
        for key in run.measured
        for name in run.entries
        if key in run.curves[name]
    ]
    # Round 0 has evaluations but no training metrics.
    rounds = sorted(set.intersection(*(set(values) | {0} for _, _, values in shown)))
    rounds = [r for r in rounds if r or any(0 in values for _, _, values in shown)]
    if not rounds:
        return None
    if len(rounds) > MILESTONES:
        # Choose more rounds at the start, where more happens.
        places = [(i / (MILESTONES - 1)) ** 2 * (len(rounds) - 1) for i in range(MILESTONES)]
        rounds = list(dict.fromkeys(rounds[round(place)] for place in places))
    rows = [
        (
            f"{title(key)}, {name}" if run.compared else title(key),
            *(measure(key)(values[r]) if r in values else "" for r in rounds),
        )
        for key, name, values in shown
    ]
    return table(("after round", *(f"{r:,}" for r in rounds)), rows)


def _ends(run: Run) -> Html:
    """Return a table of the final values of several runs, with their range over seeds."""
    seeds = any(one.seeds > 1 for one in run.entries.values())
    columns = ["", *(["seeds"] if seeds else []), "rounds", *map(title, run.measured), "time"]
    rows = []
    for name in ordered(run):
        one = run.entries[name]
        cells = [_end(key, one.series.get(key)) for key in run.measured]
        seconds = one.seconds
        time = "" if seconds is None or run.trials else duration(seconds)
        rows.append((name, *([one.seeds] if seeds else []), f"{one.last:,}", *cells, time))
    if run.trials or not any(row[-1] for row in rows):  # trials share their time
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return table(columns, rows)


def _end(key: str, series: Series | None) -> str:
    if series is None:
        return "–"
    words = measure(key)
    last = words(series.values[-1])
    if series.band is None:
        return last
    low, high = (words(edge[-1]) for edge in series.band)
    return f"{last} ({low} to {high})"
