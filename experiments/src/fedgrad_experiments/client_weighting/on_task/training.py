"""Train with q fixed and learned, with the same seeds."""

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

STARTS = (1.0, 0.0)  # of q: by examples, and uniform
# The curves, in the order in which they lie along the first axis of the results.
FIXED = tuple(f"fixed {q:g}" for q in STARTS)
LEARNED = tuple(f"from {q:g}" for q in STARTS)


@dataclass(frozen=True)
class Settings:
    """Runs with one seed share the first model and the order of clients; the data are the same in
    all of them."""

    on: OnTask
    seeds: int = 10
    rounds: int = 100
    client_learning_rate: float | None = None  # the task's, if nothing is said
    server_learning_rate: float = 1.0
    hyper_learning_rate: float = 0.01  # of Adam
    eval_every: int = 10
    eval_clients: int = 50  # at most, of whose training examples the loss is shown over rounds
    test_clients: int | None = None  # at most, of whom the metric is, after the last round; or all


def run(out: Path, settings: Settings, progress: Progress = True) -> Results:
    """All curves of all seeds."""
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
    # Both starts of a seed follow each other, so that they can run side by side.
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
            # curve x seed x evaluation: the mean over training examples of some clients
            "loss": np.concatenate([start, loss], axis=2),
            # curve x seed: over test examples, after the last round
            "metric": np.concatenate([found[kind]["metric"][:, :, -1] for kind in kinds]),
            # learned curve x seed x round: used in it
            "exponent": found["learned"]["exponent"],
        },
    )


def algorithms(settings: Settings, task: fg.tasks.Task) -> dict[str, fg.Algorithm]:
    """FedAvg with q fixed, and learned as in the paper: in one round, without a guard."""
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
    """The training loss of some clients now and then, and at the end the task's first metric on
    what is held out; or the loss, and on training examples, where it has nothing else."""
    metric, function = next(iter(task.metrics.items()), ("loss", task.loss))
    held_out = task.train if task.test is None else task.test

    def of(metrics: Any, clients: fg.Population, most: int | None, every: int) -> fg.Evaluation:
        return fg.Evaluation(metrics, some_of(clients, most, role="evaluation"), every=every)

    return {
        "train": of({"loss": task.loss}, task.train, settings.eval_clients, settings.eval_every),
        "test": of({metric: function}, held_out, settings.test_clients, settings.rounds),
    }


def _examples(task: fg.tasks.Task) -> dict[str, Any]:
    """How many examples clients have, where that is known. Where all have the same number, q has no
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
    """What is kept of a run: evaluations, or rounds, along the first axis."""
    # Without that of the first model, which all have in common.
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
    """What is recorded of each trial, by its start and its seed: start x seed x what it is."""
    return {
        name: np.stack([values[i :: len(STARTS)] for i in range(len(STARTS))])
        for name, values in trials.items()
    }
