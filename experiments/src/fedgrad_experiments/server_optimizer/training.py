"""Trains FedAvgM with server learning rate and momentum fixed and learned, over many trials."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fedgrad as fg
from fedgrad_experiments.experiment import OnTask, Progress, announce, evaluations_of
from fedgrad_experiments.results import ExperimentError, Results
from fedgrad_experiments.trials import Training, how_many_together, run_trials

LEARN = ("server.learning_rate", "server.momentum")
# Fixed; learned as in the paper; with this library's guard; by the loss of validation clients.
KINDS = ("fixed", "learned", "guarded", "validation")
DEFAULT = "default server, default client"
# The hyperparameters that are drawn at random; the others have their defaults.
INITIALIZATIONS = {
    DEFAULT: (),
    "default server, random client": ("client.learning_rate",),
    "random server, default client": LEARN,
    "random server, random client": (*LEARN, "client.learning_rate"),
}


@dataclass(frozen=True)
class Settings:
    """Settings. The `trials` of each random initialization share one seed; with all defaults only
    the seed can differ, so there are `seeds` runs, each with its own."""

    tasks: tuple[OnTask, ...] = (
        OnTask("digits", cohort_size=20),
        OnTask("synthetic", cohort_size=10),
    )
    kinds: tuple[str, ...] = ("fixed", "learned", "guarded")
    trials: int = 50
    seeds: int = 10
    rounds: int = 200
    server_learning_rate: float = 1.0
    momentum: float = 0.9
    hyper_learning_rate: float = 0.01  # SGD's
    eval_every: int = 10
    evaluated_clients: int | None = None  # None: all


def run(out: Path, settings: Settings, progress: Progress = True) -> Results:
    """Run every task with every initialization and kind."""
    arrays = {"rounds": _evaluated(settings)}
    facts: dict[str, Any] = {
        "tasks": [on.name for on in settings.tasks],
        "initializations": list(INITIALIZATIONS),
        "kinds": list(settings.kinds),
        "metrics": {},
        "about": {},
        "side by side": {},
    }
    # Make all tasks first, so that a missing package or file fails before any training.
    for on, task in [(on, on.make()) for on in settings.tasks]:
        facts["metrics"][on.name], facts["about"][on.name] = next(iter(task.metrics)), task.about
        evaluations = evaluations_of(task, settings.eval_every, settings.evaluated_clients)
        training = Training(
            task,
            settings.rounds,
            on.cohort_size or task.defaults.cohort_size,
            evaluations,
            partial(_recorded, task, settings),
        )
        begins, made = starts(settings, task), algorithms(settings, task)
        names = list(begins[DEFAULT])
        every = {n: np.concatenate([begin[n] for begin in begins.values()]) for n in names}
        seeds = [s for i in begins for s in seeds_of(i, settings)]
        runs = out / "runs"
        # Learning needs more memory than training, so what fits for it always fits.
        heaviest = made[settings.kinds[-1]]
        about = f" ({task.about})" if task.about else ""
        announce(progress, f"{on.name}{about}: {len(seeds)} trials each, {', '.join(made)}")
        place = runs / f"{on.name}-side-by-side"
        together = how_many_together(training, heaviest, every, seeds, place)
        facts["side by side"][on.name] = together
        for kind, algorithm in made.items():
            folder = runs / f"{on.name}-{kind}"
            found = run_trials(training, algorithm, every, seeds, folder, together, progress)
            at = 0
            for initialization in begins:
                n = len(seeds_of(initialization, settings))
                for metric, values in found.items():
                    arrays[key(on.name, initialization, kind, metric)] = values[at : at + n]
                at += n
        for initialization, begin in begins.items():
            for name, values in begin.items():
                arrays[f"{on.name}/{initialization}/{name}"] = values
        firsts = [evaluations["train"](task.init(jax.random.key(s))) for s in range(settings.seeds)]
        arrays[f"{on.name}/first loss"] = np.asarray([first["loss"] for first in firsts])
    return Results("server-optimizer", asdict(settings), facts, arrays)


def key(task: str, initialization: str, kind: str, metric: str) -> str:
    """Return the name of a metric's array in the results: trials x evaluations."""
    return f"{task}/{initialization}/{kind}/{metric}"


def algorithms(settings: Settings, task: fg.tasks.Task) -> dict[str, fg.Algorithm]:
    """Return the same FedAvgM, fixed and learned."""
    fixed = fg.fed_avgm(
        task.loss,
        fg.local_training(task.defaults.client_learning_rate, batch_size=task.defaults.batch_size),
        server_learning_rate=settings.server_learning_rate,
        momentum=settings.momentum,
    )
    sgd = optax.sgd(settings.hyper_learning_rate)
    made = {
        "fixed": fixed,
        "learned": fg.self_tuning(fixed, LEARN, sgd, guard=None),
        "guarded": fg.self_tuning(fixed, LEARN, sgd),
    }
    if "validation" in settings.kinds:
        if task.validation is None:
            raise ExperimentError.here(
                f"Task {task.name!r} has no validation clients. Make it with some of them: "
                "validation=0.1."
            )
        by_others = fg.self_tuning(fixed, LEARN, sgd, gradient_from=task.validation, guard=None)
        made["validation"] = by_others
    return {kind: made[kind] for kind in settings.kinds}


def seeds_of(initialization: str, settings: Settings) -> list[int]:
    """Return the seed of each trial, for the initial model and the order of clients."""
    return list(range(settings.seeds)) if initialization == DEFAULT else [0] * settings.trials


def starts(settings: Settings, task: fg.tasks.Task) -> dict[str, dict[str, np.ndarray]]:
    """Return the initial hyperparameters of every trial of each initialization: the default, or
    learning rates log-uniform between 0.001 and 10, momentum uniform between 0 and 1."""
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

    return {i: {n: start(n, drawn) for n in random} for i, drawn in INITIALIZATIONS.items()}


def _evaluated(settings: Settings) -> np.ndarray:
    """Return the rounds in which models are evaluated."""
    every = np.arange(settings.eval_every, settings.rounds + 1, settings.eval_every)
    return every if settings.rounds in every else np.append(every, settings.rounds)


def _recorded(task: fg.tasks.Task, settings: Settings, result: fg.Result) -> dict[str, np.ndarray]:
    """Return what is kept of a run, for the evaluated rounds (along the first axis): the metrics,
    the hyperparameters, and how often the guard has intervened so far."""
    at, history = _evaluated(settings) - 1, result.history
    kept = {
        # Without the initial model, which all runs share.
        "accuracy": np.asarray(history[f"eval.test.{next(iter(task.metrics))}"])[1:],
        "loss": np.asarray(history["eval.train.loss"])[1:],
    }
    found = fg.Metrics.of(history)
    for name, values in found.hyper.items():
        kept[name] = np.asarray(values)[at]
    if found.rejected is not None:
        kept["rejected"] = np.cumsum(found.rejected, axis=0)[at]
    return kept
