"""Figures for light and dark paper: one SVG that follows the reader's setting, and two PNGs."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedgrad.experiments.results import ExperimentError
from fedgrad.show.pen import INK


@dataclass(frozen=True)
class Ink:
    """The colours of one theme."""

    paper: str
    ink: str
    quiet: str
    line: str
    curves: tuple[str, ...]


def _theme(dark: bool) -> Ink:
    colours = {name: pair[dark] for name, pair in INK.items()}
    curves = tuple(colours[f"p{i}"] for i in range(5))
    return Ink(colours["paper"], colours["ink"], colours["quiet"], colours["line"], curves)


LIGHT, DARK = _theme(dark=False), _theme(dark=True)
USED = ("paper", "ink", "quiet", "line", "p0", "p1", "p2", "p3", "p4")
Drawing = Callable[[Ink], Any]  # gives a matplotlib Figure


def panels(ink: Ink, rows: int, columns: int, **options: Any) -> tuple[Any, np.ndarray]:
    """An empty figure in these colours, and its axes (rows x columns)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ExperimentError.here(
            "Figures are drawn with matplotlib, which is not installed. "
            "Install it: pip install 'fedgrad[plots]'"
        ) from missing
    size = (4.6 * columns, 3.3 * rows)
    figure = Figure(figsize=size, layout="constrained", facecolor=ink.paper)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for one in axes.flat:
        one.set_facecolor(ink.paper)
        one.grid(which="major", linewidth=0.5, color=ink.line, alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["bottom", "left"]].set_color(ink.line)
        one.tick_params(which="both", colors=ink.quiet, labelsize=9)
        for text in (one.xaxis.label, one.yaxis.label, one.title):
            text.set_color(ink.ink)
            text.set_fontsize(10)
    return figure, axes


def band(axes: Any, x: np.ndarray, low: np.ndarray, high: np.ndarray, colour: str) -> None:
    """Where the runs lie."""
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def legend(axes: Any, ink: Ink, **options: Any) -> None:
    """The names of the curves."""
    axes.legend(frameon=False, fontsize=8.5, labelcolor=ink.ink, **options)


def save(drawings: Mapping[str, Drawing], folder: Path) -> list[Path]:
    """Write each drawing as NAME.svg, NAME.png and NAME-dark.png; the paths, SVGs first."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    svgs, pngs = [], []
    # Without a date and with fixed ids, the same numbers give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "fedgrad", "svg.fonttype": "none"}):
        for name, draw in drawings.items():
            svgs.append(folder / f"{name}.svg")
            figure = draw(LIGHT)
            figure.savefig(svgs[-1], metadata={"Date": None})
            svgs[-1].write_text(adaptive(svgs[-1].read_text("utf-8")), encoding="utf-8")
            figure.set_layout_engine("none")  # it is laid out, which takes most of the time
            for one, suffix in ((figure, ""), (draw(DARK), "-dark")):
                pngs.append(folder / f"{name}{suffix}.png")
                one.savefig(pngs[-1], dpi=140)
    return svgs + pngs


def adaptive(svg: str) -> str:
    """A figure drawn in the light colours that turns dark where the reader prefers that.

    Matplotlib writes every colour into a style attribute; a colour that is ours becomes a variable.
    """
    names = {INK[name][0].lower(): f"--fg-{name}" for name in USED}
    light, dark = (";".join(f"--fg-{name}:{INK[name][i]}" for name in USED) for i in (0, 1))

    def coloured(match: re.Match[str]) -> str:
        name = names.get(match[2].lower())
        return f"{match[1]}: var({name}, {match[2]})" if name else match[0]

    svg = re.sub(r"\b(fill|stroke): (#[0-9a-fA-F]{6})\b", coloured, svg)
    style = (
        f"<style>svg.fedgrad{{{light}}}"
        f"@media (prefers-color-scheme:dark){{svg.fedgrad{{{dark}}}}}</style>"
    )
    return re.sub(r"<svg ([^>]*)>", rf'<svg class="fedgrad" \1>{style}', svg, count=1)
