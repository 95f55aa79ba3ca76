"""Trains with q fixed and learned, with the same seeds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fedgrad as fg
from fedgrad_experiments.experiment import OnTask, Progress, some_of
from fedgrad_experiments.results import Results
from fedgrad_experiments.trials import Training, how_many_together, run_trials

STARTS = (1.0, 0.0)  # initial q: by examples, and uniform
# The curves, in the order of the first axis of the results.
FIXED = tuple(f"fixed {q:g}" for q in STARTS)
LEARNED = tuple(f"from {q:g}" for q in STARTS)


@dataclass(frozen=True)
class Settings:
    """Settings. Runs with the same seed share the initial model and the order of clients; all runs
    share the data."""

    on: OnTask
    seeds: int = 10
    rounds: int = 100
    client_learning_rate: float | None = None  # None: the task's default
    server_learning_rate: float = 1.0
    hyper_learning_rate: float = 0.01  # Adam's
    eval_every: int = 10
    eval_clients: int = 50  # at most so many evaluate the training loss
    test_clients: int | None = None  # at most so many evaluate the metric at the end; None: all


def run(out: Path, settings: Settings, progress: Progress = True) -> Results:
    """Train all curves with all seeds."""
    task = settings.on.make()
    judged = _judged(task, settings)
    (metric,) = judged["test"].metrics or ()
    training = Training(
        task,
        settings.rounds,
        min(settings.on.cohort_size or task.defaults.cohort_size, len(task.train)),
        judged,
        lambda result: _recorded(result.history, metric),
    )
    # The starts of one seed are adjacent, so that they can run side by side.
    seeds = [seed for seed in range(settings.seeds) for _ in STARTS]
    starts = {"weight_exponent": np.tile(STARTS, settings.seeds)}
    kinds, folder = algorithms(settings, task), out / "runs"
    together = how_many_together(training, kinds["learned"], starts, seeds, folder / "together.txt")
    found = {
        kind: _curves(
            run_trials(training, algorithm, starts, seeds, folder / kind, together, progress)
        )
        for kind, algorithm in kinds.items()
    }
    loss = np.concatenate([found[kind]["loss"] for kind in kinds])
    first = [float(judged["train"](task.init(jax.random.key(s)))["loss"]) for s in seeds[::2]]
    start = np.broadcast_to(np.asarray(first)[None, :, None], (*loss.shape[:2], 1))
    return Results(
        experiment="client-weighting",
        settings=asdict(settings),
        facts={
            "task": settings.on.name,
            "about": task.about,
            "metric": metric,
            "examples": _examples(task),
            "curves": [*FIXED, *LEARNED],
            "learned": list(LEARNED),
        },
        arrays={
            "rounds": np.concatenate([[0], found["fixed"]["rounds"][0, 0]]),
            # curve x seed x evaluation: mean over the training examples of some clients
            "loss": np.concatenate([start, loss], axis=2),
            # curve x seed: on test examples, after the last round
            "metric": np.concatenate([found[kind]["metric"][:, :, -1] for kind in kinds]),
            # learned curve x seed x round: the value used in that round
            "exponent": found["learned"]["exponent"],
        },
    )


def algorithms(settings: Settings, task: fg.tasks.Task) -> dict[str, fg.Algorithm]:
    """Return FedAvg with q fixed, and with q learned as in the paper: in one round, without a
    guard."""
    rate = settings.client_learning_rate or task.defaults.client_learning_rate
    fixed = fg.fed_avg(
        task.loss,
        fg.local_training(rate, batch_size=task.defaults.batch_size),
        server_learning_rate=settings.server_learning_rate,
        weighting="power",
    )
    adam = optax.adam(settings.hyper_learning_rate)
    return {
        "fixed": fixed,
        "learned": fg.self_tuning(fixed, ["weight_exponent"], adam, guard=None),
    }


def _judged(task: fg.tasks.Task, settings: Settings) -> dict[str, fg.Evaluation]:
    """Return two evaluations: the training loss on some clients at intervals, and at the end the
    task's first metric on test clients. A task without metrics uses its loss, one without test
    clients its training examples."""
    metric, function = next(iter(task.metrics.items()), ("loss", task.loss))
    held_out = task.train if task.test is None else task.test

    def of(metrics: Any, clients: fg.Population, most: int | None, every: int) -> fg.Evaluation:
        return fg.Evaluation(metrics, some_of(clients, most, role="evaluation"), every=every)

    return {
        "train": of({"loss": task.loss}, task.train, settings.eval_clients, settings.eval_every),
        "test": of({metric: function}, held_out, settings.test_clients, settings.rounds),
    }


def _examples(task: fg.tasks.Task) -> dict[str, Any]:
    """Return how many examples clients have, if known. If all have the same number, q has no
    effect."""
    counts = task.train.counts
    if counts is None:
        return {"clients": len(task.train), "least": None, "median": None, "most": None}
    return {
        "clients": len(counts),
        "least": int(counts.min()),
        "median": float(np.median(counts)),
        "most": int(counts.max()),
    }


def _recorded(history: fg.History, metric: str) -> dict[str, np.ndarray]:
    """Return what is kept of a run, with evaluations or rounds along the first axis."""
    # Without the initial model, which all runs share.
    loss = np.asarray(history["eval.train.loss"])[1:]
    at = np.asarray(history.rounds("eval.train.loss"))[1:]
    kept = {
        "loss": loss,
        "metric": np.asarray(history[f"eval.test.{metric}"])[1:],
        "rounds": np.broadcast_to(at.reshape(-1, *[1] * (loss.ndim - 1)), loss.shape),
    }
    learned = fg.Metrics.of(history).hyper
    if "weight_exponent" in learned:
        kept["exponent"] = np.asarray(learned["weight_exponent"])
    return kept


def _curves(trials: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrange the records of all trials by start and seed: start x seed x record."""
    return {
        name: np.stack([values[i :: len(STARTS)] for i in range(len(STARTS))])
        for name, values in trials.items()
    }
