"""The subject of a report: one run, two runs compared in one folder, or several from anywhere.

The files of a folder:

    config.json, history.jsonl, status.json, checkpoint   written by `fg.fit(..., out=folder)`
    fixed/                                                the same run with nothing learned
    plans.json, *-round.svg                               the plans of a training round, written
                                                          by `fedgrad tune`
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.metrics import Metrics
from fedgrad.reports.page import ReportError
from fedgrad.reports.plans_section import KeptPlan, kept
from fedgrad.reports.series import Curves, Series, of_history, trials_of
from fedgrad.training.fit import Result
from fedgrad.training.history import History
from fedgrad.training.live import Seen, Status, read_status
from fedgrad.training.log import plain, read_log

LEARNED, FIXED = "learned", "fixed"


@dataclass(frozen=True)
class Run:
    """One run, or several by name, of which the first is the main one."""

    entries: Mapping[str, Curves]
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json
    plans: Mapping[str, KeptPlan] = field(default_factory=dict)
    folder: Path | None = None
    status: Status | None = None  # if known
    trials: bool = False  # whether the entries are side-by-side trials

    @property
    def curves(self) -> Mapping[str, Mapping[str, Series]]:
        """The curves by the names of entry and metric."""
        return {name: curves.series for name, curves in self.entries.items()}

    @property
    def main(self) -> str:
        """The name of the main run."""
        return next(iter(self.entries))

    @property
    def tuned(self) -> bool:
        """Whether the run is compared with exactly one other: itself with nothing learned."""
        return self.folder is not None and list(self.entries) == [LEARNED, FIXED]

    @property
    def running(self) -> bool:
        """Whether training is still going on."""
        return self.status is not None and self.status.running

    @property
    def asked(self) -> Mapping[str, Any]:
        """The options of `fedgrad tune` or `train`; empty for other runs."""
        given = self.config.get("config")
        given = given if isinstance(given, Mapping) else {}
        found = given.get("tune") or given.get("train", {})
        return found if isinstance(found, Mapping) else {}

    def alone(self) -> "Run":
        """Return the main run without the ones it is compared with."""
        return replace(self, entries={self.main: self.entries[self.main]})

    def ends(self, key: str) -> tuple[int, dict[str, float]]:
        """Return the last round in which all runs have a value of this metric, and these values."""
        found = {name: self.by_round(name, key) for name in self.curves if key in self.curves[name]}
        last = max(set.intersection(*map(set, found.values())), default=0)
        return last, {name: values[last] for name, values in found.items() if last in values}

    def by_round(self, name: str, key: str) -> dict[int, float]:
        """Return the values of a metric of one run by round."""
        series = self.curves[name][key]
        return dict(zip(series.rounds.tolist(), series.values.tolist(), strict=True))

    @property
    def compared(self) -> bool:
        """Whether there are several runs."""
        return len(self.entries) > 1

    @property
    def rounds(self) -> int:
        """The number of training rounds completed."""
        return self.entries[self.main].last

    def metrics(self, name: str | None = None) -> Metrics:
        """Return the curves of a run, by default of the main one."""
        return self.entries[name or self.main].metrics

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The names of the evaluation metrics of all runs."""
        return tuple(dict.fromkeys(n for one in self.entries.values() for n in one.evaluated))

    @property
    def learned(self) -> tuple[str, ...]:
        """The names of the hyperparameters learned by any run."""
        return tuple(dict.fromkeys(n for e in self.entries.values() for n in e.metrics.hyper))

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of the metrics that measure the model, evaluations first."""
        evaluated = sorted(self.evaluated, key=lambda key: not key.endswith("loss"))  # losses first
        losses = any("loss" in series for series in self.curves.values())
        return (*evaluated, *(["loss"] if losses else []))

    def sent(self, name: str, rounds: int | None = None) -> int | None:
        """Return the bytes sent down and up by all clients in some rounds, if the plan is known."""
        if name not in self.plans:
            return None
        return sum(self.plans[name].sent()) * (self.rounds if rounds is None else rounds)


def read(folder: Path) -> Run:
    """Read the folder of a run; every file but the history is optional."""
    if not (folder / "history.jsonl").exists():
        raise ReportError.here(
            f"{folder} is not the folder of a run: it has no history.jsonl. Name the folder that "
            "was given as --out, or as fg.fit(..., out=...)."
        )
    history, config = _history(folder), _json(folder / "config.json")
    status = read_status(folder)
    if not len(history) and not (status and status.running):
        raise ReportError.here(
            f"{folder / 'history.jsonl'} has no rounds yet. Report again when the run has begun."
        )
    return _with_fixed(folder, _run(history, config, folder, status))


def now(seen: Seen) -> Run:
    """Return a run in progress, without reading its folder."""
    return _with_fixed(seen.folder, _run(seen.history, seen.config, seen.folder, seen.status))


def beside(seen: Seen) -> Run | None:
    """Return the learned run that this fixed run belongs to, with this one as it is now."""
    folder = seen.folder.parent
    if seen.folder.name != FIXED or not (folder / "history.jsonl").exists():
        return None
    whole = _run(_history(folder), _json(folder / "config.json"), folder, read_status(folder))
    return _with_fixed(folder, whole, seen)


def of_result(result: Result) -> Run:
    """Convert a result, which need not have a folder."""
    models = trials_of(result.history) or 1
    size = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(result.params)) // models
    status = Status("", result.rounds, size, running=False, stopped=result.stopped)
    learned = result.history.under("hyper")  # their first entries are the initial values
    hyper = {
        name: plain(np.asarray(learned[name][0] if name in learned else v))
        for name, v in names_of.paths(result.hyper).items()
    }
    config = {"algorithm": {"name": getattr(result, "name", "")}, "hyper": hyper}
    return _run(result.history, config, None, status)


def _run(
    history: History, config: Mapping[str, Any], folder: Path | None, status: Status | None
) -> Run:
    given = config.get("hyper")
    hyper = given if isinstance(given, Mapping) else {}
    entries = of_history(history, hyper)
    if trials := "" not in entries:
        return Run(entries, config, {}, folder, status, trials)
    name = LEARNED if entries[""].metrics.hyper else FIXED
    found = {} if folder is None else kept(folder)
    return Run({name: entries[""]}, config, found, folder, status)


def _with_fixed(folder: Path, found: Run, seen: Seen | None = None) -> Run:
    """Add the fixed run to compare with, if the folder has one."""
    other = folder / FIXED
    if found.main != LEARNED or not (other / "history.jsonl").exists():
        return found
    history = _history(other) if seen is None else seen.history
    status = read_status(other) if seen is None else seen.status
    entries = {**found.entries, FIXED: of_history(history)[""]}
    if status is not None and status.running and found.status is not None:
        found = replace(found, status=replace(found.status, running=True, written=status.written))
    return replace(found, entries=entries) if len(history) else found


def _history(folder: Path) -> History:
    path = folder / "history.jsonl"
    try:
        return read_log(path)
    except OSError as error:
        raise ReportError.here(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReportError.here(f"{path} is not the history of a run: {error!r}.") from None


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
