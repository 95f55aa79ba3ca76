"""Renders a plan for a terminal: one block per round, and a summary of the costs."""

import itertools
from collections.abc import Sequence
from typing import Any

from fedgrad.core.graph import SERVER
from fedgrad.planning.plan import Plan
from fedgrad.show.numbers import memory, plural
from fedgrad.show.outline import (
    Frame,
    Item,
    Link,
    Outline,
    Part,
    Round,
    Size,
    Visit,
    Work,
    inside,
    outline,
)
from fedgrad.show.terminal import WIDEST, WIDTH, box, columns, line, plain


def text(plan: Plan) -> str:
    """Return the federated graph of a plan as text."""
    shown = outline(plan)
    captions = [_wrap("", said.split(" · "), " ·", WIDEST) for said in summary(plan, shown)]
    printed = plain(
        *map(line, [plan.name, "", *_ends(shown, "←", shown.arguments)]),
        *_items(shown.items, shown, WIDTH),
        *map(line, [*_ends(shown, "→", shown.results), "", *itertools.chain(*captions)]),
        width=WIDEST,
    )
    return "\n".join(words.rstrip() for words in printed.splitlines())


def summary(plan: Plan, shown: Outline) -> list[str]:
    """Return a line with rounds and rules, then one line per placement."""
    kinds = {frame.kind for frame in inside(shown.items, Frame)}
    notes = {"while": "each pass of a while counted once", "cond": "of a cond the longer branch"}
    counted = [note for kind, note in notes.items() if kind in kinds]
    first = plural(plan.rounds, "round") + (f" ({', '.join(counted)})" if counted else "")
    rules = plan.rules
    lines = [first + (f" · rules: {', '.join(rules)}" if rules else "")]
    for placement, n in plan.clients.items():
        down, up = totals(shown.items, placement)
        silent = not (down.bytes or up.bytes)
        again = "addressed again" if placement in plan.readdressed else "addressed once"
        kept = plan.client_memory[placement]
        lines.append(
            f"each of {n:,} {placement}: ↓ {down.count}, {down.memory} · ↑ {up.count}, {up.memory}"
            f" · {'never addressed' if silent else again}"
            f" · keeps {memory(kept) if kept else 'nothing'}"
        )
    return lines


def totals(items: Sequence[Item], placement: str) -> tuple[Size, Size]:
    """Return what one client receives and sends, counted as `plan.rounds` counts: a loop with a
    data-dependent trip count counts as one iteration, a cond as its longer branch."""
    down, up = Size(), Size()
    for item in items:
        if isinstance(item, Round):
            for visit in (v for v in item.visits if v.placement == placement):
                down, up = down + (visit.down or Size()), up + (visit.up or Size())
        elif isinstance(item, Frame):
            parts = [totals(part.items, placement) for part in item.parts]
            if item.kind == "cond":
                parts = [max(parts, key=lambda both: both[0].bytes + both[1].bytes)]
            times = 1 if item.times is None else item.times
            for part_down, part_up in parts:
                down, up = down + part_down * times, up + part_up * times
    return down, up


def _ends(shown: Outline, arrow: str, sizes: dict[str, dict[str, str]]) -> list[str]:
    """List the arguments or the results of each lane."""
    named = {lane: [f"{name} ({size})" for name, size in of.items()] for lane, of in sizes.items()}
    return [
        words
        for lane, heading in shown.lanes.items()
        for words in _wrap(f"  {heading} {arrow} ", named[lane])
    ]


def _items(items: Sequence[Item], shown: Outline, width: int | None = None) -> list[Any]:
    """Render lines for server work, boxes for rounds, and double boxes for loops."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, Work):
            found.append(line(f"  {SERVER}: {_said(item)}"))
        elif isinstance(item, Round):
            head = f"round {item.number}" if item.number is not None else "no communication"
            visits = [line(words) for visit in item.visits for words in _visit(visit, shown)]
            found.append(box(head, visits, width=width))
        else:
            inner: list[Any] = []
            for part in item.parts:
                inner += [line(f"{part.label}:")] if part.label else []
                inner += _items(part.items, shown) or [line("  nothing")]
                inner += map(line, _passed_on(part, shown))
            found.append(box(item.label, inner, double=True, width=width))
    return found


def _visit(visit: Visit, shown: Outline) -> list[str]:
    lane = shown.lanes[visit.placement]
    found = [link for link in shown.links if link.end is visit]
    left = [link for link in shown.links if link.start is visit and link.end is not None]
    own = [f"own {', '.join(visit.own)}"] if visit.own else []
    inputs = own + [f"{link.size.memory} from {_where(link.start, shown)}" for link in found]
    work = "│ " + _said(visit.work) + (f", with {' and '.join(inputs)}" if inputs else "")
    down, up = visit.down, visit.up
    return [
        f"↓ {lane}: {down.count}, {down.memory}" if down else f"· {lane}: nothing is sent",
        work,
        *(f"│ keeps {link.size.memory} {_until(link, shown)}" for link in left),
        *([f"↑ Σ {visit.placement}: {up.count}, {up.memory}"] if up else []),
    ]


def _passed_on(part: Part, shown: Outline) -> list[str]:
    """Say what inner loops leave with the client for the next pass; for visits `_visit` does."""
    return [
        f"  {shown.lanes[link.placement]} keeps {link.size.memory} of {_where(link.start, shown)}"
        f" {_until(link, shown)}"
        for link in shown.links
        if link.end is part and isinstance(link.start, Frame)
    ]


def _until(link: Link, shown: Outline) -> str:
    if isinstance(link.end, Part):
        frame = next(f for f in inside(shown.items, Frame) if link.end in f.parts)
        return "for after the cond" if frame.kind == "cond" else "for the next pass"
    return f"for {_where(link.end, shown)}"


def _where(node: object, shown: Outline) -> str:
    if isinstance(node, Part):
        return "before"
    if isinstance(node, Frame):
        return f"the {node.label}"
    rounds = inside(shown.items, Round)
    return next((f"round {r.number}" for r in rounds if node in r.visits), "later")


def _said(work: Work) -> str:
    return f"{work.title} · {work.detail}" if work.title else work.detail


def _wrap(head: str, words: Sequence[str], between: str = ",", width: int = WIDTH) -> list[str]:
    lines = [head + words[0]] if words else []
    for word in words[1:]:
        lines[-1] += between
        if columns(f"{lines[-1]} {word}") < width:
            lines[-1] += f" {word}"
        else:
            lines.append(" " * max(2, columns(head)) + word)
    return lines
