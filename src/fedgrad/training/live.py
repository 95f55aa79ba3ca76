"""A run as it goes on, for those who look at it: status.json, and the report.

The room of reports is one that training does not know. It gives a
function that writes the report of a run (`reported_by`); when, is decided here.
"""

import json
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedgrad.core.errors import warn
from fedgrad.core.types import Params
from fedgrad.training.files import RunFolderError, now, write_whole
from fedgrad.training.history import History

NAME = "status.json"
SECONDS = 3.0  # between two reports, at least
SHARE = 50  # reporting may take one part in so many of the time


@dataclass(frozen=True)
class Status:
    """Where a run is, and what the history does not tell."""

    began: str  # ISO date and time
    rounds: int  # that were asked for
    parameters: int
    running: bool = True
    stopped: str | None = None  # why it ended before the last round, if it did
    written: str = ""  # ISO date and time


@dataclass(frozen=True)
class Seen:
    """A run as it is now: what a report is made of."""

    folder: Path
    history: History
    config: Mapping[str, Any]
    status: Status


Report = Callable[[Seen], Path]
_reports: list[Report] = []


def reported_by(report: Report) -> Report:
    """Let this function write the report of every run that has a folder, and say where it is."""
    _reports[:] = [report]
    return report


class Live:
    """Writes the status and the report of a run now and then; without a folder it is silent."""

    def __init__(
        self,
        folder: Path | None = None,
        config: Mapping[str, Any] = {},
        status: Status | None = None,
        report: bool = True,
        open: bool = False,
    ) -> None:
        self.folder, self.config, self.status = folder, config, status
        self.reports, self.open, self.due = report, open, 0.0

    def show(self, history: History) -> None:
        """A round is over: write the report if it is time to."""
        if self.status is not None and time.monotonic() >= self.due:
            self._write(history, self.status)

    def end(self, history: History, stopped: str | None) -> None:
        """Training is over, or was interrupted: then `stopped` says so."""
        if self.status is not None:
            self._write(history, replace(self.status, running=False, stopped=stopped))

    def _write(self, history: History, status: Status) -> None:
        if self.folder is None:
            return
        begin = time.monotonic()
        seen = Seen(self.folder, history, self.config, replace(status, written=now()))
        with harmless(self.folder) as failed:
            write_whole(self.folder / NAME, json.dumps(asdict(seen.status), indent=1).encode())
            for report in _reports if self.reports else ():
                path = report(seen)
                if self.open:
                    webbrowser.open(path.resolve().as_uri())
                    self.open = False
        if failed:
            self.status = None
        end = time.monotonic()
        self.due = end + max(SECONDS, SHARE * (end - begin))


@contextmanager
def harmless(folder: Path) -> Iterator[list[Exception]]:
    """Training does not end because nobody can look at it. Gives a list of what went wrong."""
    failed: list[Exception] = []
    try:
        yield failed
    except Exception as error:
        failed.append(error)
        if not isinstance(error, RunFolderError):
            warn(f"The report of {folder} cannot be written, training goes on: {error!r}")


def live(
    folder: Path,
    config: Mapping[str, Any],
    rounds: int,
    params: Params,
    history: History,
    report: bool,
    open: bool,
) -> Live:
    """What shows a run, which begins now or goes on, with a report that says so."""
    earlier = read_status(folder) if len(history) else None
    size = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params))
    status = Status(earlier.began if earlier else now(), rounds, size)
    shown = Live(folder, config, status, report, open)
    shown.show(history)
    shown.due = 0.0  # the first round is worth telling
    return shown


def read_status(folder: Path) -> Status | None:
    """What is written in a folder, if that is a status."""
    try:
        return Status(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
