"""The history of a run as JSON lines, one object per round, written during training."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedgrad.training.files import RunFolderError, write_whole
from fedgrad.training.history import History

FLUSH_SECONDS = 1.0
# JSON has no such numbers. Python's float() and JavaScript's Number() parse these strings.
NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


class Log:
    """Appends rounds to a file, which lags behind by at most about a second."""

    def __init__(self, path: Path, history: History) -> None:
        """Start with the rounds so far; drop later ones that a killed run wrote."""
        self.path = path
        write_whole(path, "".join(map(_line, history.rows())).encode())
        self.file = open(path, "a", encoding="utf-8")
        self.flushed = time.monotonic()

    def write(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Append a round."""
        try:
            self.file.write(_line({"round": round, **metrics}))
            if time.monotonic() - self.flushed > FLUSH_SECONDS:
                self.file.flush()
                self.flushed = time.monotonic()
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.file.close()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> RunFolderError:
        return RunFolderError.here(
            f"Cannot write {self.path}: {error.strerror}. The checkpoint is in a file of its own: "
            "make room and run it again to go on from there."
        )


def read_log(path: str | os.PathLike[str]) -> History:
    """Read the history from a log, even of a run in progress or killed while writing a line."""
    history = History()
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for line in lines[:-1]:  # what follows the last line break is empty or an incomplete line
        row = json.loads(line)
        history.record(row.pop("round"), {name: number(v) for name, v in row.items()})
    return history


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({name: plain(value) for name, value in row.items()}, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """Convert a number or an array to JSON; 32-bit floats are written exactly."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return NOT_FINITE.get(value, "NaN")
    return value


def number(value: Any) -> Any:
    """Invert `plain`."""
    if isinstance(value, list):
        return np.asarray([number(v) for v in value])
    return float(value) if isinstance(value, str) else value
