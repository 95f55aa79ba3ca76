"""The results of an experiment: numbers, and the tables and claims derived from them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import fedgrad as fg


class ExperimentError(fg.FederatedError):
    """An experiment is unknown, or its results cannot be read."""


@dataclass(frozen=True)
class Results:
    """Settings and all measurements; figures, tables and claims are functions of them."""

    experiment: str
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]  # names along the axes of the arrays, versions, seconds
    arrays: Mapping[str, np.ndarray]

    def save(self, folder: Path) -> None:
        """Write `results.json` and `results.npz`."""
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / "results.npz", **self.arrays)  # type: ignore[arg-type]
        shapes = {name: list(array.shape) for name, array in self.arrays.items()}
        words = {
            "experiment": self.experiment,
            "settings": dict(self.settings),
            "facts": dict(self.facts),
            "arrays": shapes,
        }
        text = json.dumps(words, indent=2, ensure_ascii=False, default=str)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")


def load(folder: Path) -> Results:
    """Read what `Results.save` wrote."""
    try:
        words = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        with np.load(folder / "results.npz") as stored:
            arrays = {name: stored[name] for name in stored.files}
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        if shapes != words["arrays"]:
            raise ValueError("results.json and results.npz are of different runs")
        return Results(words["experiment"], words["settings"], words["facts"], arrays)
    except (OSError, ValueError, KeyError) as error:
        raise ExperimentError.here(
            f"There are no readable results in {folder}: {error}. Run the experiment there again."
        ) from error


@dataclass(frozen=True)
class Table:
    """Rows of words under a header; the first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Format the table for a terminal."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]

        def line(cells: Sequence[str]) -> str:
            first, *rest = zip(cells, widths, strict=True)
            return "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()

        ruled = "-" * len(line(["-" * w for w in widths]))
        return "\n".join([self.title, line(self.header), ruled, *map(line, self.rows)])

    def markdown(self) -> str:
        """Format the table for a page, which has the title in its text."""
        ruled = ["---", *["---:"] * (len(self.header) - 1)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (self.header, ruled, *self.rows))


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, whether it holds here, and the numbers that decide.

    `holds` is None if this experiment does not run what the statement is about, or, with
    `too_small`, if the run was too short or had too few seeds to decide.
    """

    statement: str
    holds: bool | None
    evidence: str
    too_small: bool = False

    @property
    def verdict(self) -> str:
        """The verdict in a few words."""
        if self.too_small:
            return "too small to decide"
        return {True: "holds", False: "DOES NOT HOLD", None: "not tested"}[self.holds]

    def undecided(self, why: str) -> "Claim":
        """Return the claim with its numbers, but without a verdict."""
        if self.holds is None:
            return self
        return replace(self, holds=None, too_small=True, evidence=f"{why} {self.evidence}")


def report(claims: Iterable[Claim]) -> str:
    """Format the claims as text, one paragraph each, and how many hold."""
    claims = list(claims)
    paragraphs = [f"[{c.verdict}] {c.statement}\n    {c.evidence}" for c in claims]
    return "\n".join([*paragraphs, f"{score(claims)}."])


def score(claims: Iterable[Claim]) -> str:
    """Summarize: `6 of 7 tested claims hold`."""
    claims = list(claims)
    tested = [claim.holds for claim in claims if claim.holds is not None]
    small = sum(claim.too_small for claim in claims)
    if small and not tested:
        return f"Too small to decide {small} of {len(claims)} claims"
    return f"{sum(tested)} of {len(tested)} tested claims hold"
