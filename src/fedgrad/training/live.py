"""Live view of a run: status.json and the report.

Training does not import the reports package. The latter registers a function that writes the report
of a run (`reported_by`); this module decides when to call it.
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
SHARE = 50  # writing reports may take 1/SHARE of the time


@dataclass(frozen=True)
class Status:
    """The progress of a run, with facts that the history does not hold."""

    began: str  # ISO date and time
    rounds: int  # requested
    parameters: int
    running: bool = True
    stopped: str | None = None  # the reason, if training ended before the last round
    written: str = ""  # ISO date and time


@dataclass(frozen=True)
class Seen:
    """A snapshot of a run, from which a report is made."""

    folder: Path
    history: History
    config: Mapping[str, Any]
    status: Status


Report = Callable[[Seen], Path]
_reports: list[Report] = []


def reported_by(report: Report) -> Report:
    """Register the function that writes the report of a run and returns its path."""
    _reports[:] = [report]
    return report


class Live:
    """Writes the status and the report of a run periodically; without a folder, does nothing."""

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
        """Write the report after a round, if it is due."""
        if self.status is not None and time.monotonic() >= self.due:
            self._write(history, self.status)

    def end(self, history: History, stopped: str | None) -> None:
        """Write the final report. `stopped` is the reason if training ended early."""
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
    """Keep errors of reporting from stopping training: suppress them, with a warning if they are
    unexpected. Yields a list of them."""
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
    """Start the live view of a run that begins or resumes, and write its first report."""
    earlier = read_status(folder) if len(history) else None
    size = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params))
    status = Status(earlier.began if earlier else now(), rounds, size)
    shown = Live(folder, config, status, report, open)
    shown.show(history)
    shown.due = 0.0  # also report the first round
    return shown


def read_status(folder: Path) -> Status | None:
    """Read the status from a folder; None if there is no valid one."""
    try:
        return Status(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
