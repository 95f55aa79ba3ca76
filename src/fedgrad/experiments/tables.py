"""Small tables, for a terminal and for a page."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of words under a header; the first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """For a terminal."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]

        def line(cells: Sequence[str]) -> str:
            first, *rest = zip(cells, widths, strict=True)
            return "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()

        ruled = "-" * len(line(["-" * w for w in widths]))
        return "\n".join([self.title, line(self.header), ruled, *map(line, self.rows)])

    def markdown(self) -> str:
        """For a page; the title is left to its text."""
        ruled = ["---", *["---:"] * (len(self.header) - 1)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.header, ruled, *self.rows))
