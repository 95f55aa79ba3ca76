"""What a run folder holds, read for its report.

config.json, history.jsonl, checkpoint   written by `fg.fit(..., out=folder)`
fixed/                                   the same run with nothing learned
plans.json, *-round.svg                  the plans of a training round, by `fedgrad tune`
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedgrad.algorithms.metrics import Metrics
from fedgrad.report import plans
from fedgrad.report.page import ReportError
from fedgrad.training.log import read_log

LEARNED, FIXED = "learned", "fixed"


@dataclass(frozen=True, eq=False)
class Series:
    """A number over rounds; not all rounds need to have it."""

    rounds: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Run:
    """One run, or two that differ only in that one of them learns its hyperparameters."""

    folder: Path
    curves: Mapping[str, Mapping[str, Series]]  # of "learned" and "fixed", the main one first
    config: Mapping[str, Any]  # config.json
    plans: Mapping[str, plans.KeptPlan]

    @property
    def main(self) -> str:
        """The run that is reported on."""
        return next(iter(self.curves))

    @property
    def asked(self) -> Mapping[str, Any]:
        """What `fedgrad tune` or `train` was asked for; nothing for another run."""
        asked = self.config.get("config") or {}
        found = asked.get("tune") or asked.get("train", {})
        return found if isinstance(found, Mapping) else {}

    def alone(self) -> "Run":
        """The same without the run to compare with."""
        return replace(self, curves={self.main: self.curves[self.main]})

    def ends(self, key: str) -> tuple[int, dict[str, float]]:
        """The last round that all runs have a value of, and these values."""
        found = {name: self.by_round(name, key) for name in self.curves if key in self.curves[name]}
        last = max(set.intersection(*map(set, found.values())), default=0)
        return last, {name: values[last] for name, values in found.items() if last in values}

    def by_round(self, name: str, key: str) -> dict[int, float]:
        """The values of a metric in one of the runs."""
        series = self.curves[name][key]
        return dict(zip(series.rounds.tolist(), series.values.tolist(), strict=True))

    @property
    def compared(self) -> bool:
        """Whether there is a run with nothing learned to compare with."""
        return len(self.curves) > 1

    @property
    def rounds(self) -> int:
        """Training rounds that were run."""
        return max(int(series.rounds[-1]) for series in self.curves[self.main].values())

    def metrics(self, name: str | None = None) -> Metrics:
        """The curves of a run, by default of the one that is reported on."""
        return Metrics.of(self.curves[name or self.main])

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The names of what evaluations gave."""
        return tuple(Metrics(eval=self.metrics().eval).named())

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of what was learned."""
        return tuple(self.metrics().hyper)

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of what says how good the model is, evaluations first."""
        evaluated = sorted(self.evaluated, key=lambda key: not key.endswith("loss"))  # losses first
        return (*evaluated, *Metrics(loss=self.metrics().loss).named())

    def sent(self, name: str, rounds: int | None = None) -> int | None:
        """Bytes down and up of all clients in so many training rounds, if the plan is known."""
        if name not in self.plans:
            return None
        return sum(self.plans[name].sent()) * (self.rounds if rounds is None else rounds)


def read(folder: Path) -> Run:
    """Read the folder of a run; what is missing besides the history is left out."""
    if not (folder / "history.jsonl").exists():
        raise ReportError.here(
            f"{folder} is not the folder of a run: it has no history.jsonl. Name the folder that "
            "was given as --out, or as fg.fit(..., out=...)."
        )
    curves = {LEARNED: _history(folder)}
    if not Metrics.of(curves[LEARNED]).hyper:
        curves = {FIXED: curves[LEARNED]}
    elif (folder / FIXED / "history.jsonl").exists():
        curves[FIXED] = _history(folder / FIXED)
    return Run(folder, curves, _json(folder / "config.json"), plans.kept(folder))


def _history(folder: Path) -> dict[str, Series]:
    """Every number in the history of a run; of a vector, each entry as `name[0]` ..."""
    path = folder / "history.jsonl"
    try:
        history = read_log(path)
    except OSError as error:
        raise ReportError.here(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReportError.here(f"{path} is not the history of a run: {error!r}.") from None
    if not len(history):
        raise ReportError.here(f"{path} has no rounds yet. Report again when the run has begun.")
    found: dict[str, Series] = {}
    for name, values in history.items():
        rounds = history.rounds(name)
        for i, column in enumerate(np.asarray(values, float).reshape(len(rounds), -1).T):
            found[name if values.ndim == 1 else f"{name}[{i}]"] = Series(rounds, column)
    return found


def _json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError.here(f"{path} cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise ReportError.here(f"{path} is not an object of JSON.")
    return found
