"""Charts as data, and as SVG. Reports, experiments and notebooks show these and no others.

They are drawn here and not by a plotting library, because a report is one file that works offline,
shows the values under the pointer, turns dark with the reader's setting, and has words that stay
readable on a phone. A `Chart` in a report is HTML (reports/chart_html.py); a `Figure` is an SVG
that any viewer shows, for a page or a notebook.
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

GAP, LABELS, HEADING, BELOW = 22, 50, 26, 24  # pixels between plots, and around each


@dataclass(frozen=True)
class Figure:
    """Charts in rows, with one legend."""

    rows: Sequence[Sequence[Chart]]

    def svg(self) -> str:
        """The figure as a self-contained SVG, for light and dark paper."""
        return _svg(self)

    def save(self, path: str | Path) -> None:
        """Write the SVG."""
        Path(path).write_text(self.svg(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return in_a_page(self.svg())


def alike(charts: Iterable[Chart]) -> list[Chart]:
    """The same charts on one y axis, to be compared."""
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
    """Where the plots of a row begin: another axis than the last one's needs room for labels."""
    lefts = [float(LABELS + GAP)]
    for before, up in itertools.pairwise(ups):
        lefts.append(lefts[-1] + wide + GAP + (0 if up == before else LABELS))
    return lefts


def _width(ups: Sequence[Axis], wide: float) -> float:
    return _lefts(ups, wide)[-1] + wide + GAP


def _legend(curves: Sequence[Curve], whole: float) -> tuple[Html, float]:
    """Keys and names in lines, and where the last of them ends."""
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
            # Inside of the plot at its ends, so that it does not touch the neighbor's.
            side = "start" if place < 0.02 else "end" if place > 0.98 else "middle"
            yield words(x + wide * place, y + high + 15, one.across.label(t), 12, "quiet", side)
        if i == 0 or one.up != all_drawn[i - 1].up:
            for t in one.up.ticks():
                at = y + high * (1 - one.up.place(t)) + 4
                yield words(x - 7, at, one.up.label(t), 12, "quiet", "end")
        if i >= len(below) or below[i].x_name != chart.x_name:
            yield words(x + wide / 2, y + high + 31, chart.x_name, 12, "quiet", "middle")
