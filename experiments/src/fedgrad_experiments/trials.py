"""Trials of one algorithm from different starts: side by side where they fit, else in turn."""

import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedgrad as fg
from fedgrad_experiments.experiment import Progress, announce

Starts = Mapping[str, np.ndarray]  # hyperparameters by name, with one entry per trial
# (algorithm, seed, folder, progress) -> the record of a run
Run = Callable[[fg.Algorithm, int, Path, Progress], Mapping[str, np.ndarray]]
FEW = 4  # trials side by side from which larger numbers are extrapolated
SHARE = 4  # trials use at most 1 / SHARE of the memory
LONG = 20  # seconds after which timing is not repeated


@dataclass(frozen=True)
class Training:
    """The common part of all trials: the task, the number of rounds, and what is recorded of a run.
    If trials run side by side, the last axis of the arrays that `record` returns is over trials."""

    task: fg.tasks.Task
    rounds: int
    cohort_size: int
    evaluations: Mapping[str, fg.Evaluation]
    record: Callable[[fg.Result], Mapping[str, np.ndarray]]
    # Whether an interrupted run resumes in the middle; short runs start again, which is fast.
    checkpoints: bool = True

    def __call__(
        self, algorithm: fg.Algorithm, seed: int, folder: Path, progress: Progress
    ) -> Mapping[str, np.ndarray]:
        """Train with the initial model and the order of clients of this seed. Divergence is
        recorded as it is."""
        key = jax.random.key(seed)
        with warnings.catch_warnings():
            # Some of the sampled rates are much too high.
            warnings.filterwarnings("ignore", ".*The loss of round", RuntimeWarning)
            result = fg.fit(
                algorithm,
                self.task.train,
                params=self.task.init(key),
                rounds=self.rounds,
                cohort_size=self.cohort_size,
                key=key,
                evaluate=self.evaluations or None,
                out=folder if self.checkpoints else None,
                progress=progress if self.checkpoints else False,
            )
        return self.record(result)


def run_trials(
    training: Run,
    algorithm: fg.Algorithm,
    starts: Starts,
    seeds: Sequence[int],
    folder: Path,
    together: int,
    progress: Progress = True,
) -> dict[str, np.ndarray]:
    """Return the records of every trial: trials x the record of one.

    A trial has its entry of `starts` (none if only seeds differ) and of `seeds`. Up to `together`
    adjacent trials with the same seed run side by side. Finished trials are saved in `folder` and
    not run again.
    """
    parts, begun, ran = [], time.monotonic(), 0
    for group in _groups(seeds, together):
        first, last = group.start + 1, group.stop
        name = f"trial-{last}" if first == last else f"trials-{first}-to-{last}"
        kept = folder / f"{name}.npz"
        if not kept.exists():
            left = _left(time.monotonic() - begun, ran, len(seeds) - group.start)
            announce(progress, f"{folder.name}: {name.replace('-', ' ')} of {len(seeds)}{left}")
            some = {n: values[group.start : group.stop] for n, values in starts.items()}
            seed, place = seeds[group.start], folder / name
            found = training(_from(algorithm, some), seed, place, progress)
            keep(kept, {m: v if len(group) > 1 else v[..., None] for m, v in found.items()})
            shutil.rmtree(place, ignore_errors=True)
            ran += len(group)
        with np.load(kept) as stored:
            parts.append({metric: np.moveaxis(stored[metric], -1, 0) for metric in stored.files})
    return {metric: np.concatenate([part[metric] for part in parts]) for metric in parts[0]}


def how_many_together(
    training: Training, algorithm: fg.Algorithm, starts: Starts, seeds: Sequence[int], kept: Path
) -> int:
    """Return how many trials run side by side: as many as fit into a part of the memory, or one if
    a round of a few together is slower than separate rounds. The answer is saved in `kept`."""
    if kept.exists():
        return int(kept.read_text(encoding="utf-8"))
    most = max(len(group) for group in _groups(seeds, len(seeds)))
    found = 1
    if most > 1:
        number = min(FEW, most)
        alone, few = (_price(training, _first(algorithm, starts, k)) for k in (1, number))
        each = max(1, (few.bytes - alone.bytes) / (number - 1))
        fit = max(1, min(most, 1 + math.floor((_room() - alone.bytes) / each)))
        if 1 < fit < number:  # never run what does not fit
            number, few = fit, _price(training, _first(algorithm, starts, fit))
        if fit > 1 and few.seconds() < number * alone.seconds():
            found = fit
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(str(found), encoding="utf-8")
    return found


@dataclass(frozen=True)
class _Price:
    """The cost of a round: bytes, and seconds, which have to be measured."""

    bytes: float
    seconds: Callable[[], float]


def _price(training: Training, algorithm: fg.Algorithm) -> _Price:
    """Return the cost of a compiled round on some clients."""
    key = jax.random.key(0)
    cohorts = {
        name: population.sample(key, min(training.cohort_size, len(population)), role=name)
        for name, population in (
            (name, training.task.train if other is None else other)
            for name, other in {"cohort": None, **algorithm.cohorts}.items()
        )
    }
    args = (algorithm.init(training.task.init(key)), algorithm.hyper, cohorts.pop("cohort"), key)
    round = jax.jit(lambda args, more: algorithm.round(*args, **more))
    compiled = round.lower(args, cohorts).compile()
    needs = compiled.memory_analysis()
    kinds = ("temp", "argument", "output")
    needed = sum(getattr(needs, f"{kind}_size_in_bytes", 0) for kind in kinds)
    return _Price(needed, lambda: _fastest(lambda: compiled(args, cohorts)))


def _fastest(call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of three calls, or of fewer if they take long: disturbances
    are a small part of a long call."""
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < LONG:
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _room() -> float:
    """Return the bytes that trials may use: a part of the device's memory, or of the machine's."""
    stats = jax.devices()[0].memory_stats() or {}
    whole = stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return whole / SHARE


def _groups(seeds: Sequence[int], together: int) -> Iterator[range]:
    """Yield the ranges of trials that run side by side."""
    start = 0
    for i in range(1, len(seeds) + 1):
        if i == len(seeds) or seeds[i] != seeds[start] or i - start == together:
            yield range(start, i)
            start = i


def _first(algorithm: fg.Algorithm, starts: Starts, number: int) -> fg.Algorithm:
    """Return the algorithm from the first `number` starts."""
    return _from(algorithm, {name: values[:number] for name, values in starts.items()})


def _from(algorithm: fg.Algorithm, starts: Starts) -> fg.Algorithm:
    """Return the algorithm from one start, or from several side by side."""
    if not starts:
        return algorithm
    if len(next(iter(starts.values()))) == 1:
        one = {name: float(values[0]) for name, values in starts.items()}
        return algorithm.starting(one)
    return fg.side_by_side(algorithm, fg.hyper.replace(algorithm.hyper, dict(starts)))


def _left(seconds: float, done: int, left: int) -> str:
    """Estimate the time left, once some trials are done."""
    return f", about {math.ceil(seconds / done * left / 60)} min left" if done else ""


def keep(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    partial.replace(path)
