"""A chart on a page, as an SVG that stretches to the available width, with readable HTML labels.

A small script (page.js) shows the values under the pointer; the chart works without it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedgrad.show.drawing import Chart, Curve, Drawn, drawn, key, named, stroke
from fedgrad.show.markup import Html, element
from fedgrad.show.numbers import number, percent

WIDE, HIGH = 1000, 500  # units of the drawing, not pixels
MOST = 800  # per curve, more than a screen can resolve


def html(chart: Chart, class_: str = "") -> Html:
    """Return a figure with a heading, a legend, curves over axes, and remarks."""
    one = drawn(replace(chart, curves=[_thinned(curve) for curve in chart.curves]))
    names = named(one.curves)
    about = " · ".join(filter(None, (chart.y_name, chart.note)))
    plot = element(
        "div",
        [_tick(one.up.label(t), "bottom", one.up.place(t), "y") for t in one.up.ticks()],
        [_tick(one.across.label(t), "left", one.across.place(t), "x") for t in one.across.ticks(5)],
        element(
            "svg",
            one.paths(WIDE, HIGH),
            viewBox=f"0 0 {WIDE} {HIGH}",
            preserveAspectRatio="none",
            role="img",
            aria_label=f"{chart.heading} over {chart.x_name}: {', '.join(c.name for c in names)}",
        ),
        element("div", class_="cursor", hidden=True),
        element("div", class_="tip", role="status", hidden=True),
        class_="plot",
        tabindex=0,
        data_chart=json.dumps({"x": chart.x_name, "curves": _data(one)}),
    )
    return element(
        "figure",
        element("figcaption", chart.heading, element("small", about) if about else None),
        element("ul", [element("li", _key(c), c.name) for c in names], class_="legend")
        if len(names) > 1
        else None,
        plot,
        element("div", chart.x_name, class_="x-name"),
        [element("p", remark, class_="note") for remark in one.remarks],
        class_=f"chart {class_}".strip(),
    )


def _thinned(curve: Curve) -> Curve:
    """Subsample a curve to at most `MOST` evenly spaced points, including the last one."""
    if len(curve.x) <= MOST:
        return curve
    kept = np.unique(np.linspace(0, len(curve.x) - 1, MOST).round().astype(int))
    band = None if curve.band is None else tuple(np.asarray(edge)[kept] for edge in curve.band)
    x, y = (np.asarray(values)[kept] for values in (curve.x, curve.y))
    return replace(curve, x=x, y=y, band=band)


def _tick(label: str, side: str, place: float, kind: str) -> Html:
    return element("span", label, class_=f"tick-{kind}", style=f"{side}:{100 * place:.2f}%")


def _key(curve: Curve) -> Html:
    line = stroke(curve, key(curve))
    return element("svg", line, viewBox="0 0 26 10", class_="key", aria_hidden="true")


def _data(one: Drawn) -> list[dict[str, object]]:
    """Return what the script shows under the pointer: positions in the drawing, and labels."""
    across, up = one.across, one.up

    def kept(curve: Curve, what: Callable[[float, float], object]) -> list[object]:
        points = zip(map(float, curve.x), map(float, curve.y), strict=True)
        return [what(x, y) for x, y in sorted(points, key=lambda point: point[0])]

    words = percent if up.unit == "percent" else number
    return [
        {
            "name": c.name,
            "color": c.color,
            "at": kept(c, lambda x, y: round(across.place(x), 5)),
            "up": kept(c, lambda x, y: round(up.place(y), 4) if math.isfinite(y) else None),
            "x": kept(c, lambda x, y: across.label(x)),
            "y": kept(c, lambda x, y: words(y)),
        }
        for c in one.curves
        if c.told
    ]
