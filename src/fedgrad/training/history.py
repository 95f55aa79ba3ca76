"""The metrics of a run, round by round, as arrays."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedgrad.core.errors import FederatedError, needs, public
from fedgrad.training import per_client
from fedgrad.training.result_curves import curves

SHOWN = 20  # metrics in a repr, at most


class MetricError(FederatedError, KeyError):
    """Raised when a metric is not in the history, or does not fit its earlier values."""

    __str__ = Exception.__str__  # KeyError would put quotes around the message


@public
class History(Mapping[str, np.ndarray]):
    """Metrics by name: `history["loss"]` has one entry for each round along its first axis.

    Rounds are counted from 1. A metric that is not recorded in every round, such as that of an
    evaluation, has its own `history.rounds(name)`. Side-by-side trials are a second axis.
    """

    def __init__(self, columns: Mapping[str, tuple[Any, Any]] = {}) -> None:
        self._columns = {
            name: _Column(np.asarray(r), np.asarray(v)) for name, (r, v) in columns.items()
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._column(name).values

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __repr__(self) -> str:
        shown = [f"{name}{list(v.shape)}" for name, v in list(self.items())[:SHOWN]]
        if len(self) > SHOWN:
            shown.append(f"and {len(self) - SHOWN} more")
        return f"History({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return curves(self.columns())

    def rounds(self, name: str) -> np.ndarray:
        """Return the rounds in which a metric was recorded."""
        return self._column(name).rounds

    def under(self, name: str) -> dict[str, np.ndarray]:
        """Return all metrics below a prefix: `history.under("hyper")["server.learning_rate"]`."""
        start = f"{name}."
        return {n.removeprefix(start): v for n, v in self.items() if n.startswith(start)}

    def columns(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return, for each metric, the rounds in which it was recorded and its values."""
        return {name: (column.rounds, column.values) for name, column in self._columns.items()}

    def until(self, round: int) -> "History":
        """Return the history up to and including a round."""
        kept = self.columns().items()
        return History({name: (r[r <= round], v[r <= round]) for name, (r, v) in kept})

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict for each round, with its number and the metrics recorded in it."""
        found: dict[int, dict[str, Any]] = {}
        for name, values in self.items():
            for round, value in zip(self.rounds(name).tolist(), values, strict=True):
                found.setdefault(round, {"round": round})[name] = value
        return [found[round] for round in sorted(found)]

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a row for each round and a column for each metric.

        Side-by-side trials have columns `loss/0`, `loss/1`, ... The percentiles of clients are left
        out, since they are a hundred numbers each. Metrics not recorded in a round are NaN.
        """
        with needs("history.to_pandas()", "pandas"):
            import pandas
        rows = [numbers(row) for row in self.rows()]
        names = ["round", *dict.fromkeys(n for row in rows for n in row if n != "round")]
        frame = pandas.DataFrame(rows, columns=names).astype({"round": int})
        return frame.set_index("round")

    def record(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a round. Only `fg.fit` calls this."""
        for name, value in metrics.items():
            value = np.asarray(value)
            if name not in self._columns:
                self._columns[name] = _Column(
                    np.empty(0, np.int64), np.empty((0, *value.shape), value.dtype)
                )
            self._columns[name].append(name, round, value)

    def _column(self, name: str) -> "_Column":
        if name not in self._columns:
            raise MetricError.here(f"There is no metric {name!r} in this history.", name, self)
        return self._columns[name]


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Flatten metrics to named numbers; side-by-side trials become `loss/0`, `loss/1`, ...
    Percentiles of clients, which only serve for histograms, are left out."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if per_client.is_for_a_histogram(name):
            continue
        values = np.asarray(value)
        for i, one in enumerate(values.ravel()):
            found[f"{name}/{i}" if values.ndim else name] = float(one)
    return found


class _Column:
    """An array with amortized constant-time append, instead of one copy per round.

    Its dtype is widened if needed to hold every number exactly.
    """

    def __init__(self, rounds: np.ndarray, values: np.ndarray) -> None:
        self._rounds, self._values, self._size = rounds, values, len(rounds)

    @property
    def rounds(self) -> np.ndarray:
        return _read_only(self._rounds[: self._size])

    @property
    def values(self) -> np.ndarray:
        return _read_only(self._values[: self._size])

    def append(self, name: str, round: int, value: np.ndarray) -> None:
        if value.shape != self._values.shape[1:]:
            raise MetricError.here(
                f"The metric {name!r} has shape {value.shape} in round {round}, and had "
                f"{self._values.shape[1:]} before. Give it the same shape in every round."
            )
        if value.dtype != self._values.dtype:
            self._widen(name, round, value)
        if self._size == len(self._rounds):
            self._rounds, self._values = _grown(self._rounds), _grown(self._values)
        self._rounds[self._size], self._values[self._size] = round, value
        self._size += 1  # last, so that an interrupt before this leaves the column unchanged

    def _widen(self, name: str, round: int, value: np.ndarray) -> None:
        """Widen the dtype to hold a value of another one; refuse if a number would change."""
        dtype = np.result_type(self._values.dtype, value.dtype)
        if not all(_fits(x, dtype) for x in (self._values[: self._size], value)):
            raise MetricError.here(
                f"The metric {name!r} is {value.dtype} in round {round}, and was "
                f"{self._values.dtype} before. Some of these integers are too large for a float, "
                "which both would have to be. Give floats, or integers, in every round."
            )
        wider = np.zeros(self._values.shape, dtype)  # what is beyond the size is no number yet
        wider[: self._size] = self._values[: self._size]
        self._values = wider


def _fits(values: np.ndarray, dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is exact for these numbers; large integers lose digits in floats."""
    if values.dtype.kind not in "iu" or dtype.kind != "f":
        return True
    # Compare Python integers: a float that was rounded up may exceed every integer of the dtype.
    return bool(np.all(values.astype(dtype).astype(object) == values.astype(object)))


def _grown(old: np.ndarray) -> np.ndarray:
    new = np.empty((max(64, 2 * len(old)), *old.shape[1:]), old.dtype)
    new[: len(old)] = old
    return new


def _read_only(view: np.ndarray) -> np.ndarray:
    view.flags.writeable = False
    return view
