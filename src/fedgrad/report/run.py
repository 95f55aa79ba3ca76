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

from fedgrad.report import plans
from fedgrad.report.page import ReportError
from fedgrad.training.history import History
from fedgrad.training.log import read_log

LEARNED, FIXED = "learned", "fixed"


@dataclass(frozen=True)
class Run:
    """One run, or two that differ only in that one of them learns its hyperparameters."""

    folder: Path
    curves: Mapping[str, History]  # "learned" and "fixed"; the first is the one reported on
    config: Mapping[str, Any]  # config.json
    plans: Mapping[str, plans.KeptPlan]

    @property
    def main(self) -> str:
        """The run that is reported on."""
        return next(iter(self.curves))

    @property
    def asked(self) -> Mapping[str, Any]:
        """What `fedgrad tune` was asked for; nothing for another run."""
        found = (self.config.get("config") or {}).get("tune", {})
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
        curves = self.curves[name]
        return dict(zip(curves.rounds(key).tolist(), curves[key].tolist(), strict=True))

    @property
    def compared(self) -> bool:
        """Whether there is a run with nothing learned to compare with."""
        return len(self.curves) > 1

    @property
    def rounds(self) -> int:
        """Training rounds that were run."""
        curves = self.curves[self.main]
        return max(int(curves.rounds(key)[-1]) for key in curves)

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of what was learned."""
        return tuple(self.curves[self.main].under("hyper"))

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of what says how good the model is, evaluations first."""
        curves = self.curves[self.main]
        evaluated = [key for key in curves if key.startswith("eval.")]
        evaluated.sort(key=lambda key: not key.endswith("loss"))  # losses first
        return (*evaluated, *(["loss"] if "loss" in curves else []))

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
    if not curves[LEARNED].under("hyper"):
        curves = {FIXED: curves[LEARNED]}
    elif (folder / FIXED / "history.jsonl").exists():
        curves[FIXED] = _history(folder / FIXED)
    return Run(folder, curves, _json(folder / "config.json"), plans.kept(folder))


def _history(folder: Path) -> History:
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
    found = {}
    for name, values in history.items():
        rounds = history.rounds(name)
        for i, column in enumerate(np.asarray(values, float).reshape(len(rounds), -1).T):
            found[name if values.ndim == 1 else f"{name}[{i}]"] = (rounds, column)
    return History(found)


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
