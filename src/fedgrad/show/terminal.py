"""What goes to a terminal, made by rich. It is loaded when it is needed: it takes a while."""

import io
from html import escape
from typing import Any

WIDTH, WIDEST = 88, 100  # of boxes, and of any line


def columns(string: str) -> int:
    """How many columns of a terminal a string takes."""
    from rich.cells import cell_len

    return cell_len(string)


def line(words: str) -> Any:
    """Words that are cut where they do not fit."""
    from rich.text import Text

    return Text(words, no_wrap=True, overflow="ellipsis")


def box(heading: str, content: list[Any], double: bool = False, width: int | None = None) -> Any:
    """Lines and other boxes, with a frame around them."""
    from rich import box, console, panel

    return panel.Panel(
        console.Group(*content),
        box=box.DOUBLE if double else box.SQUARE,
        title=line(heading),
        title_align="left",
        width=width,
    )


def printed(*things: Any, width: int = 110, colors: bool = False) -> Any:
    """A console on which these have been printed; with colors, for `export_html`."""
    from rich.console import Console

    plain: Any = {} if colors else {"color_system": None}
    console = Console(file=io.StringIO(), width=width, record=colors, force_jupyter=False, **plain)
    for thing in things:
        console.print(thing, markup=False, highlight=False)
    return console


def plain(*things: Any, width: int = 110) -> str:
    """These as they are printed, without colors."""
    return printed(*things, width=width).file.getvalue()  # type: ignore[no-any-return]


def notebook(*things: Any) -> str:
    """These as HTML, with colors, for a notebook."""
    return str(printed(*things, colors=True).export_html(inline_styles=True, code_format=_BLOCK))


def monospace(text: str) -> str:
    """Text as it is, for a notebook."""
    return _BLOCK.format(code=escape(text))


# Notebooks have styles of their own for <pre>, which wrap lines and take any font.
_BLOCK = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace\">{code}</pre>"
)
