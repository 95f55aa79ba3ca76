"""The middle of a run's report: how training went, and what the hyperparameters did."""

import math
from collections.abc import Sequence

from fedgrad.report.charts import html
from fedgrad.report.page import table
from fedgrad.report.run import FIXED, LEARNED, Run
from fedgrad.report.words import measure, title
from fedgrad.show.charts import Chart, Curve
from fedgrad.show.markup import Content, Html, element
from fedgrad.show.numbers import percent

COLOURS = {LEARNED: "p0", FIXED: "p2"}
MILESTONES = 6
SMOOTHED = 20  # a curve that is noisy is averaged over this part of its rounds


def training(run: Run) -> list[Content]:
    """Everything that is measured: curves over rounds and over bytes, then numbers."""
    priced = all(run.sent(name) for name in run.curves)
    charts = []
    for key in run.measured:
        charts.append(_measured(run, key))
        if priced:
            charts.append(_measured(run, key, by_traffic=True))
    caveat = (
        "Both runs start from the same model and hyperparameters and see the same clients in the "
        "same order. It is one seed: run others before trusting a small difference."
    )
    return [
        _switch() if priced else None,
        element("div", charts, class_="charts"),
        _milestones(run),
        element("p", caveat, class_="note") if run.compared else None,
    ]


def hyperparameters(run: Run) -> list[Content]:
    """What was learned, round by round."""
    found = run.metrics()

    def values(name: str) -> Html:
        rounds, learned = found.hyper[name].rounds, found.hyper[name].values
        start = Curve("start", rounds[[0, -1]], learned[[0, 0]], "line", "dashed")
        return html(Chart(name, [Curve(LEARNED, rounds, learned), start], "round"))

    charts = [
        html(Chart(name, [Curve("hypergradient", slope.rounds, slope.values, "p3")], "round"))
        for name, slope in found.hypergradient.items()
    ]
    about = "The derivative of the loss by each hyperparameter, which its optimizer follows."
    return [
        element("div", [values(name) for name in run.learned], class_="charts"),
        element(
            "details",
            element("summary", "Hypergradients"),
            element("p", about, class_="note"),
            element("div", charts, class_="charts"),
        )
        if charts
        else None,
    ]


def _switch() -> list[Html]:
    """Two radio buttons; the style sheet shows the charts of the one that is chosen."""
    buttons = {"by-round": "rounds", "by-traffic": "bytes sent"}
    inputs = [
        element("input", type="radio", name="axis", id=key, class_="axis", checked=i == 0)
        for i, key in enumerate(buttons)
    ]
    labels = [element("label", words, for_=key) for key, words in buttons.items()]
    return [*inputs, element("div", "compare at equal", labels, class_="switch")]


def _measured(run: Run, key: str, by_traffic: bool = False) -> Html:
    lines, behind, window = [], [], 1
    for name, curves in run.curves.items():
        if key not in curves:
            continue
        scale = (run.sent(name, 1) or 0) if by_traffic else 1
        values = curves[key].values
        x, colour = scale * curves[key].rounds, COLOURS[name]
        window = 1 if key in run.evaluated else max(1, len(x) // SMOOTHED)
        lines.append(Curve(name, x, _smooth(values.tolist(), window), colour))
        if window > 1:
            behind.append(Curve(name, x, values, colour, "faint"))
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


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last values; not finite as soon as one of them is not."""
    parts = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) if all(map(math.isfinite, part)) else math.nan for part in parts]


def _milestones(run: Run) -> Html | None:
    """The curves as numbers, at a few rounds that all have."""
    shown = [
        (key, name, run.by_round(name, key))
        for key in run.measured
        for name in run.curves
        if key in run.curves[name]
    ]
    rounds = sorted(set.intersection(*(set(values) for _, _, values in shown)))
    if not rounds:
        return None
    if len(rounds) > MILESTONES:
        # Denser at the start, where more happens.
        places = [(i / (MILESTONES - 1)) ** 2 * (len(rounds) - 1) for i in range(MILESTONES)]
        rounds = [rounds[round(place)] for place in places]
    rows = [
        (f"{title(key)}, {name}", *(measure(key)(values[r]) for r in rounds))
        for key, name, values in shown
    ]
    return table(("after round", *(f"{r:,}" for r in rounds)), rows)
