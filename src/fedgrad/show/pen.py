"""Strokes and colors for pictures."""

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from fedgrad.show.markup import Html
from fedgrad.show.terminal import columns

# name: (light, dark). The classes fill-NAME and stroke-NAME use a color as fill or as stroke.
INK = {
    "paper": ("#ffffff", "#0f141a"),
    "lane": ("#f4f6f8", "#171e26"),
    "round": ("#e6eaef", "#232d38"),
    "box": ("#ffffff", "#0f141a"),
    "ink": ("#1c2229", "#e8edf2"),
    "quiet": ("#566170", "#a3afbd"),
    "line": ("#8793a1", "#6d7a89"),
    "p0": ("#2b5a9b", "#7fb0f0"),
    "p1": ("#1e7a55", "#5fcf9f"),
    "p2": ("#a3541a", "#eaa266"),
    "p3": ("#7647a2", "#c39bee"),
    "p4": ("#a03060", "#f08db5"),
}
FONT = {
    "sans": "Helvetica, Arial, 'DejaVu Sans', sans-serif",
    "mono": "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace",
}
# Pages that set light or dark mode themselves, whatever the reader's system prefers: notebooks in
# Jupyter, VS Code and Colab, and the documentation site.
PAGES = (
    ('[data-jp-theme-light="true"]', '[data-jp-theme-light="false"]'),
    (".vscode-light", ".vscode-dark"),
    ('[theme="light"]', '[theme="dark"]'),
    ('[data-md-color-scheme="default"]', '[data-md-color-scheme="slate"]'),
)
Point = tuple[float, float]


def text_width(string: str, size: float, bold: bool = False) -> float:
    """Return an upper estimate for common fonts, so that text never overlaps."""
    return columns(string) * size * (0.7 if bold else 0.61)


@dataclass(kw_only=True)
class Pen:
    """Collects the elements of an SVG in three layers, painted in this order."""

    ground: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    front: list[str] = field(default_factory=list)

    def sum(self, x: float, y: float, color: str) -> None:
        self.front.append(
            f'<circle class="fill-box stroke-{color}" cx="{x:.1f}" cy="{y:.1f}" r="9" '
            'stroke-width="1.4"/>'
        )
        self.write(x, y + 4, "Σ", 11, color, "middle", bold=True)

    def dot(self, x: float, y: float, color: str) -> None:
        self.front.append(f'<circle class="fill-{color}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')

    def store(self, x: float, y: float, color: str) -> None:
        """Draw the symbol for a client's own data."""
        self.front.append(
            f'<path class="fill-box stroke-{color}" stroke-width="1.2" d="M{x:.1f} {y + 2:.1f}'
            'v8a5.5 2.2 0 0 0 11 0v-8a5.5 2.2 0 0 0 -11 0a5.5 2.2 0 0 0 11 0"/>'
        )

    def rect(
        self, fill: str, x: float, y: float, width: float, height: float,
        radius: float = 6, stroke: str = "", tip: str = "",
    ) -> None:  # fmt: skip
        edge = f' stroke-{stroke}" stroke-width="1.4' if stroke else ""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        (self.front if stroke else self.ground).append(
            f'<rect class="fill-{fill}{edge}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="{radius}">{title}</rect>'
        )

    def line(
        self, points: Sequence[Point], color: str, arrow: bool = True, dash: bool = False
    ) -> None:
        dashes = ' stroke-dasharray="4 3"' if dash else ""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.lines.append(
            f'<path class="stroke-{color}" fill="none" stroke-width="1.4"{dashes} d="M{path}"/>'
        )
        if arrow:  # a separate path, because not every viewer draws markers
            (a, b), (x, y) = points[-2:]
            across = f"l{-7 if x > a else 7} -3.5v7z"
            along = f"l-3.5 {-7 if y > b else 7}h7z"
            head = f"M{x:.1f} {y:.1f}{across if x != a else along}"
            self.lines.append(f'<path class="fill-{color}" d="{head}"/>')

    def write(self, *args: Any, **options: Any) -> None:
        """Write text at a position; see `words`."""
        self.front.append(words(*args, **options))


def words(
    x: float, y: float, string: str, size: float = 12, color: str = "ink",
    anchor: str = "start", bold: bool = False, mono: bool = False, upright: bool = True,
) -> Html:  # fmt: skip
    """Return text that starts, is centered or ends at a position, depending on `anchor`."""
    style = f' font-family="{FONT["mono"]}"' if mono else ""
    style += ' font-weight="600"' if bold else ""
    style += "" if upright else f' transform="rotate(-90 {x:.1f} {y:.1f})"'
    return Html(
        f'<text class="fill-{color}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" '
        f'text-anchor="{anchor}"{style}>{escape(string)}</text>'
    )


def document(width: float, height: float, title: str, about: str, parts: Iterable[str]) -> str:
    """Return a self-contained SVG for light and dark backgrounds."""
    size = f'width="{width:g}" height="{height:g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="fedgrad" role="img" {size} '
            f'viewBox="0 0 {width:g} {height:g}" font-family="{FONT["sans"]}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(about)}</desc>",
            f"<style>{style()}</style>",
            f'<rect class="fill-paper" {size}/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def style() -> str:
    """Return the style sheet, plain colors first for viewers without CSS variables or dark mode."""

    def rules(use: str) -> str:
        return "".join(
            f".fedgrad .fill-{n}{{fill:{use.format(n=n, light=light)}}}"
            f".fedgrad .stroke-{n}{{stroke:{use.format(n=n, light=light)}}}"
            for n, (light, _) in INK.items()
        )

    used = colors("svg.fedgrad", rules("var(--fg-{n})"))
    return f"{rules('{light}')}@supports (fill:var(--a)){{{used}}}"


def colors(element: str, rules: str) -> str:
    """Return style rules that use our colors, light or dark as the reader's system prefers."""
    turned = f"@media (prefers-color-scheme:dark){{{element}{{{_values(1)}}}}}"
    return f"{element}{{{_values(0)}}}{turned}{rules}"


def in_a_page(*pictures: str) -> str:
    """Return HTML that shows pictures in a page such as a notebook, as many per row as fit, in the
    page's light or dark mode. They are images, because a notebook that is not trusted, such as
    somebody else's, strips inline SVG down to its text."""
    style = "".join(
        f"{','.join(f'{page[i]} img.fedgrad' for page in PAGES)}{{color-scheme:{scheme}}}"
        for i, scheme in enumerate(("light", "dark"))
    )
    row = f'<div style="display:flex;flex-wrap:wrap">{"".join(map(_image, pictures))}</div>'
    return f"<style>{style}</style>{row}" if pictures else ""


def _image(svg: str) -> str:
    about = re.search("<desc>(.*?)</desc>", svg, re.DOTALL)
    said = about[1].replace('"', "&quot;") if about else ""
    data = base64.b64encode(svg.encode()).decode()
    return (
        f'<img class="fedgrad" alt="{said}" style="max-width:100%;height:auto" '
        f'src="data:image/svg+xml;base64,{data}"/>'
    )


def _values(dark: int) -> str:
    return "".join(f"--fg-{name}:{color[dark]};" for name, color in INK.items())
