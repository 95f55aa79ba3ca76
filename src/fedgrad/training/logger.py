"""Callbacks that log every round of a run, under the metric names of its history."""

import csv
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fedgrad.algorithms.metrics import Metrics
from fedgrad.core.errors import known_fields
from fedgrad.core.types import State
from fedgrad.training.files import RunFolderError
from fedgrad.training.history import History, numbers

FLUSH_SECONDS = 1.0


class Logger(ABC):
    """Logs every round once, in order.

    These include the rounds before a run was resumed, and evaluations made only because training
    stopped. With several processes, only the first one logs.
    """

    def __init__(self) -> None:
        self.history: History | None = None
        self.told: tuple[int, set[str]] | None = None  # the last round logged, and its metric names
        self.error: BaseException | None = None  # the one that ended training
        self.first = 0  # earlier rounds are already in the external log and are skipped

    def begin(self, history: History, about: Mapping[str, Any]) -> None:
        """Begin a run, or resume it after the rounds of `history`, which training extends."""
        self.history, self.told, self.error = history, None, None
        if jax.process_index() == 0:
            self.open(about)

    def __call__(self, round: int, state: State, metrics: Metrics) -> None:
        """Log a round."""
        if self.history is None:
            self.begin(History(), {})
        if jax.process_index() == 0:
            self._catch_up(round - 1)
            self._tell(round, metrics.named())

    def failed(self, error: BaseException) -> None:
        """Remember the exception that training raised; `close` follows."""
        self.error = error

    def close(self) -> None:
        """Log what is left, and end the run."""
        if self.history is not None and jax.process_index() == 0:
            self._catch_up(None)
            rows = self.history.rows()[-1:]
            if rows and self.told is not None and rows[0]["round"] == self.told[0]:
                late = {n: v for n, v in rows[0].items() if n not in {"round", *self.told[1]}}
                if late:
                    self._tell(self.told[0], late)
            self.end()
        self.history = None

    def _catch_up(self, last: int | None) -> None:
        """Log the rounds before the first one seen by this callback."""
        if self.told is None and self.history is not None:
            for row in (self.history if last is None else self.history.until(last)).rows():
                self._tell(row.pop("round"), row)

    def _tell(self, round: int, metrics: Mapping[str, Any]) -> None:
        self.told = round, set(metrics)
        if round >= self.first:
            self.write(round, numbers(metrics))

    @abstractmethod
    def open(self, about: Mapping[str, Any]) -> None:
        """Begin a run. `about` holds its algorithm, hyperparameters, ..."""

    @abstractmethod
    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a round, or further ones for the same round."""

    @abstractmethod
    def end(self) -> None:
        """End the run, which failed if `self.error` is set."""


@known_fields
class CSV(Logger):
    """A callback that writes a CSV table with a row for each round: `fg.CSV("runs/1.csv")`.

    The file lags behind training by at most about a second. Metrics not recorded in a round are
    empty.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path, self.flushed = Path(path), 0.0
        self.file: Any = None
        self.table: Any = None

    def open(self, about: Mapping[str, Any]) -> None:
        """Begin a run by creating an empty file, so that an unwritable path fails now."""
        self.names, self.rows = ["round"], list[dict[str, Any]]()
        self._write_all()

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Append a row, or add columns to the last one."""
        more = bool(self.rows) and self.rows[-1]["round"] == round
        new = [name for name in values if name not in self.names]
        if more:
            self.rows[-1] |= values
        else:
            self.rows.append({"round": round, **values})
        if more or new:  # rewrite the file: it can only be appended to
            self.names += new
            self._write_all()
        else:
            self.table.writerow(self.rows[-1])
            if time.monotonic() - self.flushed > FLUSH_SECONDS:
                self.file.flush()
                self.flushed = time.monotonic()

    def end(self) -> None:
        """Close the file."""
        self.file.close()
        self.file = None

    def _write_all(self) -> None:
        if self.file is not None:
            self.file.close()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "w", encoding="utf-8", newline="")
        except OSError as error:
            raise RunFolderError.here(f"Cannot write {self.path}: {error.strerror}.") from None
        self.table = csv.DictWriter(self.file, self.names)
        self.table.writeheader()
        self.table.writerows(self.rows)
        self.file.flush()
        self.flushed = time.monotonic()
