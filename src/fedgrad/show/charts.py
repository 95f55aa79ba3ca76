"""Charts as data and as SVG, shared by reports, experiments and notebooks.

They are drawn here instead of by a plotting library, because a report is a single file that works
offline, shows values under the pointer, follows the reader's dark mode and keeps its text readable
on a phone. A report renders a `Chart` as HTML (reports/chart_html.py); a `Figure` is an SVG that
any viewer displays, for a page or a notebook.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedgrad.show.axis import Axis, axis
from fedgrad.show.drawing import Chart, Curve, drawn, heights, key, named, stroke
from fedgrad.show.markup import Html, element
from fedgrad.show.pen import document, in_a_page, text_width, words

__all__ = ["Axis", "Chart", "Curve", "Figure", "alike", "axis"]

GAP, LABELS, HEADING, BELOW = 22, 50, 26, 24  # pixels between and around plots


@dataclass(frozen=True)
class Figure:
    """Rows of charts with one shared legend."""

    rows: Sequence[Sequence[Chart]]

    def svg(self) -> str:
        """Return the figure as a self-contained SVG for light and dark backgrounds."""
        return _svg(self)

    def save(self, path: str | Path) -> None:
        """Write the figure to an SVG file."""
        Path(path).write_text(self.svg(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return in_a_page(self.svg())


def alike(charts: Iterable[Chart]) -> list[Chart]:
    """Return the same charts with one shared y axis, so that they can be compared."""
    charts = list(charts)
    curves = [curve for chart in charts for curve in chart.curves]
    shared = axis((y for curve in curves for y in heights(curve)), unit=charts[0].y_unit)
    return [replace(chart, y_axis=shared) for chart in charts]


def _svg(figure: Figure) -> str:
    columns = max(map(len, figure.rows))
    wide = min(380, max(200, 880 // columns))
    high = round(0.66 * wide)
    curves = named(c for row in figure.rows for chart in row for c in chart.curves if c.name)
    whole = max(_width([drawn(chart).up for chart in row], wide) for row in figure.rows)
    legend, top = _legend(curves, whole)
    parts: list[Html] = [legend]
    for i, row in enumerate(figure.rows):
        below = figure.rows[i + 1] if i + 1 < len(figure.rows) else ()
        parts += _row(row, below, top, wide, high)
        top += HEADING + high + BELOW + 16
    headings = ", ".join(dict.fromkeys(chart.heading for row in figure.rows for chart in row))
    names = ", ".join(curve.name for curve in curves)
    about = f"{names}: {headings}" if names else headings
    return document(whole, top + 4, "Charts", about, parts)


def _lefts(ups: Sequence[Axis], wide: float) -> list[float]:
    """Return the left edge of each plot in a row. A plot whose y axis differs from the previous
    one's needs room for its own labels."""
    lefts = [float(LABELS + GAP)]
    for before, up in itertools.pairwise(ups):
        lefts.append(lefts[-1] + wide + GAP + (0 if up == before else LABELS))
    return lefts


def _width(ups: Sequence[Axis], wide: float) -> float:
    return _lefts(ups, wide)[-1] + wide + GAP


def _legend(curves: Sequence[Curve], whole: float) -> tuple[Html, float]:
    """Draw the keys and names of the curves, line by line; return them and where they end."""
    x, y = float(LABELS + GAP), 22
    parts: list[Html] = []
    for curve in curves:
        width = 34 + text_width(curve.name, 12)
        if x + width > whole and parts:
            x, y = LABELS + GAP, y + 20
        parts += [stroke(curve, key(curve, x, y - 4)), words(x + 32, y, curve.name, color="quiet")]
        x += width + 12
    return element("g", parts), y + 10 if parts else 0


def _row(
    row: Sequence[Chart], below: Sequence[Chart], top: float, wide: float, high: float
) -> Iterator[Html]:
    all_drawn = [drawn(chart) for chart in row]
    lefts = _lefts([one.up for one in all_drawn], wide)
    middle, y = top + HEADING + high / 2, top + HEADING
    if row[0].y_name:
        yield words(GAP - 6, middle, row[0].y_name, anchor="middle", upright=False)
    for i, (chart, one, x) in enumerate(zip(row, all_drawn, lefts, strict=True)):
        yield words(x, y - 8, chart.heading, bold=True)
        yield element("svg", one.paths(wide, high), x=x, y=y, width=wide, height=high)
        yield element("path", class_="stroke-line", d=f"M{x} {y + high}h{wide}")
        for t in one.across.ticks(6 if wide > 300 else 4):
            place = one.across.place(t)
            # Align the labels at both ends inwards, so that they do not touch the neighboring
            # plot's.
            side = "start" if place < 0.02 else "end" if place > 0.98 else "middle"
            yield words(x + wide * place, y + high + 15, one.across.label(t), 12, "quiet", side)
        if i == 0 or one.up != all_drawn[i - 1].up:
            for t in one.up.ticks():
                at = y + high * (1 - one.up.place(t)) + 4
                yield words(x - 7, at, one.up.label(t), 12, "quiet", "end")
        if i >= len(below) or below[i].x_name != chart.x_name:
            yield words(x + wide / 2, y + high + 31, chart.x_name, 12, "quiet", "middle")
