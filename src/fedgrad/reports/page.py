"""A self-contained HTML page, in the reader's color scheme, that fetches nothing."""

import base64
import hashlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from xml.etree import ElementTree

from fedgrad.core.errors import FederatedError
from fedgrad.show.markup import Content, Html, element, join
from fedgrad.show.pen import INK, colors


class ReportError(FederatedError):
    """Raised when a folder does not hold what a report needs."""


@dataclass(frozen=True)
class Section:
    """A part of a page, with a heading that the table of contents links to."""

    heading: str
    content: Content

    @property
    def anchor(self) -> str:
        """The heading as an HTML id."""
        return re.sub(r"\W+", "-", self.heading.lower()).strip("-")


def page(
    title: str, head: Content, sections: Sequence[Section], foot: Content, live: bool = False
) -> str:
    """Return the HTML document. A live page reloads itself until the run has ended."""
    script = _file("page.js")
    # Whatever the page contains, only our own script may run, and nothing is loaded.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    body = element(
        "main",
        element("header", head, _contents(sections)),
        [element("section", element("h2", s.heading), s.content, id=s.anchor) for s in sections],
        element("footer", foot),
    )
    document = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            # Without scripts the page reloads too, but loses its scroll position.
            element("noscript", element("meta", http_equiv="refresh", content="10"))
            if live
            else None,
            element("title", title),
            element("style", Html(_colors() + _file("page.css"))),
        ),
        element("body", body, element("script", Html(script))),
        lang="en",
        data_live=live,
    )
    return f"<!doctype html>\n{document}\n"


LONG = 30  # characters of a cell, above which it wraps


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Content]], last_is_total: bool = False
) -> Html:
    """Return a table with names on the left and right-aligned numbers."""
    rows = list(rows)

    def cell(kind: str, i: int, content: Content) -> Html:
        long = type(content) is str and len(content) > LONG  # excludes HTML, a subclass of str
        return element(kind, content, class_=("right long" if long else "right") if i else None)

    head = element("tr", [cell("th", i, name) for i, name in enumerate(columns)])
    body = [
        element(
            "tr",
            [cell("th" if i == 0 else "td", i, content) for i, content in enumerate(row)],
            class_="total" if last_is_total and row is rows[-1] else None,
        )
        for row in rows
    ]
    return element(
        "div", element("table", element("thead", head), element("tbody", body)), class_="scroll"
    )


def listing(facts: Iterable[tuple[str, Content]]) -> Html:
    """Return a list of names with their values."""
    return element("dl", [join(element("dt", k), element("dd", v)) for k, v in facts])


def again(command: Iterable[object]) -> list[Html]:
    """Return a paragraph with the command that repeats the run."""
    words = shlex.join(map(str, command))
    return [element("p", "To run it again:"), element("pre", element("code", words))]


def versions(found: Mapping[str, object]) -> str:
    """Format the versions of packages."""
    return ", ".join(f"{name} {version}" for name, version in found.items())


def picture(svg: str, name: str) -> Html:
    """Embed an SVG document in a page; prefix its ids so that several can coexist."""
    text = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ReportError.here(f"The picture {name!r} is not an SVG: {error}.") from None
    if root.tag != "{http://www.w3.org/2000/svg}svg":
        raise ReportError.here(f"The picture {name!r} is not an SVG but {root.tag!r}.")
    prefix = re.sub(r"\W+", "-", name) + "-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r"url\(#", f"url(#{prefix}", text)
    text = re.sub(r'href="#', f'href="#{prefix}', text)
    return Html(text.strip())


def _contents(sections: Sequence[Section]) -> Html:
    return element("nav", [element("a", s.heading, href=f"#{s.anchor}") for s in sections])


def _colors() -> str:
    classes = "".join(
        f".stroke-{name}{{stroke:var(--fg-{name})}}.fill-{name}{{fill:var(--fg-{name})}}"
        for name in INK
    )
    return colors(":root", classes)


def _file(name: str) -> str:
    return resources.files("fedgrad.reports").joinpath(name).read_text(encoding="utf-8")
