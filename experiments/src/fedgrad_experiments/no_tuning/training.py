"""Runs every method on every task. Results are saved method by method, so that an interrupted run
continues where it stopped, and tasks can be run one after another or concurrently into one
folder."""

import functools
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedgrad as fg
from fedgrad_experiments.experiment import Progress, announce, evaluations_of
from fedgrad_experiments.no_tuning.methods import METHODS, SPACE, Method, Settings, rungs
from fedgrad_experiments.no_tuning.tasks import TASKS, Laptop
from fedgrad_experiments.results import ExperimentError, Results
from fedgrad_experiments.trials import Run, Training, how_many_together, keep, run_trials

Made = Callable[[str, Any, int], fg.Algorithm]  # (method, loss, batch size)


@dataclass(frozen=True)
class Judge:
    """Evaluates one model, or several side by side."""

    task: fg.tasks.Task
    evaluations: Mapping[str, fg.Evaluation]

    @property
    def metric(self) -> str:
        """The metric by which models are compared."""
        return next(iter(self.task.metrics))

    def record(self, result: fg.Result) -> dict[str, np.ndarray]:
        """Evaluate a run: its averaged model, and the model of its last round."""
        return {**self(result.params), "last": self(result.last)["accuracy"]}

    def __call__(self, params: Any) -> dict[str, np.ndarray]:
        """Return the test metric, 0 if the model is not finite, and the training loss."""
        one = jax.eval_shape(self.task.init, jax.random.key(0))
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(one), strict=True)
        stacked = all(jnp.ndim(leaf) == like.ndim + 1 for leaf, like in pairs)
        rows = int(stacked)
        finite = functools.reduce(
            np.logical_and,
            [np.isfinite(x).all(tuple(range(rows, np.ndim(x)))) for x in jax.tree.leaves(params)],
        )

        def measured(name: str) -> Mapping[str, Any]:
            evaluation = self.evaluations[name]
            return (evaluation.side_by_side() if stacked else evaluation)(params)

        accuracy = np.asarray(measured("test")[self.metric], float)
        return {
            "accuracy": np.where(finite, accuracy, 0.0),
            "loss": np.asarray(measured("train")["loss"], float),
            "finite": np.asarray(finite),
        }


@dataclass(frozen=True)
class Work:
    """A task with its training settings and the folder of its results."""

    judge: Judge
    training: Training
    settings: Settings
    folder: Path
    make: Made

    @staticmethod
    def of(
        task: fg.tasks.Task, laptop: Laptop, settings: Settings, folder: Path, make: Made
    ) -> Any:
        """Prepare the work on a task."""
        rounds = settings.rounds or laptop.rounds
        judge = Judge(task, evaluations_of(task, rounds, settings.evaluated_clients))
        size = min(laptop.cohort_size, len(task.train))
        training = Training(task, rounds, size, {}, judge.record, checkpoints=False)
        return Work(judge, training, settings, folder, make)

    def algorithm(self, method: str) -> fg.Algorithm:
        """Return the algorithm of a method for this task."""
        task = self.training.task
        return self.make(method, task.loss, task.defaults.batch_size)

    def trained(self, method: str) -> Training:
        """Return how a method is trained: for the usual number of rounds, or longer."""
        return replace(self.training, rounds=METHODS[method].times * self.training.rounds)

    def bytes(self, method: str) -> int:
        """Return the bytes that a client receives and sends in a whole run."""
        training = self.trained(method)
        cohort = training.task.train.sample(jax.random.key(0), training.cohort_size)
        params = training.task.init(jax.random.key(0))
        return int(fg.explain(self.algorithm(method), params, cohort, rounds=training.rounds).bytes)

    def run(self, name: str, found: Mapping[str, Any], progress: Progress) -> dict[str, np.ndarray]:
        """Train with a method, or read its saved results."""
        method, kept = METHODS[name], self.folder / f"{name}.npz"
        if kept.exists():
            return _read(kept)
        begun, groups = time.monotonic(), self.folder / name
        trials, algorithm = method.trials(self.settings, found), self.algorithm(name)
        announce(progress, f"{self.folder.name}: {method.title} ({len(trials.seeds)} trainings)")
        run: Run = functools.partial(_search, self) if method.searches else self.trained(name)
        together = 1 if method.searches else self._together(found)
        made = run_trials(run, algorithm, trials.starts, trials.seeds, groups, together, progress)
        arrays = {
            "bytes": np.full(len(trials.seeds), float(self.bytes(name))),
            **made,
            "seeds": np.asarray(trials.seeds),
            "seconds": np.asarray(time.monotonic() - begun),
            **{f"start/{n}": values for n, values in trials.starts.items()},
        }
        keep(kept, arrays)
        shutil.rmtree(groups, ignore_errors=True)
        return arrays

    def _together(self, found: Mapping[str, Any]) -> int:
        """Return how many trials run side by side: as many of a fixed method as fit, if that is
        faster."""
        trials = METHODS["fedavgm"].trials(self.settings, found)
        algorithm, kept = self.algorithm("fedavgm"), self.folder / "together.txt"
        return how_many_together(self.training, algorithm, trials.starts, trials.seeds, kept)


