"""The folder of a search: search.json, a report, and the run folders of its trials.

Its files:

    search.json             the trials, their scores so far, the best one: `Standing`
    report.html             the same as a page, written by a function that reports registers
    rung-1/part-1/ ...      config.json, history.jsonl and the checkpoint of side-by-side trials
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedgrad.training import checkpoint
from fedgrad.training.cohort_schedule import Course
from fedgrad.training.config import describe
from fedgrad.training.files import SEARCH as NAME
from fedgrad.training.files import RunFolderError, make_folder, write_whole
from fedgrad.training.history import History
from fedgrad.training.live import harmless
from fedgrad.training.lock import locked
from fedgrad.training.loop import Played
from fedgrad.training.run_folder import Keeping, RunFolder

Report = Callable[[Path, "Standing", bool], object]
_reports: list[Report] = []


@dataclass(frozen=True)
class Standing:
    """The state of a search, finished or in progress."""

    objective: str
    maximize: bool
    tried: Mapping[str, np.ndarray]  # by dotted name, one value per trial
    scores: np.ndarray  # the latest score of each trial; NaN if it diverged
    rounds: np.ndarray
    best: int  # the index of the trial with the best score
    rungs: tuple[int, ...]  # the round at which each rung ends
    # By name: whether it was drawn on a logarithmic scale, if known.
    logarithmic: Mapping[str, bool] = field(default_factory=dict)
    versions: Mapping[str, str] = field(
        default_factory=lambda: {name: version(name) for name in ("fedgrad", "jax", "numpy")}
    )

    @property
    def over(self) -> bool:
        """Whether the trials that reached the last rung have been trained."""
        return int(self.rounds.max()) == self.rungs[-1]

    def json(self) -> dict[str, Any]:
        """Return this as JSON; non-finite numbers become null."""
        return {
            "objective": self.objective,
            "maximize": self.maximize,
            "tried": {name: values.tolist() for name, values in self.tried.items()},
            "scores": [s if np.isfinite(s) else None for s in self.scores.tolist()],
            "rounds": self.rounds.tolist(),
            "best": self.best,
            "rungs": list(self.rungs),
            "logarithmic": dict(self.logarithmic),
            "versions": dict(self.versions),
        }


def read(folder: str | os.PathLike[str]) -> Standing:
    """Read the state of a search from its folder, also while it is running."""
    path = Path(folder) / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        scores = [np.nan if score is None else score for score in found["scores"]]
        tried = {name: np.asarray(values) for name, values in found["tried"].items()}
        kept = {"tried": tried, "scores": np.array(scores, float), "rungs": tuple(found["rungs"])}
        return Standing(**{**found, **kept, "rounds": np.array(found["rounds"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError.here(
            f"{path} is not what a search writes: {error}. Name the folder that was given as out=."
        ) from error


@dataclass(frozen=True)
class SearchFolder:
    """The folder of a running search, if it has one."""

    folder: RunFolder | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(out: Any, settings: Mapping[str, Any]) -> "SearchFolder":
        """Convert the `out=` of the user."""
        if out is None or isinstance(out, RunFolder):
            return SearchFolder(out, settings)
        return SearchFolder(RunFolder(out), settings)

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder while entered. With several processes, only the first one does."""
        if self.folder is None or jax.process_index() != 0:
            return nullcontext()
        return locked(make_folder(self.folder.path))

    def begin(self, standing: Standing) -> None:
        """Write the initial search.json, or check that the one there is of the same search. The
        rounds may change, unless bad trials are stopped early: then other trials would have been
        stopped."""
        if self.folder is None:
            return
        path = Path(self.folder.path)
        if (run := checkpoint.newest(path)) is not None:
            raise RunFolderError.here(
                f"{path} holds a run ({run.name}), and a search is kept in a folder of its own. "
                f"Choose another one, such as out={str(path / 'search')!r}."
            )
        if self.folder.resume and (path / NAME).exists():
            if other := _differences(read(path), standing):
                raise RunFolderError.here(
                    f"{path} has another search:\n"
                    + "".join(f"  {line}.\n" for line in other)
                    + "To go on with that one, call it as it was called then. For a new one choose "
                    "another out=, or give out=fg.run_folder(..., resume=False) to write over it."
                )
            self._show(read(path), first=True)
            return
        self.write(standing, first=True)

    @contextmanager
    def part(
        self, name: str, course: Course, first: Played, end: int, trials: np.ndarray
    ) -> Iterator[tuple[Keeping, Played, History]]:
        """Open a run folder for some trials, and yield where they start or resume."""
        if self.folder is None:
            yield Keeping(), first, History()
            return
        config = {**self.folder.config, "search": {"trials": trials.tolist()}}
        settings = {**self.settings, "rounds": end, "planned": end, "config": config}
        where = replace(self.folder, path=Path(self.folder.path) / name, config=config)
        keeping = Keeping(where, describe(course, first.state, settings))
        try:
            found = keeping.begin(first.state, end)
            at = max(found.round, first.round)  # the initial state of a rung is saved as round 0
            yield keeping, Played(at, course.placed(found.state)), found.history
        finally:
            keeping.close()

    def write(self, standing: Standing, first: bool = False) -> None:
        """Write the current state of the search, and its report."""
        if self.folder is not None and jax.process_index() == 0:
            text = json.dumps(standing.json(), indent=1, allow_nan=False) + "\n"
            write_whole(make_folder(self.folder.path) / NAME, text.encode())
            self._show(standing, first)

    def _show(self, standing: Standing, first: bool) -> None:
        if self.folder is None or not self.folder.report or jax.process_index() != 0:
            return
        with harmless(Path(self.folder.path)):
            for report in _reports:
                report(Path(self.folder.path), standing, self.folder.open and first)


def _differences(old: Standing, new: Standing) -> list[str]:
    """List the differences between two searches as sentences."""
    facts: dict[str, tuple[Any, Any]] = {
        "objective": (old.objective, new.objective),
        "maximize": (old.maximize, new.maximize),
        "trials": (len(old.scores), len(new.scores)),
    }
    if len(old.rungs) + len(new.rungs) > 2:
        facts["rounds of the rungs"] = (old.rungs, new.rungs)
    if len(old.scores) == len(new.scores):  # another number of trials draws other values
        for name in {**old.tried, **new.tried}:
            values = [one.tried.get(name) for one in (old, new)]
            a, b = (["nothing"] * len(old.scores) if v is None else v.tolist() for v in values)
            first = next((i for i, value in enumerate(a) if value != b[i]), 0)
            facts[f"{name} of trial {first}"] = (a[first], b[first])
    return [f"{name}: {a} in the folder, {b} now" for name, (a, b) in facts.items() if a != b]


def reported_by(report: Report) -> Report:
    """Register the function that writes the report of a search, and opens it on request."""
    _reports[:] = [report]
    return report
