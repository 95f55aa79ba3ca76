"""The metrics of a history as curves: of one run, of side-by-side trials, or over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgrad.algorithms.metrics import Metrics
from fedgrad.show.numbers import short
from fedgrad.training.history import History
from fedgrad.training.per_client import PREFIX

SPREAD = f".{PREFIX}."
_PERCENTILES = ".percentiles"


@dataclass(frozen=True, eq=False)
class Series:
    """A number over rounds, not necessarily all of them. If it is a mean over seeds, `band` holds
    the lowest and the highest values."""

    rounds: np.ndarray
    values: np.ndarray
    band: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True, eq=False)
class Spread:
    """The values of a hundred clients over rounds, in ascending order."""

    rounds: np.ndarray
    values: np.ndarray  # evaluations x clients


@dataclass(frozen=True)
class Curves:
    """All curves of a run by name, and the distributions of metrics over clients."""

    series: Mapping[str, Series]
    spreads: Mapping[str, Spread]
    seeds: int = 1

    @property
    def metrics(self) -> Metrics:
        """The curves as `Metrics`."""
        return Metrics.of(self.series)

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The names of the evaluation metrics over all examples."""
        named = Metrics(eval=self.metrics.eval).named()
        return tuple(name for name in named if SPREAD not in name)

    @property
    def last(self) -> int:
        """The last round."""
        return max((int(s.rounds[-1]) for s in self.series.values()), default=0)

    @property
    def seconds(self) -> float | None:
        """The duration of all rounds; None for a mean over seeds."""
        found = self.metrics.seconds
        return None if found is None or self.seeds > 1 else float(np.sum(found.values))


def of_history(history: History, hyper: Mapping[str, Any] = {}) -> dict[str, Curves]:
    """Return the curves of a run, named "", or of each of its side-by-side trials.

    Trials are named by the hyperparameters in which they differ. `hyper` holds the initial ones by
    dotted name.
    """
    trials = trials_of(history)
    if trials is None:
        return {"": _curves({name: (history.rounds(name), v) for name, v in history.items()})}
    names = trial_names(hyper, trials)
    return {
        name: _curves({n: (history.rounds(n), _of(v, i, trials)) for n, v in history.items()})
        for i, name in enumerate(names)
    }


def trial_names(hyper: Mapping[str, Any], trials: int) -> list[str]:
    """Name trials by the values that differ: `server.learning_rate 0.1, server.momentum 0.9`."""
    vectors = {n: v for n, v in hyper.items() if np.ndim(v) == 1 and len(v) == trials}
    differ = {n: v for n, v in vectors.items() if len(set(map(float, v))) > 1}
    names = [
        ", ".join(f"{n} {short(float(v[i]))}" for n, v in differ.items()) for i in range(trials)
    ]
    return names if len(set(names)) == trials else [f"trial {i + 1}" for i in range(trials)]


def together(runs: Sequence[Curves]) -> Curves:
    """Combine several seeds: the means over rounds that all have, with their range. The clients of
    all seeds are pooled into one distribution."""
    if len(runs) == 1:
        return runs[0]
    names = [n for n in runs[0].series if all(n in run.series for run in runs)]
    spreads = [n for n in runs[0].spreads if all(n in run.spreads for run in runs)]
    return Curves(
        {name: _mean([run.series[name] for run in runs]) for name in names},
        {name: _pooled([run.spreads[name] for run in runs]) for name in spreads},
        len(runs),
    )


def trials_of(history: History) -> int | None:
    """Return the number of side-by-side trials, or None for a single run."""
    loss = history.get("loss")
    return int(loss.shape[1]) if loss is not None and loss.ndim == 2 else None


def _of(values: np.ndarray, trial: int, trials: int) -> np.ndarray:
    return values[:, trial] if values.ndim > 1 and values.shape[1] == trials else values


def _curves(columns: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Curves:
    series: dict[str, Series] = {}
    spreads: dict[str, Spread] = {}
    for name, (rounds, values) in columns.items():
        values = np.asarray(values, float)
        if SPREAD in name and name.endswith(_PERCENTILES):
            spreads[name.removesuffix(_PERCENTILES)] = Spread(rounds, values)
            continue
        for i, column in enumerate(values.reshape(len(rounds), -1).T):
            series[name if values.ndim == 1 else f"{name}, entry {i + 1}"] = Series(rounds, column)
    losses_first = sorted(spreads, key=lambda name: not name.endswith("loss"))
    return Curves(series, {name: spreads[name] for name in losses_first})


def _mean(several: Sequence[Series]) -> Series:
    rounds = sorted(set.intersection(*(set(s.rounds.tolist()) for s in several)))
    values = np.array([s.values[np.isin(s.rounds, rounds)] for s in several])
    return Series(np.asarray(rounds), values.mean(0), (values.min(0), values.max(0)))


def _pooled(several: Sequence[Spread]) -> Spread:
    rounds = sorted(set.intersection(*(set(s.rounds.tolist()) for s in several)))
    values = np.concatenate([s.values[np.isin(s.rounds, rounds)] for s in several], axis=1)
    return Spread(np.asarray(rounds), np.sort(values, axis=1))


def tenth_of(curves: Curves, spread: str, higher_is_better: bool) -> Series | None:
    """Return the mean over the tenth of clients with the worst values."""
    return curves.series.get(f"{spread}.{'lowest' if higher_is_better else 'highest'}_tenth")
