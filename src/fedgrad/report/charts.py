"""Charts: curves as SVG that stretches to the width it gets, labels as HTML that stays readable.

A little script (page.js) adds what is under the pointer; without it, the charts are still there.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedgrad.report.axis import Axis, Unit, axis
from fedgrad.report.markup import Html, element
from fedgrad.show.numbers import number, percent

WIDE, HIGH = 1000, 500  # units of the drawing, not pixels
FAR = 8.0  # curves that leave what the first one spans by this factor are cut


@dataclass(frozen=True)
class Curve:
    """Values over x; what is not finite is left out."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "p0"  # a colour of plan/pen.py
    dashed: bool = False
    faint: bool = False  # behind the others, and in neither the legend nor under the pointer


def chart(
    heading: str,
    curves: Sequence[Curve],
    x_name: str,
    note: str = "",
    x_unit: Unit = "",
    y_unit: Unit = "",
    class_: str = "",
) -> Html:
    """A figure with a heading, a legend, curves over axes, and remarks.

    The first curve is what the chart is about: it is on top, and always shown whole.
    """
    curves = [c for c in curves if len(c.x)]
    across = axis((x for c in curves for x in c.x), zero=True, unit=x_unit)
    up, remarks = _vertical(curves, across, x_name, y_unit)
    lines = [_grid(up), *(_path(curve, across, up) for curve in reversed(curves))]
    curves = [c for c in curves if not c.faint]
    plot = element(
        "div",
        [_tick(up.label(t), "bottom", up.place(t), "y") for t in up.ticks()],
        [_tick(across.label(t), "left", across.place(t), "x") for t in across.ticks(5)],
        element(
            "svg",
            lines,
            viewBox=f"0 0 {WIDE} {HIGH}",
            preserveAspectRatio="none",
            role="img",
            aria_label=f"{heading} over {x_name}: {', '.join(c.name for c in curves)}",
        ),
        element("div", class_="cursor", hidden=True),
        element("div", class_="tip", role="status", hidden=True),
        class_="plot",
        tabindex=0,
        data_chart=json.dumps(_data(curves, across, up, x_name)),
    )
    return element(
        "figure",
        element("figcaption", heading, element("small", note) if note else None),
        _legend(curves),
        plot,
        element("div", x_name, class_="x-name"),
        [element("p", remark, class_="note") for remark in remarks],
        class_=f"chart {class_}".strip(),
    )


def _vertical(
    curves: Sequence[Curve], across: Axis, x_name: str, unit: Unit
) -> tuple[Axis, list[str]]:
    """The y axis, and remarks on what does not fit on it.

    A curve that runs far away from the first one is cut, and a remark says so, because otherwise a
    run that diverges would flatten all others.
    """
    whole = [c for c in curves if not c.faint]
    finite = {c.name: [y for y in c.y if math.isfinite(y)] for c in whole}
    remarks, shown = [], []
    low, high = _span(finite[curves[0].name])
    # A start is common to all curves, so it is always shown.
    high = max([high, *(ys[0] for ys in finite.values() if ys)])
    low = min([low, *(ys[0] for ys in finite.values() if ys)])
    room = (FAR - 1) * max(high - low, 0.1 * abs(high), 1e-12)
    for c in whole:
        inside = [y for y in finite[c.name] if low - room <= y <= high + room]
        far = [y for y in finite[c.name] if not low - room <= y <= high + room]
        shown += inside
        lost = len(c.y) - len(finite[c.name])
        if far:
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
    behind = [y for c in curves if c.faint for y in c.y if low - room <= y <= high + room]
    return axis([*shown, *behind], unit=unit), remarks


def _span(values: Sequence[float]) -> tuple[float, float]:
    return min(values, default=0.0), max(values, default=1.0)


def _grid(up: Axis) -> list[Html]:
    return [
        element("path", class_="grid", d=f"M0 {y:.1f}H{WIDE}")
        for y in (HIGH * (1 - up.place(t)) for t in up.ticks())
    ]


def _path(curve: Curve, across: Axis, up: Axis) -> Html:
    steps, pen_down = [], False
    for x, y in zip(curve.x, curve.y, strict=True):
        if not math.isfinite(y):
            pen_down = False
            continue
        # Far outside is as good as anywhere outside, and keeps numbers short.
        height = min(max(up.place(y), -2.0), 3.0)
        steps.append(
            f"{'L' if pen_down else 'M'}{WIDE * across.place(x):.1f} {HIGH * (1 - height):.1f}"
        )
        pen_down = True
    look = (" dashed" if curve.dashed else "") + (" faint" if curve.faint else "")
    # A single point is a line of no length, which a round cap makes visible.
    d = "".join(steps) + ("h0" if len(steps) == 1 else "")
    return element("path", class_=f"curve stroke-{curve.colour}{look}", d=d)


def _tick(label: str, side: str, place: float, kind: str) -> Html:
    return element("span", label, class_=f"tick-{kind}", style=f"{side}:{100 * place:.2f}%")


def _legend(curves: Iterable[Curve]) -> Html:
    return element(
        "ul",
        [element("li", _key(curve), curve.name) for curve in curves],
        class_="legend",
    )


def _key(curve: Curve) -> Html:
    dash = " dashed" if curve.dashed else ""
    return element(
        "svg",
        element("path", class_=f"curve stroke-{curve.colour}{dash}", d="M1 5H25"),
        viewBox="0 0 26 10",
        class_="key",
        aria_hidden="true",
    )


def _data(curves: Sequence[Curve], across: Axis, up: Axis, x_name: str) -> dict[str, object]:
    """What the script shows under the pointer: places in the drawing, and words."""

    def kept(curve: Curve, what: Callable[[float, float], object]) -> list[object]:
        return [what(x, y) for x, y in zip(curve.x, curve.y, strict=True)]

    words = percent if up.unit == "percent" else number
    return {
        "x": x_name,
        "curves": [
            {
                "name": c.name,
                "colour": c.colour,
                "at": kept(c, lambda x, y: round(across.place(x), 5)),
                "up": kept(c, lambda x, y: round(up.place(y), 4) if math.isfinite(y) else None),
                "x": kept(c, lambda x, y: across.label(x)),
                "y": kept(c, lambda x, y: words(y)),
            }
            for c in curves
        ],
    }
