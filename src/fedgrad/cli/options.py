"""Parsers of option values: known names, pairs, and lists."""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fedgrad.core.errors import nearest
from fedgrad.tasks import TASKS

WIDE = 110


def one_of(what: str, known: Iterable[str]) -> Callable[[str], str]:
    """Return a parser of known names; its error suggests the nearest one."""
    names = list(known)

    def read(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(f"There is no {what} {word!r}.{nearest(word, names)}")
        return word

    return read


def task(word: str) -> str:
    """Parse the name of a task, or module:name."""
    if ":" in word or word in TASKS:
        return word
    raise argparse.ArgumentTypeError(
        f"There is no task {word!r} (one of your own is module:name).{nearest(word, list(TASKS))}"
    )


def algorithm(known: Iterable[str]) -> Callable[[str], str]:
    """Return a parser of algorithm names, with or without underscores: fedavgm or fed_avgm."""
    read, names = one_of("algorithm", known), list(known)

    def find(word: str) -> str:
        if (name := word.replace("_", "")) == "fedauto" and name not in names:
            raise argparse.ArgumentTypeError(
                f"{word} finds its own rates, so there are none to learn. Write fedgrad train."
            )
        return read(name)

    return find


def whole(word: str) -> int:
    """Parse a whole number of at least 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1.")
    return int(word)


def names(word: str) -> list[str]:
    """Parse `a,b`."""
    return [part.strip() for part in word.split(",") if part.strip()]


def pairs(word: str) -> dict[str, Any]:
    """Parse `a=1,b=0.5`; values are JSON where possible, otherwise text."""
    found = {}
    for part in names(word):
        name, separator, value = part.partition("=")
        if not separator or not name.strip():
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=VALUE.")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value.strip()
    return found


def numbers(word: str) -> dict[str, float]:
    """Parse `server.learning_rate=0.5,server.momentum=0`."""
    found = pairs(word)
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise argparse.ArgumentTypeError(f"{name}={value}: {value!r} is not a number.")
    return {name: float(value) for name, value in found.items()}


def ranges(word: str) -> dict[str, tuple[float, float]]:
    """Parse `server.learning_rate=0.01:2`."""
    found = {}
    for name, value in pairs(word).items():
        low, _, high = str(value).partition(":")
        try:
            found[name] = (float(low), float(high))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name}={value} is not NAME=LOW:HIGH.") from None
    return found


def forms(word: str) -> str | dict[str, str]:
    """Parse `log`, or `server.learning_rate=log,server.momentum=logit`."""
    return {name: str(value) for name, value in pairs(word).items()} if "=" in word else word


class Merge(argparse.Action):
    """An option that may be repeated; its dicts are merged."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), **values})


def add_output(command: argparse.ArgumentParser) -> None:
    """Add `--quiet` and `--json`, for scripts."""
    group = command.add_mutually_exclusive_group()
    group.add_argument("--quiet", action="store_true", help="print the path of the report only")
    group.add_argument("--json", action="store_true", help="print a summary as JSON only")


def tell(options: argparse.Namespace, report: Path, said: Mapping[str, Any], show: Any) -> None:
    """Print the outcome of a command: JSON, only the path of the report, or what `show` prints."""
    if options.json:
        print_json({"command": options.command, "report": report, **said})
    elif options.quiet:
        print(report)
    else:
        show()
        console().print(f"Report: {report}", highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print strict JSON: non-finite numbers become null, and paths text."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def console() -> Console:
    """Return the terminal, or a wide console for a file or a pipe, so that lines are not broken."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=WIDE)
