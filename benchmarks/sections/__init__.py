"""The sections of the benchmarks: each has `run(quick)`, `report(data)` and perhaps `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from sections import (
    compiling,
    derivatives,
    fit,
    flower,
    large,
    memory,
    mesh,
    paper_models,
    race,
    rounds,
    scaling,
    stored,
    tasks,
    tuning,
    weights,
)


class Section(Protocol):
    """Measures something; what it finds is JSON, and all that is reported is made from that."""

    def run(self, quick: bool) -> dict[str, Any]:
        """Measure; `quick` only shows that everything works."""

    def report(self, data: dict[str, Any]) -> str:
        """Markdown without a title."""


class Drawn(Section, Protocol):
    """A section with a figure."""

    def plot(self, data: dict[str, Any], folder: Path) -> None:
        """Write the figure that `report` refers to."""


SECTIONS: dict[str, tuple[str, Section]] = {
    "logistic": ("FedAvg on logistic regression", rounds.LOGISTIC),
    "ragged": ("FedAvg on a ragged cohort", rounds.RAGGED),
    "cnn": ("FedAvg on the EMNIST CNN", rounds.CNN),
    "tasks": ("Rounds of the paper's tasks", tasks),
    "weights": ("The same models, whoever trains them", weights),
    "fit": ("Training through fit", fit),
    "tuning": ("The cost of self-tuning", tuning),
    "race": ("The cost of a race", race),
    "derivatives": ("The cost of a derivative", derivatives),
    "memory": ("Memory of a derivative", memory),
    "large": ("A million parameters", large),
    "scaling": ("From 50 to 50,000 clients", scaling),
    "stored": ("Clients on disk", stored),
    "mesh": ("One and two devices", mesh),
    "flower": ("Rounds on a real federation", flower),
    "paper_models": ("The paper's models in full size", paper_models),
    "compile": ("Time to compile", compiling),
}
