"""Log-log curves, as SVG."""

from __future__ import annotations

from pathlib import Path

import fedgrad as fg

Curves = dict[str, tuple[list[float], list[float]]]  # name: (x, y)
Panel = tuple[str, str, Curves]  # what is on the axes, and the curves
COLORS = ("p0", "p1", "p2", "p3", "p4", "quiet", "line")


def lines(path: Path, panels: list[Panel]) -> None:
    """Panels side by side, into `path`.svg."""
    charts = []
    for x_label, y_label, curves in panels:
        drawn = [
            fg.charts.Curve(name, x, y, color, "dashed" if name.startswith("jax") else "line")
            for color, (name, (x, y)) in zip(COLORS, curves.items(), strict=False)
        ]
        across, up = (
            fg.charts.axis((v for both in curves.values() for v in both[i]), logarithmic=True)
            for i in (0, 1)
        )
        charts.append(fg.charts.Chart(y_label, drawn, x_label, x_axis=across, y_axis=up))
    fg.charts.Figure([charts]).save(path.with_suffix(".svg"))
