"""The history of a run as curves."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedgrad.report.page import ReportError
from fedgrad.training.log import read_log


@dataclass(frozen=True)
class Series:
    """A number over rounds; not all rounds need to have it."""

    rounds: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def last(self) -> float:
        """The value of the last round that has one."""
        return self.values[-1]

    def at(self, round: int) -> float | None:
        """The value of a round, if it has one."""
        return dict(zip(self.rounds, self.values, strict=True)).get(round)


Curves = Mapping[str, Series]


def read(folder: Path) -> dict[str, Series]:
    """Every number in the history of a run folder; of a vector, each entry as `name[0]` ..."""
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
        rounds = tuple(int(r) for r in history.rounds(name))
        flat = np.asarray(values, float).reshape(len(rounds), -1)
        for i, column in enumerate(flat.T):
            key = name if values.ndim == 1 else f"{name}[{i}]"
            found[key] = Series(rounds, tuple(map(float, column)))
    return found
