"""Train with q fixed and learned, with the same seeds."""

import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedgrad as fg
from fedgrad.experiments.experiment import OnTask, Progress, announce
from fedgrad.experiments.results import Results

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
    server_learning_rate: float = 1.0
    hyper_learning_rate: float = 0.01  # of Adam
    eval_every: int = 10
    eval_clients: int = 50  # at most, of whose training examples the loss is shown over rounds
    test_clients: int | None = None  # at most, of whom the metric is, after the last round; or all


def run(out: Path, settings: Settings, progress: Progress = True) -> Results:
    """All curves of all seeds. Both starts of q are trained side by side."""
    task = settings.on.make()
    judged = _judged(task, settings)
    kinds = algorithms(settings, task)
    found: list[list[fg.History]] = []
    first = []
    for seed in range(settings.seeds):
        key = jax.random.key(seed)
        first.append(float(judged["train"](task.init(key))["loss"]))
        histories = []
        for kind, algorithm in kinds.items():
            announce(progress, f"seed {seed + 1} of {settings.seeds}: q {kind}, from 1 and from 0")
            starts = fg.hyper.replace(algorithm.hyper, {"weight_exponent": jnp.asarray(STARTS)})
            with warnings.catch_warnings():
                # A run that diverges is counted as one, and the others go on.
                warnings.filterwarnings("ignore", "The loss of round", RuntimeWarning)
                result = fg.fit(
                    fg.side_by_side(algorithm, starts),
                    task.train,
                    params=task.init(key),
                    rounds=settings.rounds,
                    cohort_size=min(settings.on.cohort_size, len(task.train)),
                    key=key,
                    evaluate=judged,
                    out=out / "runs" / f"seed-{seed}-{kind}",
                    progress=progress,
                )
            histories.append(result.history)
        found.append(histories)
    (metric,) = judged["test"].metrics or ()
    loss = _curves(found, "eval.train.loss")
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
            "rounds": np.concatenate([[0], found[0][0].rounds("eval.train.loss")]),
            # curve x seed x evaluation: the mean over training examples of some clients
            "loss": np.concatenate([start, loss], axis=2),
            # curve x seed: over all test examples, after the last round
            "metric": _curves(found, f"eval.test.{metric}")[:, :, -1],
            # learned curve x seed x round: used in it
            "exponent": _curves([h[1:] for h in found], "hyper.weight_exponent"),
        },
    )


def algorithms(settings: Settings, task: fg.tasks.Task) -> dict[str, fg.Algorithm]:
    """FedAvg with q fixed, and learned as in the paper: in one round, without a guard."""
    fixed = fg.fed_avg(
        task.loss,
        fg.local_training(task.defaults.client_learning_rate, batch_size=task.defaults.batch_size),
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
    # Many clients have few examples, and a batch is as long for them as for others.
    batch = min(20, task.defaults.batch_size)
    return {
        "train": fg.Evaluation(
            {"loss": task.loss},
            _some(task.train, settings.eval_clients),
            batch,
            settings.eval_every,
        ),
        "test": fg.Evaluation(
            {metric: function}, _some(held_out, settings.test_clients), batch, settings.rounds
        ),
    }


def _some(clients: fg.Population, most: int | None) -> Any:
    """So many of the clients at most, always the same."""
    if most is None or most >= len(clients):
        return clients
    return clients.sample(jax.random.key(0), most, role="evaluation")


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


def _curves(found: list[list[fg.History]], metric: str) -> np.ndarray:
    """The metric of both starts of each kind: curve x seed x round."""
    seeds = [np.concatenate([history[metric].T for history in kinds]) for kinds in found]
    return np.stack(seeds, axis=1)