def run(
    out: Path,
    settings: Settings,
    progress: Progress = True,
    tasks: tuple[str, ...] = (),
    data: str | None = None,
) -> Results:
    """Run every method on these tasks, or on all; then return all results in the folder, including
    other tasks'. If none are named, tasks without local data are skipped."""
    algorithms: Made = functools.cache(_algorithm)  # similar tasks share what is compiled
    made: dict[str, fg.tasks.Task] = {}
    # Make all tasks first, so that a missing package or file fails before any training.
    for name in tasks or settings.tasks:
        methods = _methods(name)
        if all((out / "runs" / name / f"{method}.npz").exists() for method in methods):
            continue
        try:
            made[name] = TASKS[name].made(name, data)
        except ExperimentError as error:
            if tasks or not TASKS[name].files:
                raise
            announce(progress, f"{name} is left out: {error}")
    for name, task in made.items():
        laptop, folder, methods = TASKS[name], out / "runs" / name, _methods(name)
        work = Work.of(task, laptop, settings, folder, algorithms)
        folder.mkdir(parents=True, exist_ok=True)
        words = {
            "metric": work.judge.metric,
            "about": task.about,
            "rounds": work.training.rounds,
            "cohort_size": work.training.cohort_size,
            "clients": len(task.train),
        }
        (folder / "task.json").write_text(json.dumps(words), encoding="utf-8")
        found: dict[str, Any] = {}
        for method in methods:
            found[method] = work.run(method, found, progress)
    return gathered(out, settings)


def _methods(task: str) -> list[str]:
    """Return the methods that are run on a task."""
    return [name for name, one in METHODS.items() if not one.only or task in one.only]


def gathered(out: Path, settings: Settings) -> Results:
    """Return the saved results of all tasks in a folder."""
    facts: dict[str, Any] = {"tasks": {}, "methods": {}}
    arrays: dict[str, np.ndarray] = {}
    for name in TASKS:
        folder = out / "runs" / name
        done = [method for method in METHODS if (folder / f"{method}.npz").exists()]
        if not done:
            continue
        facts["tasks"][name] = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        facts["methods"][name] = done
        for method in done:
            for what, values in _read(folder / f"{method}.npz").items():
                arrays[key(name, method, what)] = values
    facts["left out"] = [name for name in TASKS if name not in facts["tasks"]]
    return Results("no-tuning", asdict(settings), facts, arrays)


def key(task: str, method: str, what: str) -> str:
    """Return the name of an array in the results, with one entry per trial."""
    return f"{task}/{method}/{what}"


def _algorithm(method: str, loss: Any, batch_size: int) -> fg.Algorithm:
    chosen: Method = METHODS[method]
    return chosen.algorithm(loss, batch_size)


def _search(
    work: Work, algorithm: fg.Algorithm, seed: int, folder: Path, progress: Progress
) -> dict[str, np.ndarray]:
    """Run successive halving by the training loss. Only the averaged model of its result is
    known."""
    training, number = work.training, work.settings.searched
    key = jax.random.key(seed)
    found = fg.random_search(
        algorithm,
        training.task.train,
        SPACE,
        trials=fg.Trials(number, "loss", rungs=rungs(number)),
        params=training.task.init(key),
        rounds=training.rounds,
        cohort_size=training.cohort_size,
        key=key,
        evaluate=work.judge.evaluations["train"],
        progress=False,
    )
    measured = work.judge(found.params)
    runs = found.rounds.sum() / training.rounds
    return {**measured, "last": np.asarray(np.nan), "runs": np.asarray(runs)}


def _read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files}
