"""FedAvgM with its server's learning rate and momentum fixed, and learned, over many trials."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.self_tuning import self_tuning
from fedgrad.algorithms.side_by_side import side_by_side
from fedgrad.algorithms.variants import fed_avgm
from fedgrad.experiments.experiment import Progress, announce
from fedgrad.experiments.results import Results
from fedgrad.tasks.registry import task as make_task
from fedgrad.tasks.task import Task
from fedgrad.training.evaluation import evaluation
from fedgrad.training.fit import fit
from fedgrad.training.history import History

LEARN = ("server.learning_rate", "server.momentum")
KINDS = ("fixed", "learned", "guarded")  # learned as in the paper; with this library's guard
DEFAULT = "default server, default client"
# Which hyperparameters are drawn at random; the others have their default.
INITIALISATIONS = {
    DEFAULT: (),
    "default server, random client": ("client.learning_rate",),
    "random server, default client": LEARN,
    "random server, random client": (*LEARN, "client.learning_rate"),
}
METRICS = {
    "accuracy": "eval.test.accuracy",
    "loss": "eval.train.loss",
    **{name: f"hyper.{name}" for name in LEARN},
    "rejected": "rejected",
}


@dataclass(frozen=True)
class OnTask:
    """A task and how it is trained."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    cohort_size: int = 20


@dataclass(frozen=True)
class Settings:
    """`trials` of each random initialisation share one seed and run side by side; where everything
    has its default, only the seed can differ, so there are `seeds` runs one after another."""

    tasks: tuple[OnTask, ...] = (
        OnTask("digits", cohort_size=20),
        OnTask("synthetic", cohort_size=10),
    )
    trials: int = 50
    seeds: int = 10
    rounds: int = 200
    server_learning_rate: float = 1.0
    momentum: float = 0.9
    hyper_learning_rate: float = 0.01  # of SGD
    eval_every: int = 10


def run(out: Path, settings: Settings, progress: Progress = True) -> Results:
    """Every task with every initialisation and kind."""
    arrays: dict[str, np.ndarray] = {}
    for on in settings.tasks:
        task = make_task(on.name, **on.options)
        for kind, algorithm in algorithms(settings, task).items():
            announce(progress, f"{on.name}, {kind}: {3 * settings.trials} trials side by side")
            starts = draw_starts(settings, task)
            together = {
                name: np.concatenate([values[name] for values in starts.values()])
                for name in next(iter(starts.values()))
            }
            trials = side_by_side(algorithm, names_of.replace(algorithm.hyper, together))
            folder = out / "runs" / f"{on.name}-{kind}"
            history = _fit(trials, task, on, settings, 0, folder, progress)
            for i, initialisation in enumerate(starts):
                mine = slice(i * settings.trials, (i + 1) * settings.trials)
                for metric, values in _recorded(history).items():
                    arrays[key(on.name, initialisation, kind, metric)] = values[:, mine].T
            announce(progress, f"{on.name}, {kind}: {settings.seeds} seeds with the defaults")
            runs = [
                _recorded(_fit(algorithm, task, on, settings, seed, None, False))
                for seed in range(settings.seeds)
            ]
            for metric in runs[0]:
                arrays[key(on.name, DEFAULT, kind, metric)] = np.stack([r[metric] for r in runs])
        for initialisation, values in draw_starts(settings, task).items():
            for name, start in values.items():
                arrays[f"{on.name}/{initialisation}/{name}"] = start
        arrays[f"{on.name}/first loss"] = _first_loss(task, settings)
    arrays["rounds"] = history.rounds("eval.test.accuracy")
    return Results(
        experiment="server-optimizer",
        settings=asdict(settings),
        facts={
            "tasks": [on.name for on in settings.tasks],
            "initialisations": list(INITIALISATIONS),
            "kinds": list(KINDS),
        },
        arrays=arrays,
    )


def key(task: str, initialisation: str, kind: str, metric: str) -> str:
    """Where the results have a metric: trials x evaluations, or x rounds."""
    return f"{task}/{initialisation}/{kind}/{metric}"


def algorithms(settings: Settings, task: Task) -> dict[str, Algorithm]:
    """The same FedAvgM, fixed and learned."""
    fixed = fed_avgm(
        task.loss,
        client_learning_rate=task.defaults.client_learning_rate,
        server_learning_rate=settings.server_learning_rate,
        momentum=settings.momentum,
        batch_size=task.defaults.batch_size,
    )
    sgd = optax.sgd(settings.hyper_learning_rate)
    return {
        "fixed": fixed,
        "learned": self_tuning(fixed, LEARN, sgd, guard=None),
        "guarded": self_tuning(fixed, LEARN, sgd),
    }


def draw_starts(settings: Settings, task: Task) -> dict[str, dict[str, np.ndarray]]:
    """The first hyperparameters of every trial of each random initialisation: learning rates
    log-uniform between 0.001 and 10, momentum uniform between 0 and 1."""
    rng = np.random.default_rng(0)
    n = settings.trials
    random = {
        "server.learning_rate": 10 ** rng.uniform(-3, 1, n),
        "server.momentum": rng.uniform(0, 1, n),
        "client.learning_rate": 10 ** rng.uniform(-3, 1, n),
    }
    default = {
        "server.learning_rate": settings.server_learning_rate,
        "server.momentum": settings.momentum,
        "client.learning_rate": task.defaults.client_learning_rate,
    }
    return {
        initialisation: {
            name: np.float32(random[name] if name in drawn else np.full(n, default[name]))
            for name in random
        }
        for initialisation, drawn in INITIALISATIONS.items()
        if drawn
    }


def _fit(
    algorithm: Algorithm,
    task: Task,
    on: OnTask,
    settings: Settings,
    seed: int,
    folder: Path | None,
    progress: Progress,
) -> History:
    start = jax.random.key(seed)
    with _divergence_expected():
        return fit(
            algorithm,
            task.train,
            params=task.init(start),
            rounds=settings.rounds,
            cohort_size=on.cohort_size,
            key=start,
            eval=_evaluations(task),
            eval_every=settings.eval_every,
            out=folder,
            progress=progress,
        ).history


def _evaluations(task: Task) -> dict[str, Any]:
    return {
        "train": evaluation({"loss": task.loss}, task.train),
        "test": evaluation(dict(task.metrics), task.test),
    }


@contextmanager
def _divergence_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss of round", RuntimeWarning)
        yield


def _recorded(history: History) -> dict[str, np.ndarray]:
    """What is kept of a run, evaluations or rounds along the first axis."""
    return {name: np.asarray(history[at]) for name, at in METRICS.items() if at in history}


def _first_loss(task: Task, settings: Settings) -> np.ndarray:
    """The loss of the model that each seed starts with."""
    loss = _evaluations(task)["train"]
    firsts = [loss(task.init(jax.random.key(seed)))["loss"] for seed in range(settings.seeds)]
    return np.asarray(firsts, np.float32)
