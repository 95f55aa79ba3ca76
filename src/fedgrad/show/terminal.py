"""Terminal output with rich, which is imported only when needed because it is slow to import."""

import io
from html import escape
from typing import Any

WIDTH, WIDEST = 88, 100  # the width of boxes, and of the longest line


def columns(string: str) -> int:
    """Return the number of terminal columns that a string occupies."""
    from rich.cells import cell_len

    return cell_len(string)


def line(words: str) -> Any:
    """Return a line of text that ends in an ellipsis where it does not fit."""
    from rich.text import Text

    return Text(words, no_wrap=True, overflow="ellipsis")


def box(heading: str, content: list[Any], double: bool = False, width: int | None = None) -> Any:
    """Frame lines and other boxes."""
    from rich import box, console, panel

    return panel.Panel(
        console.Group(*content),
        box=box.DOUBLE if double else box.SQUARE,
        title=line(heading),
        title_align="left",
        width=width,
    )


def printed(*things: Any, width: int = 110, colors: bool = False) -> Any:
    """Return a console with these things printed; with `colors` it records them for
    `export_html`."""
    from rich.console import Console

    plain: Any = {} if colors else {"color_system": None}
    console = Console(file=io.StringIO(), width=width, record=colors, force_jupyter=False, **plain)
    for thing in things:
        console.print(thing, markup=False, highlight=False)
    return console


def plain(*things: Any, width: int = 110) -> str:
    """Return these things as printed, without colors."""
    return printed(*things, width=width).file.getvalue()  # type: ignore[no-any-return]


def notebook(*things: Any) -> str:
    """Return these things as HTML with colors, for a notebook."""
    return str(printed(*things, colors=True).export_html(inline_styles=True, code_format=_BLOCK))


def monospace(text: str) -> str:
    """Return preformatted text as HTML, for a notebook."""
    return _BLOCK.format(code=escape(text))


# Notebooks style <pre> in their own way, with wrapped lines and any font.
_BLOCK = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace\">{code}</pre>"
)
