"""A chart as data, and its curves drawn on axes: shared by reports (HTML) and figures (SVG)."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedgrad.show.axis import Axis, Unit, axis
from fedgrad.show.markup import Html, element
from fedgrad.show.numbers import number

Numbers = Sequence[float] | np.ndarray
Look = Literal["line", "dashed", "dots", "bars", "thin", "broad", "faint"]
LOOKS: dict[Look, dict[str, Any]] = {
    "line": {"stroke_width": 2},
    "dashed": {"stroke_width": 2, "stroke_dasharray": "5 4", "stroke_linecap": "butt"},
    "dots": {"stroke_width": 7, "opacity": 0.6},
    "bars": {"stroke_width": 0},
    # In the background; the pointer does not show their values.
    "thin": {"stroke_width": 1.2, "opacity": 0.8},
    "broad": {"stroke_width": 10, "opacity": 0.3},
    "faint": {"stroke_width": 1, "opacity": 0.28},
}
ENDS = {"stroke_linecap": "round", "stroke_linejoin": "round", "fill": "none"}
MARK = {**ENDS, "stroke_width": 6}
BARS = 0.5  # opacity, so that curves behind the bars stay visible
FAR = 8.0  # curves that leave the range of the first curve by this factor are cut off


@dataclass(frozen=True)
class Curve:
    """Values over x. Values that are not finite are left out. `band` is the low and the high end of
    a range around the values, `color` is one of p0 to p4 or line, and `marks` draws a dot at each
    value. Bars stand side by side and reach from 0 to the value."""

    name: str
    x: Numbers
    y: Numbers
    color: str = "p0"
    look: Look = "line"
    band: tuple[Numbers, Numbers] | None = None
    marks: bool = False

    @property
    def told(self) -> bool:
        """Whether the pointer shows the curve's values, and they determine the range of the y
        axis."""
        return self.look in ("line", "dashed", "dots", "bars")


@dataclass(frozen=True)
class Chart:
    """Curves on two axes. The first curve is the subject of the chart: it is drawn on top, and
    entirely visible unless the axes are given."""

    heading: str
    curves: Sequence[Curve]
    x_name: str
    y_name: str = ""
    note: str = ""
    x_unit: Unit = ""
    y_unit: Unit = ""
    x_axis: Axis | None = None
    y_axis: Axis | None = None


@dataclass(frozen=True)
class Drawn:
    """A chart with its axes, and remarks about values that lie outside of them."""

    curves: Sequence[Curve]
    across: Axis
    up: Axis
    remarks: Sequence[str]

    def paths(self, wide: float, high: float) -> list[Html]:
        """Return the grid, bands and curves for a drawing of this size, topmost elements last."""
        lines = (f"M0 {high * (1 - self.up.place(t)):.1f}H{wide}" for t in self.up.ticks())
        return [
            *(element("path", class_="grid stroke-round", d=d) for d in lines),
            *(self._band(curve, wide, high) for curve in reversed(self.curves) if curve.band),
            *(self._path(curve, wide, high) for curve in reversed(self.curves)),
            *(self._marks(curve, wide, high) for curve in reversed(self.curves) if curve.marks),
        ]

    def _band(self, curve: Curve, wide: float, high: float) -> Html:
        assert curve.band is not None
        low, top = (list(zip(curve.x, edge, strict=True)) for edge in curve.band)
        ends = [(x, y) for x, y in [*low, *reversed(top)] if math.isfinite(y)]
        points = [self._place(x, y, wide, high) for x, y in ends]
        return element(
            "path", class_=f"fill-{curve.color}", opacity=0.18, d=f"M{'L'.join(points)}Z"
        )

    def _marks(self, curve: Curve, wide: float, high: float) -> Html:
        there = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
        d = "".join(f"M{self._place(x, y, wide, high)}h0" for x, y in there)
        return element("path", class_=f"curve stroke-{curve.color}", **MARK, d=d)

    def _bars(self, curve: Curve, wide: float, high: float) -> Html:
        x = [float(v) for v in curve.x]
        half = (x[1] - x[0] if len(x) > 1 else self.across.high - self.across.low) / 2
        place = functools.partial(self._place, wide=wide, high=high)
        d = "".join(
            f"M{place(v - half, 0.0)}L{place(v - half, y)}L{place(v + half, y)}"
            f"L{place(v + half, 0.0)}Z"
            for v, y in zip(x, curve.y, strict=True)
            if y
        )
        return element("path", class_=f"fill-{curve.color}", opacity=BARS, d=d)

    def _path(self, curve: Curve, wide: float, high: float) -> Html:
        if curve.look == "bars":
            return self._bars(curve, wide, high)
        steps, pen_down = [], False
        for x, y in zip(curve.x, curve.y, strict=True):
            if not math.isfinite(y):
                pen_down = False
                continue
            steps.append(("L" if pen_down else "M") + self._place(x, y, wide, high))
            pen_down = curve.look != "dots"
        # A single point is a line of length zero, which a round cap makes visible.
        end = "h0" if curve.look == "dots" or len(steps) == 1 else ""
        return stroke(curve, "".join(step + end for step in steps))

    def _place(self, x: float, y: float, wide: float, high: float) -> str:
        # Clip values far outside the plot: they are invisible anyway, and the numbers stay short.
        height = min(max(self.up.place(y), -2.0), 3.0)
        return f"{wide * self.across.place(x):.1f} {high * (1 - height):.1f}"


def drawn(chart: Chart) -> Drawn:
    """Put a chart on its own axes, or on axes that fit its values."""
    curves = [curve for curve in chart.curves if len(curve.x)]
    places = (x for curve in curves for x in curve.x)
    across = chart.x_axis or axis(places, zero=True, unit=chart.x_unit)
    if chart.y_axis is not None:
        return Drawn(curves, across, chart.y_axis, ())
    up, remarks = _vertical(curves, across, chart.x_name, chart.y_unit)
    return Drawn(curves, across, up, remarks)


def named(curves: Iterable[Curve]) -> list[Curve]:
    """Return the first curve of each name, for a legend."""
    found: dict[str, Curve] = {}
    for curve in curves:
        found.setdefault(curve.name, curve)
    return list(found.values())


def stroke(curve: Curve, d: str) -> Html:
    """Return a path with the color and the line style of this curve."""
    if curve.look == "bars":
        return element("path", class_=f"fill-{curve.color}", opacity=BARS, d=d)
    look = ENDS | LOOKS[curve.look]
    return element("path", class_=f"curve stroke-{curve.color}", **look, d=d)


def heights(curve: Curve) -> Iterator[float]:
    """Yield all values of a curve and of the edges of its band."""
    yield from curve.y
    for edge in curve.band or ():
        yield from edge


def _vertical(
    curves: Sequence[Curve], across: Axis, x_name: str, unit: Unit
) -> tuple[Axis, list[str]]:
    """Return the y axis and remarks about values that lie outside of it.

    A curve that runs far away from the first one is cut off, with a remark, because otherwise a
    diverging run would flatten all others.
    """
    finite = [[y for y in curve.y if math.isfinite(y)] for curve in curves]
    told = [ys for curve, ys in zip(curves, finite, strict=True) if curve.told and ys]
    # All curves start at about the same value, so the start is always shown.
    whole = [*(told or finite or [[]])[0], *(ys[0] for ys in told)]
    low, high = min(whole, default=0.0), max(whole, default=1.0)
    room = (FAR - 1) * max(high - low, 0.1 * abs(high), 1e-12)
    remarks, shown = [], []
    for c, ys in zip(curves, finite, strict=True):
        shown += [y for y in heights(c) if low - room <= y <= high + room]
        if not c.told:
            continue
        lost = len(c.y) - len(ys)
        if far := [y for y in ys if not low - room <= y <= high + room]:
            worst = number(max(far, key=abs))
            x = next(x for x, y in zip(c.x, c.y, strict=True) if y in far)
            remarks.append(
                f"{c.name} leaves this chart at {x_name} {across.label(x)}, up to {worst}."
            )
        if lost:
            x = next(x for x, y in zip(c.x, c.y, strict=True) if not math.isfinite(y))
            remarks.append(
                f"{c.name} is not finite from {x_name} {across.label(x)} ({lost} times)."
            )
    return axis(shown, unit=unit), remarks


def key(curve: Curve, x: float = 1, y: float = 5) -> str:
    """Return the path that represents a curve in a legend."""
    if curve.look == "bars":
        return f"M{x + 4} {y - 5}h16v10h-16Z"
    return f"M{x + 12} {y}h0" if curve.look == "dots" else f"M{x} {y}h24"
