"""FedAvgM with its server's learning rate and momentum fixed, and learned, over many trials."""

import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fedgrad as fg
from fedgrad.experiments.experiment import Progress, announce, evaluations_of
from fedgrad.experiments.results import Results

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
EVALUATED = {"accuracy": "eval.test.accuracy", "loss": "eval.train.loss"}


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
    arrays = {"rounds": _evaluated(settings)}
    for on in settings.tasks:
        task = fg.tasks.task(on.name, **on.options)
        evaluations = evaluations_of(task, settings.eval_every)
        for kind, algorithm in algorithms(settings, task).items():
            fitting = _Fitting(task, on, settings, evaluations)
            announce(progress, f"{on.name}, {kind}: {3 * settings.trials} trials side by side")
            folder = out / "runs" / f"{on.name}-{kind}"
            found = fitting.random_starts(algorithm, folder, progress)
            announce(progress, f"{on.name}, {kind}: {settings.seeds} seeds with the defaults")
            found[DEFAULT] = fitting.defaults(algorithm)
            for initialisation, metrics in found.items():
                for metric, values in metrics.items():
                    arrays[key(on.name, initialisation, kind, metric)] = values
        for initialisation, values_of in starts(settings, task).items():
            for name, values in values_of.items():
                arrays[f"{on.name}/{initialisation}/{name}"] = values
        firsts = [evaluations["train"](task.init(jax.random.key(s))) for s in range(settings.seeds)]
        arrays[f"{on.name}/first loss"] = np.asarray([first["loss"] for first in firsts])
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
    """Where the results have a metric: trials x evaluations."""
    return f"{task}/{initialisation}/{kind}/{metric}"


def algorithms(settings: Settings, task: fg.tasks.Task) -> dict[str, fg.Algorithm]:
    """The same FedAvgM, fixed and learned."""
    fixed = fg.fed_avgm(
        task.loss,
        fg.local_training(task.defaults.client_learning_rate, batch_size=task.defaults.batch_size),
        server_learning_rate=settings.server_learning_rate,
        momentum=settings.momentum,
    )
    sgd = optax.sgd(settings.hyper_learning_rate)
    return {
        "fixed": fixed,
        "learned": fg.self_tuning(fixed, LEARN, sgd, guard=None),
        "guarded": fg.self_tuning(fixed, LEARN, sgd),
    }


def starts(settings: Settings, task: fg.tasks.Task) -> dict[str, dict[str, np.ndarray]]:
    """The first hyperparameters of every trial of each initialisation: the default, or learning
    rates log-uniform between 0.001 and 10, momentum uniform between 0 and 1."""
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

    def start(name: str, drawn: tuple[str, ...]) -> np.ndarray:
        if name in drawn:
            return random[name].astype(np.float32)
        return np.full(n if drawn else settings.seeds, default[name], np.float32)

    return {i: {n: start(n, drawn) for n in random} for i, drawn in INITIALISATIONS.items()}


@dataclass(frozen=True)
class _Fitting:
    """How models of one task are trained."""

    task: fg.tasks.Task
    on: OnTask
    settings: Settings
    evaluations: dict[str, fg.Evaluation]

    def random_starts(
        self, algorithm: fg.Algorithm, folder: Path, progress: Progress
    ) -> dict[str, dict[str, np.ndarray]]:
        """The trials of all random initialisations together: trials x evaluations of metrics."""
        random = {i: s for i, s in starts(self.settings, self.task).items() if i != DEFAULT}
        names = list(next(iter(random.values())))
        together = {n: np.concatenate([values[n] for values in random.values()]) for n in names}
        trials = fg.side_by_side(algorithm, fg.hyper.replace(algorithm.hyper, together))
        metrics = _recorded(self.fit(trials, 0, folder, progress), self.settings)
        n = self.settings.trials
        return {
            initialisation: {m: v[:, i * n : (i + 1) * n].T for m, v in metrics.items()}
            for i, initialisation in enumerate(random)
        }

    def defaults(self, algorithm: fg.Algorithm) -> dict[str, np.ndarray]:
        """One run for each seed: seeds x evaluations of metrics."""
        runs = [
            _recorded(self.fit(algorithm, seed, None, False), self.settings)
            for seed in range(self.settings.seeds)
        ]
        return {metric: np.stack([run[metric] for run in runs]) for metric in runs[0]}

    def fit(
        self, algorithm: fg.Algorithm, seed: int, folder: Path | None, progress: Progress
    ) -> fg.History:
        """Train, with the model and the order of clients of this seed."""
        start = jax.random.key(seed)
        with warnings.catch_warnings():
            # Some of the rates that are drawn are much too high.
            warnings.filterwarnings("ignore", "The loss of round", RuntimeWarning)
            return fg.fit(
                algorithm,
                self.task.train,
                params=self.task.init(start),
                rounds=self.settings.rounds,
                cohort_size=self.on.cohort_size,
                key=start,
                evaluate=self.evaluations,
                out=folder,
                progress=progress,
            ).history


def _evaluated(settings: Settings) -> np.ndarray:
    """The rounds in which models are evaluated."""
    every = np.arange(settings.eval_every, settings.rounds + 1, settings.eval_every)
    return every if settings.rounds in every else np.append(every, settings.rounds)


def _recorded(history: fg.History, settings: Settings) -> dict[str, np.ndarray]:
    """What is kept of a run, in the rounds in which it was evaluated (along the first axis): the
    metrics, the hyperparameters, and how often the guard has stepped in so far."""
    at = _evaluated(settings) - 1
    kept = {name: np.asarray(history[metric]) for name, metric in EVALUATED.items()}
    found = fg.Metrics.of(history)
    for name, values in found.hyper.items():
        kept[name] = np.asarray(values)[at]
    if found.rejected is not None:
        kept["rejected"] = np.cumsum(found.rejected, axis=0)[at]
    return kept
