"""What an experiment leaves behind: numbers, and what is needed to draw them again."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fedgrad as fg


class ExperimentError(fg.FederatedError):
    """An experiment is unknown, or its results cannot be read."""


@dataclass(frozen=True)
class Results:
    """Settings and everything that was measured; figures, tables and claims are functions of it."""

    experiment: str
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]  # the names along the axes of the arrays, versions, seconds
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
        text = json.dumps(words, indent=2, ensure_ascii=False)
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
