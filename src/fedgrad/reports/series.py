"""What a history holds, as curves: of a run, of trials side by side, of several seeds together."""

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
    """A number over rounds; not all rounds need to have it. `band`: the lowest and the highest of
    several seeds, whose mean it is."""

    rounds: np.ndarray
    values: np.ndarray
    band: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True, eq=False)
class Spread:
    """The values of a hundred clients, from the lowest to the highest, over rounds."""

    rounds: np.ndarray
    values: np.ndarray  # evaluations x clients


@dataclass(frozen=True)
class Curves:
    """Every number of a run over rounds by name, and how metrics are spread over clients."""

    series: Mapping[str, Series]
    spreads: Mapping[str, Spread]
    seeds: int = 1

    @property
    def metrics(self) -> Metrics:
        """The curves as the metrics that they are."""
        return Metrics.of(self.series)

    @property
    def evaluated(self) -> tuple[str, ...]:
        """The names of what evaluations gave, over all examples."""
        named = Metrics(eval=self.metrics.eval).named()
        return tuple(name for name in named if SPREAD not in name)

    @property
    def last(self) -> int:
        """The last round."""
        return max((int(s.rounds[-1]) for s in self.series.values()), default=0)

    @property
    def seconds(self) -> float | None:
        """That all rounds took, of a run that is not a mean."""
        found = self.metrics.seconds
        return None if found is None or self.seeds > 1 else float(np.sum(found.values))


def of_history(history: History, hyper: Mapping[str, Any] = {}) -> dict[str, Curves]:
    """The curves of a run, called "", or of each of its trials side by side, called by what they
    differ in. `hyper`: the hyperparameters it began with, by dotted name."""
    trials = trials_of(history)
    if trials is None:
        return {"": _curves({name: (history.rounds(name), v) for name, v in history.items()})}
    names = trial_names(hyper, trials)
    return {
        name: _curves({n: (history.rounds(n), _of(v, i, trials)) for n, v in history.items()})
        for i, name in enumerate(names)
    }


def trial_names(hyper: Mapping[str, Any], trials: int) -> list[str]:
    """`server.learning_rate 0.1, server.momentum 0.9`, without what all begin with."""
    vectors = {n: v for n, v in hyper.items() if np.ndim(v) == 1 and len(v) == trials}
    differ = {n: v for n, v in vectors.items() if len(set(map(float, v))) > 1}
    names = [
        ", ".join(f"{n} {short(float(v[i]))}" for n, v in differ.items()) for i in range(trials)
    ]
    return names if len(set(names)) == trials else [f"trial {i + 1}" for i in range(trials)]


def together(runs: Sequence[Curves]) -> Curves:
    """Several seeds of the same: means where all have a value, and from the lowest to the highest.
    The spread over clients is that over the clients of all."""
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
    """How many trials ran side by side, if they did."""
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
    """The mean of the tenth of clients for whom the model is worst."""
    return curves.series.get(f"{spread}.{'lowest' if higher_is_better else 'highest'}_tenth")
