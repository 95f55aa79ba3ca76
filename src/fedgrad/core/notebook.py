"""Notebooks: which cell a line of code is in, and output that changes. The one file that knows
IPython, which is there if somebody else has loaded it."""

import re
import sys
from typing import Any


def cell(file: str) -> str | None:
    """`cell 3`, if this is what IPython calls the code of a cell; `cell`, if it has forgotten."""
    if not re.search(r"^<ipython-input-|[/\\]ipykernel_\d+[/\\]\d+\.py$", file):
        return None
    name = getattr(getattr(_shell(), "compile", None), "format_code_name", lambda _: None)(file)
    number = re.search(r"\d+", name[1]) if name else None
    return f"cell {number[0]}" if number else "cell"


def place(file: str, line: object) -> str:
    """`file.py:41`, or `cell 3, line 4` of a notebook."""
    found = cell(file)
    return f"{file}:{line}" if found is None else f"{found}, line {line}"


class Changing:
    """A line of output of a notebook's cell that can be written again."""

    def __init__(self, text: str) -> None:
        from IPython.display import display

        self.handle: Any = display(_as_text(text), raw=True, display_id=True)

    def write(self, text: str) -> None:
        """The line is this now."""
        self.handle.update(_as_text(text), raw=True)


def _as_text(text: str) -> dict[str, str]:
    return {"text/plain": text}


def _shell() -> Any:
    there = sys.modules.get("IPython")
    return None if there is None else there.get_ipython()
