"""HTML that is escaped by construction: text is escaped when it is put into an element."""

from collections.abc import Iterable
from html import escape
from typing import Any

# The content of an element: text, HTML, None, or a sequence of these.
Content = Any
_WITHOUT_END = {"meta", "input", "br", "line", "path", "rect", "circle", "polygon"}


class Html(str):
    """Text that is already HTML."""


def element(name: str, /, *content: Content, **attributes: Any) -> Html:
    """Return an HTML element.

    `element("p", "a < b", class_="note")` is `<p class="note">a &lt; b</p>`.

    Attributes that are None or False are left out, and True is written without a value. `class_`
    stands for `class` and `data_x` for `data-x`.
    """
    words = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _WITHOUT_END and not content:
        return Html(f"<{name}{words}>" if name in ("meta", "input", "br") else f"<{name}{words}/>")
    return Html(f"<{name}{words}>{join(*content)}</{name}>")


def join(*content: Content) -> Html:
    """Concatenate content, with its text escaped."""
    return Html("".join(_text(item) for item in content))


def _text(item: Content) -> str:
    if item is None:
        return ""
    if isinstance(item, Html):
        return item
    if isinstance(item, Iterable) and not isinstance(item, str):
        return "".join(_text(part) for part in item)
    return escape(str(item), quote=False)


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{escape(str(value))}"'
