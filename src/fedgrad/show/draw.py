"""Draws a plan: time runs to the right, the server is on top, with one lane per placement.

Horizontal positions come first (`_Columns`): the widths decide which links need a detour below
their lane, and the detours decide how high the lanes are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import quoteattr

from fedgrad.core.graph import SERVER
from fedgrad.planning.plan import Plan
from fedgrad.show.naming import Work
from fedgrad.show.outline import Frame, Item, Link, Outline, Part, Round, Size, Visit, outline
from fedgrad.show.pen import Pen, document, in_a_page, text_width
from fedgrad.show.text import summary

BOX, LINE, GUTTER, INSET, PAD, SLOT, TRACK = 42, 15, 22, 11, 12, 96, 28
LONGEST = 26  # characters of a name before it is shortened; the tooltip has the full name


def svg(plan: Plan) -> str:
    """Return the federated graph of a plan as a self-contained SVG."""
    return _Picture(plan, outline(plan)).document()


def html(plan: Plan) -> str:
    """Return the federated graph of a plan as HTML for a notebook."""
    return in_a_page(svg(plan))


def shortened(name: str, most: int = LONGEST) -> str:
    return name if len(name) <= most else name[: most // 2] + "…" + name[-(most // 2 - 1) :]


@dataclass
class _Columns:
    """The horizontal positions of everything in the drawing."""

    shown: Outline
    x: float
    spans: dict[object, tuple[float, float]] = field(default_factory=dict)
    column: dict[Visit, tuple[float, float]] = field(default_factory=dict)
    depth: dict[Frame, int] = field(default_factory=dict)

    def place(self, items: Sequence[Item], depth: int = 0) -> None:
        linked = bool(self.shown.links)
        for before, item in zip([None, *items], items, strict=False):
            if before is not None and not isinstance(before, Work) and not isinstance(item, Work):
                self.x += SLOT if linked else 2 * PAD
            if isinstance(item, Work):
                wide = max(_box_width(item), SLOT - 2 * PAD if linked else 0)
                self.take(item, wide, PAD)
            elif isinstance(item, Round):
                self.round(item)
            else:
                self.frame(item, depth)

    def take(self, node: object, wide: float, margin: float = 0) -> None:
        self.spans[node] = (self.x + margin, self.x + margin + wide)
        self.x += wide + 2 * margin

    def round(self, item: Round) -> None:
        """Give lower lanes wider boxes, so that their arrows pass outside the boxes above."""
        order = list(self.shown.lanes)
        visits = sorted(item.visits, key=lambda v: order.index(v.placement))
        inner = max(_visit_width(v) - 2 * GUTTER * i for i, v in enumerate(visits))
        start, most = self.x + PAD, len(visits) - 1
        self.take(item, inner + 2 * GUTTER * most + 2 * PAD)
        for i, visit in enumerate(visits):
            left = start + GUTTER * (most - i)
            self.spans[visit] = (left, left + inner + 2 * GUTTER * i)
            self.column[visit] = self.spans[item]

    def frame(self, item: Frame, depth: int) -> None:
        self.depth[item] = depth
        start = self.x = self.x + PAD
        for i, part in enumerate(item.parts):
            head = f"{item.label}: {part.label}" if i == 0 else part.label
            begin, links = self.x, self.shown.links
            self.x += SLOT / 2 if any(link.start is part for link in links) else 2 * PAD
            self.place(part.items, depth + 1)
            self.x += SLOT if any(link.end is part for link in links) else 2 * PAD
            self.x = max(self.x, begin + text_width(head, 12, bold=True) + 2 * PAD)
            self.spans[part] = (begin, self.x)
        self.spans[item] = (start, self.x)
        self.x += PAD


def _box_width(work: Work) -> float:
    title = text_width(shortened(work.title), 12)
    return max(title, text_width(work.detail, 11), 40) + 2 * PAD


def _visit_width(visit: Visit) -> float:
    labels = sum(_label_width(size) + 18 for size in (visit.down, visit.up) if size)
    own = text_width(shortened(", ".join(visit.own)), 11) + 40 if visit.own else 0
    return max(_box_width(visit.work), labels + 2 * INSET, own, 110)


def _label_width(size: Size) -> float:
    return max(text_width(size.count, 11), text_width(size.memory, 11))


@dataclass
class _Picture(Pen):
    plan: Plan
    shown: Outline

    def document(self) -> str:
        shown, lanes = self.shown, list(self.shown.lanes)
        self.color = {lane: f"p{0 if i == 0 else (i - 1) % 4 + 1}" for i, lane in enumerate(lanes)}
        names = {lane: _ends(shown.arguments[lane]) for lane in lanes}
        gives = {lane: _ends(shown.results[lane]) for lane in lanes}
        heads = [text_width(shown.lanes[lane], 13, bold=True) for lane in lanes]
        self.left = 2 * PAD + max(heads + [_widest(names[lane]) + 34 for lane in lanes]) + PAD
        at = self.at = _Columns(shown, self.left + 2 * PAD)
        at.place(shown.items)
        self.right = at.x + (SLOT if any(link.end is None for link in shown.links) else 3 * PAD)
        caption = summary(self.plan, shown)
        captions = max(text_width(line, 11.5) for line in caption) + 4 * PAD
        width = self.right + max(_widest(gives[lane]) for lane in lanes) + 3 * PAD
        width = math.ceil(max(width, captions, text_width(self.plan.name, 16, bold=True) + 4 * PAD))
        deepest = max(at.depth.values(), default=-1) + 1
        self.head = 46 + 16 * len(caption) + PAD
        y = self.top = self.head + 22 * deepest + 24
        self.y: dict[str, float] = {}  # the vertical center of the boxes of each lane
        tracks = {lane: self.detours(lane) for lane in lanes}
        for lane in lanes:
            more = LINE * max(0, len(names[lane]) - 2, len(gives[lane]) - 2)
            below = 0 if lane == SERVER else 30 + TRACK * len(set(tracks[lane].values()))
            high = BOX + 2 * PAD + max(below, more)
            self.y[lane] = y + PAD + BOX / 2
            self.rect("lane", PAD, y, width - 2 * PAD, high, 8)
            self.rect(self.color[lane], PAD, y, 4, high, 2)
            self.ends(lane, names[lane], gives[lane], y)
            y += high + 46
        self.bottom = y - 46 + PAD
        self.messages(shown.items)
        for link in shown.links:
            self.link(link, tracks[link.placement].get(link))
        height = math.ceil(self.bottom + 10 * deepest + PAD)
        self.write(2 * PAD, 30, self.plan.name, 16, "ink", bold=True)
        for i, line in enumerate(caption):
            self.write(2 * PAD, 50 + 16 * i, line, 11.5, "quiet")
        title = f"Federated graph of {self.plan.name}"
        parts = [*self.ground, *self.lines, *self.front]
        return document(width, height, title, ". ".join(caption), parts)

    # --- drawing ---------------------------------------------------------------------------

    def ends(self, lane: str, names: list[str], gives: list[str], top: float) -> None:
        """Write the lane's heading and arguments on the left and its results on the right."""
        self.write(2 * PAD + 4, top + 22, self.shown.lanes[lane], 13, self.color[lane], bold=True)
        y, first = self.y[lane], top + 42
        for i, name in enumerate(names):
            self.write(2 * PAD + (22 if lane != SERVER else 4), first + LINE * i, name, 11, "ink")
        if names and lane != SERVER:
            self.store(2 * PAD + 5, first - 10, self.color[lane])
        if lane == SERVER:
            # Branches are drawn side by side, but nothing flows from one to the next.
            ways = [f for f in self.at.depth if f.kind == "cond"]
            starts = sorted(self.at.spans[part][0] for f in ways for part in f.parts[1:])
            for x, end in zip([self.left, *starts], [*starts, self.right], strict=True):
                cut, stop = PAD * (x != self.left), PAD * (end != self.right)
                arrow = bool(stop or gives)
                self.line([(x + cut, y), (end - stop, y)], self.color[lane], arrow)
        lowest = y + 4 - LINE * (min(len(gives), 2) - 1) / 2
        for i, name in enumerate(gives):
            self.write(self.right + 8, lowest + LINE * i, name, 11, "ink")

    def messages(self, items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, Work):
                self.box(item, *self.at.spans[item], SERVER)
            elif isinstance(item, Round):
                left, right = self.at.spans[item]
                if item.number is not None:
                    x, high = (left + right) / 2, self.bottom - self.top + 18
                    self.rect("round", left, self.top - 22, right - left, high)
                    self.write(x, self.top - 7, f"round {item.number}", 11.5, "quiet", "middle")
                for visit in item.visits:
                    self.visit(visit)
            else:
                self.frame(item)

    def visit(self, visit: Visit) -> None:
        (left, right), lane = self.at.spans[visit], visit.placement
        y, color, server = self.y[lane], self.color[lane], self.y[SERVER]
        self.box(visit.work, left, right, lane)
        label = y - BOX / 2 - PAD - 30  # in the space above the lane
        if visit.down:
            x = left + INSET
            self.line([(x, server), (x, y - BOX / 2)], color)
            self.dot(x, server, color)
            self.sizes(x + 7, label, visit.down, "start")
        if visit.up:
            x = right - INSET
            self.line([(x, y - BOX / 2), (x, server + 9)], color)
            self.sum(x, server, color)
            self.sizes(x - 7, label, visit.up, "end")
        if visit.own:
            x, below = (left + right) / 2, y + BOX / 2
            name = shortened(", ".join(visit.own))
            start = x - text_width(name, 11) / 2 - 2
            self.line([(start, below + 14), (start, below)], color)
            self.store(start - 5.5, below + 14, color)
            self.write(start + 11, below + 24, name, 11, "ink")

    def frame(self, frame: Frame) -> None:
        depth = self.at.depth[frame]
        left, right = self.at.spans[frame]
        top = self.head + 22 * depth
        low = self.bottom + 2 + 10 * (max(self.at.depth.values()) - depth)
        self.ground.append(
            f'<rect class="stroke-line" data-frame={quoteattr(frame.label)} fill="none" '
            f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
            f'height="{low - top:.1f}" rx="6" stroke-width="1.3"/>'
        )
        for i, part in enumerate(frame.parts):
            begin, _ = self.at.spans[part]
            words = [frame.label] * (i == 0) + [part.label] * bool(part.label)
            self.write(begin + PAD, top + 16, ": ".join(words), 12, "ink", bold=True)
            if i:
                self.line([(begin, top), (begin, low)], "line", arrow=False, dash=True)
            self.messages(part.items)

    def link(self, link: Link, track: int | None) -> None:
        """Draw what a client keeps: straight to the next box, or below the boxes in between."""
        start, end = self.reach(link)
        y, color = self.y[link.placement], self.color[link.placement]
        stays = link.end is None
        path = [(start, y), (end, y)]
        if track is not None:
            below, low = y + BOX / 2, y + BOX / 2 + 38 + TRACK * track
            path = [(start, low)]
            if isinstance(link.start, Visit):
                x = start - INSET - 6 * track
                path = [(x, below), (x, low)]
            if isinstance(link.end, Visit):
                path += [(end + INSET, low), (end + INSET, below)]
            else:
                path += [(end - INSET, low), (end - INSET, y), (end, y)]
            y = low
        self.line(path, color, dash=not stays)
        if isinstance(link.start, Part):
            return  # the link at the other end of this iteration is labeled with the size
        column = self.at.column[link.start] if isinstance(link.start, Visit) else (start, start)
        x = column[1] + SLOT / 2
        self.write(x, y - 4, "result" if stays else "keeps", 10.5, "quiet", "middle")
        self.write(x, y + 12, link.size.memory, 10.5, "ink", "middle")

    def reach(self, link: Link) -> tuple[float, float]:
        start = self.at.spans[link.start][0 if isinstance(link.start, Part) else 1]
        if link.end is None:
            return start, self.right
        return start, self.at.spans[link.end][1 if isinstance(link.end, Part) else 0]

    def detours(self, lane: str) -> dict[Link, int]:
        """Map each link that has a box in its way to the first free track below the lane."""
        links = [link for link in self.shown.links if link.placement == lane]
        ends = {end for link in links for end in (link.start, link.end) if isinstance(end, Frame)}
        boxes = [
            span
            for node, span in self.at.spans.items()
            if node in ends or (isinstance(node, Visit) and node.placement == lane)
        ]
        found: dict[Link, int] = {}
        for link in links:
            start, end = self.reach(link)
            if any(start < left and right < end for left, right in boxes):
                taken = {
                    track
                    for other, track in found.items()
                    if self.reach(other)[0] < end + SLOT and start < self.reach(other)[1] + SLOT
                }
                found[link] = next(i for i in range(len(found) + 1) if i not in taken)
        return found

    # --- strokes --------------------------------------------------------------------------

    def box(self, work: Work, left: float, right: float, lane: str) -> None:
        y, middle = self.y[lane], (left + right) / 2
        self.rect("box", left, y - BOX / 2, right - left, BOX, 5, self.color[lane], work.title)
        if work.title:
            self.write(middle, y - 3, shortened(work.title), 12, "ink", "middle", mono=True)
        self.write(middle, y + (13 if work.title else 4), work.detail, 11, "quiet", "middle")

    def sizes(self, x: float, y: float, size: Size, anchor: str) -> None:
        self.write(x, y, size.count, 11, "ink", anchor)
        self.write(x, y + 13, size.memory, 11, "quiet", anchor)


def _ends(sizes: dict[str, str]) -> list[str]:
    lines = [f"{shortened(name, 20)} · {size}" for name, size in sizes.items()]
    return lines if len(lines) <= 4 else [*lines[:3], f"and {len(lines) - 3} more"]


def _widest(lines: Sequence[str]) -> float:
    return max((text_width(line, 11) for line in lines), default=0)
