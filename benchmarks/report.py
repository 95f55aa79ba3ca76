"""Results as JSON, which runs of single sections add to, and as Markdown made from that JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def load() -> dict[str, Any]:
    """The results so far, by section."""
    path = RESULTS / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def save(results: dict[str, Any]) -> None:
    """Written after every section, so that a run that is interrupted keeps what it has."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def write(results: dict[str, Any], sections: dict[str, tuple[str, Any]]) -> None:
    """results.md and the plots, of all sections that there are results for."""
    if not results:
        return
    parts = ["# Benchmarks", INTRODUCTION]
    for name, (title, section) in sections.items():
        if name not in results:
            continue
        entry = results[name]
        quick = " **A smoke run (`--quick`): too short to be quoted.**" if entry["quick"] else ""
        try:
            body = section.report(entry["data"])
            if hasattr(section, "plot"):
                section.plot(entry["data"], RESULTS)
        except (KeyError, TypeError):
            body = "These results are in the form of an older version: run this section again."
        parts += [
            f"## {title}",
            f"`make bench ARGS={name}`, {entry['seconds']:.0f} s.{quick} {_circumstances(entry)}",
            body,
        ]
    parts.append("## The machine")
    last = results[max(results, key=lambda name: results[name]["machine"]["date"])]
    facts = last["machine"].items()
    parts.append(table(["", ""], [[k, v] for k, v in facts if k not in ("date", "load")]))
    (RESULTS / "results.md").write_text("\n\n".join(parts) + "\n")


INTRODUCTION = """\
Written by `make bench`; the numbers are in [results.json](results.json). Read the ratios: on a
shared machine times are worth little, so whoever is compared takes turns in one run, in changing
order, and a number is a median. Every section says how busy the machine was (its load average over
a minute, before and after; a benchmark itself adds 1 to 2). A ratio above 1 means that fedgrad is
slower."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def ratio(found: dict[str, float]) -> str:
    """A ratio by the clock, and of processor time in brackets."""
    return f"{found['wall']:.2f} ({found['cpu']:.2f})"


def _circumstances(entry: dict[str, Any]) -> str:
    before, after = entry["machine"]["load"].split()[0], entry["load after"]
    cores = float(entry["machine"]["cores"])
    # What runs here keeps all cores busy at times, but no more than that.
    busy = " The machine was busy with other work." if float(before) > cores / 2 else ""
    return f"{entry['machine']['date']}, load {before} before, {after} after.{busy}"
