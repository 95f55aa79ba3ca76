"""A plan for a terminal: one block per round, and what it all costs."""

import unicodedata
from collections.abc import Sequence

from fedgrad.core.placement import SERVER
from fedgrad.plan.plan import Plan
from fedgrad.show.layout import (
    Frame,
    Item,
    Link,
    Outline,
    Part,
    Round,
    Size,
    Visit,
    Work,
    frames,
    outline,
    plural,
)

WIDTH, WIDEST = 88, 100  # of boxes, and of any line


def text(plan: Plan) -> str:
    """The federated graph of a plan as text."""
    shown = outline(plan)
    lines = [plan.name, ""]
    for lane, heading in shown.lanes.items():
        lines += _wrap(f"  {heading} ← ", _named(shown.arguments[lane]))
    lines += _items(shown.items, shown, WIDTH)
    for lane, heading in shown.lanes.items():
        lines += _wrap(f"  {heading} → ", _named(shown.results[lane]))
    lines.append("")
    for line in summary(plan, shown):
        lines += _wrap("", line.split(" · "), " ·", WIDEST)
    return "\n".join(_fit(line, WIDEST).rstrip() for line in lines)


def summary(plan: Plan, shown: Outline) -> list[str]:
    """Rounds and rules; then a line for each placement."""
    kinds = {frame.kind for frame in frames(shown.items)}
    notes = {"while": "each pass of a while counted once", "cond": "of a cond the longer branch"}
    counted = [note for kind, note in notes.items() if kind in kinds]
    first = plural(plan.rounds, "round") + (f" ({', '.join(counted)})" if counted else "")
    rules = plan.rules
    lines = [first + (f" · rules: {', '.join(rules)}" if rules else "")]
    for placement, n in plan.clients.items():
        down, up = totals(shown.items, placement)
        silent = not (down.bytes or up.bytes)
        again = "addressed again" if placement in plan.readdressed else "addressed once"
        memory = plan.client_memory[placement]
        lines.append(
            f"each of {n:,} {placement}: ↓ {down.count}, {down.memory} · ↑ {up.count}, {up.memory}"
            f" · {'never addressed' if silent else again}"
            f" · keeps {Size(0, memory).memory if memory else 'nothing'}"
        )
    return lines


def totals(items: Sequence[Item], placement: str) -> tuple[Size, Size]:
    """Down and up of one client, counted as `plan.rounds` counts: a loop whose trip count the data
    decide once, a branch as its longest side."""
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


def columns(string: str) -> int:
    """How many columns of a terminal a string takes."""
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in string)


def _named(sizes: dict[str, str]) -> list[str]:
    return [f"{name} ({size})" for name, size in sizes.items()]


def _items(items: Sequence[Item], shown: Outline, width: int) -> list[str]:
    lines: list[str] = []
    for item in items:
        if isinstance(item, Work):
            lines.append(f"  {SERVER}: {_said(item)}")
        elif isinstance(item, Round):
            head = f"round {item.number}" if item.number is not None else "no communication"
            inner = [line for visit in item.visits for line in _visit(visit, shown)]
            lines += _box(head, inner, width, "┌─┐│└┘")
        else:
            inner = []
            for part in item.parts:
                inner += [f"{part.label}:"] if part.label else []
                inner += _items(part.items, shown, width - 4) or ["  nothing"]
                inner += _passed_on(part, shown)
            lines += _box(item.label, inner, width, "╔═╗║╚╝")
    return lines


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
    """What loops within a loop leave with the client; of a visit, the visit says it."""
    return [
        f"  {shown.lanes[link.placement]} keeps {link.size.memory} of {_where(link.start, shown)}"
        f" {_until(link, shown)}"
        for link in shown.links
        if link.end is part and isinstance(link.start, Frame)
    ]


def _until(link: Link, shown: Outline) -> str:
    if isinstance(link.end, Part):
        ways = [f for f in frames(shown.items) if link.end in f.parts and f.kind == "cond"]
        return "for after the cond" if ways else "for the next pass"
    return f"for {_where(link.end, shown)}"


def _where(node: object, shown: Outline) -> str:
    if isinstance(node, Part):
        return "before"
    if isinstance(node, Frame):
        return f"the {node.label}"
    return next((f"round {r.number}" for r in rounds(shown.items) if node in r.visits), "later")


def rounds(items: Sequence[Item]) -> list[Round]:
    inner = [rounds(part.items) for f in items if isinstance(f, Frame) for part in f.parts]
    return [r for r in items if isinstance(r, Round)] + [r for found in inner for r in found]


def _said(work: Work) -> str:
    return f"{work.title} · {work.detail}" if work.title else work.detail


def _box(head: str, lines: Sequence[str], width: int, glyphs: str) -> list[str]:
    corner, bar, end, side, left, right = list(glyphs)
    top = f"{corner}{bar} {_fit(head, width - 6).rstrip()} "
    return [
        top + bar * (width - columns(top) - 1) + end,
        *(f"{side} {_fit(line, width - 4)} {side}" for line in lines),
        left + bar * (width - 2) + right,
    ]


def _fit(string: str, width: int) -> str:
    """Exactly so many columns: cut or padded."""
    if columns(string) > width:
        while columns(string) > width - 1:
            string = string[:-1]
        string += "…"
    return string + " " * (width - columns(string))


def _wrap(head: str, words: Sequence[str], between: str = ",", width: int = WIDTH) -> list[str]:
    lines = [head + words[0]] if words else []
    for word in words[1:]:
        lines[-1] += between
        if columns(f"{lines[-1]} {word}") < width:
            lines[-1] += f" {word}"
        else:
            lines.append(" " * max(2, columns(head)) + word)
    return lines
