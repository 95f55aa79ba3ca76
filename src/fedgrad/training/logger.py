"""Callbacks that tell others every round of a run, under the names that its history has."""

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
    """Tells every round once, in order: those before a run was resumed too, and what is evaluated
    only because training stops. Of several processes the first one does."""

    def __init__(self) -> None:
        self.history: History | None = None
        self.told: tuple[int, set[str]] | None = None  # the last round, and the names that it had
        self.error: BaseException | None = None  # that ended training
        self.first = 0  # who has rounds before this one already is not told them again

    def begin(self, history: History, about: Mapping[str, Any]) -> None:
        """A run begins, or goes on after the rounds of `history`, which grows with it."""
        self.history, self.told, self.error = history, None, None
        if jax.process_index() == 0:
            self.open(about)

    def __call__(self, round: int, state: State, metrics: Metrics) -> None:
        """A round is over."""
        if self.history is None:
            self.begin(History(), {})
        if jax.process_index() == 0:
            self._catch_up(round - 1)
            self._tell(round, metrics.named())

    def failed(self, error: BaseException) -> None:
        """Training has raised; `close` comes next."""
        self.error = error

    def close(self) -> None:
        """Training is over."""
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
        """What was there before the first round that is told."""
        if self.told is None and self.history is not None:
            for row in (self.history if last is None else self.history.until(last)).rows():
                self._tell(row.pop("round"), row)

    def _tell(self, round: int, metrics: Mapping[str, Any]) -> None:
        self.told = round, set(metrics)
        if round >= self.first:
            self.write(round, numbers(metrics))

    @abstractmethod
    def open(self, about: Mapping[str, Any]) -> None:
        """A run begins. `about`: its algorithm, hyperparameters, ..."""

    @abstractmethod
    def write(self, round: int, values: Mapping[str, float]) -> None:
        """The numbers of a round, or more of them."""

    @abstractmethod
    def end(self) -> None:
        """There are no more; because of `self.error`, if there is one."""


@known_fields
class CSV(Logger):
    """A callback that writes a table with a row for each round, `fg.CSV("runs/1.csv")`, which
    follows the training by a second. What was not taken in a round is empty."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path, self.flushed = Path(path), 0.0
        self.file: Any = None
        self.table: Any = None

    def open(self, about: Mapping[str, Any]) -> None:
        """A run begins: with an empty file, so that what is wrong with it is known now."""
        self.names, self.rows = ["round"], list[dict[str, Any]]()
        self._write_all()

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """A row, or more of the last one."""
        more = bool(self.rows) and self.rows[-1]["round"] == round
        new = [name for name in values if name not in self.names]
        if more:
            self.rows[-1] |= values
        else:
            self.rows.append({"round": round, **values})
        if more or new:  # a file cannot be changed before its end
            self.names += new
            self._write_all()
        else:
            self.table.writerow(self.rows[-1])
            if time.monotonic() - self.flushed > FLUSH_SECONDS:
                self.file.flush()
                self.flushed = time.monotonic()

    def end(self) -> None:
        """Write what is left."""
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
