"""Notebooks: the cell of a line of code, and output that changes. This is the only file that uses
IPython, and only if it is already loaded."""

import re
import sys
from typing import Any


def cell(file: str) -> str | None:
    """Return `cell 3` if this is IPython's name for the code of a cell (`cell` if its number is
    unknown), else None."""
    if not re.search(r"^<ipython-input-|[/\\]ipykernel_\d+[/\\]\d+\.py$", file):
        return None
    name = getattr(getattr(_shell(), "compile", None), "format_code_name", lambda _: None)(file)
    number = re.search(r"\d+", name[1]) if name else None
    return f"cell {number[0]}" if number else "cell"


def place(file: str, line: object) -> str:
    """Format a position: `file.py:41`, or `cell 3, line 4` in a notebook."""
    found = cell(file)
    return f"{file}:{line}" if found is None else f"{found}, line {line}"


class Changing:
    """A line of a notebook cell's output that can be overwritten."""

    def __init__(self, text: str) -> None:
        from IPython.display import display

        self.handle: Any = display(_as_text(text), raw=True, display_id=True)

    def write(self, text: str) -> None:
        """Overwrite the line."""
        self.handle.update(_as_text(text), raw=True)


def _as_text(text: str) -> dict[str, str]:
    return {"text/plain": text}


def _shell() -> Any:
    there = sys.modules.get("IPython")
    return None if there is None else there.get_ipython()
