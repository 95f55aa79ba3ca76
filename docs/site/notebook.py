"""A notebook as a page of the site: its words, its code, and its outputs as they are stored."""

import base64
import re
from typing import Any

PICTURES = {"image/svg+xml": "svg", "image/png": "png"}


def text_of(lines: str | list[str]) -> str:
    """Text of a notebook, which may be a list of lines."""
    return lines if isinstance(lines, str) else "".join(lines)


def markdown(book: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """The page, and its pictures by the names of their files."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in book["cells"]:
        source = text_of(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"````python\n{source}\n````")
            parts += [_output(output, name, pictures) for output in cell["outputs"]]
    return "\n\n".join(filter(None, parts)) + "\n", pictures


def _output(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    if "text" in output:
        return _block(text_of(output["text"]))
    data = output["data"]
    for kind, ending in PICTURES.items():
        if kind in data:
            file = f"{name}-{len(pictures) + 1}.{ending}"
            held = text_of(data[kind])
            pictures[file] = held.encode() if ending == "svg" else base64.b64decode(held)
            width = re.search(r'<svg[^>]* width="(\d+)"', held) if ending == "svg" else None
            fits = width is not None and int(width[1]) < 600  # that a phone may shrink it
            return f"![]({file}){{ .fits }}" if fits else f"![]({file})"
    return (
        text_of(data["text/html"]) if "text/html" in data else _block(text_of(data["text/plain"]))
    )


def _block(text: str) -> str:
    return f"````text\n{text.rstrip()}\n````"
