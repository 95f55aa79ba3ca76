"""Trains with q fixed and learned, on several data sets."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedgrad as fg
from fedgrad_experiments.experiment import Progress, announce, evaluations_of
from fedgrad_experiments.results import Results

SCHEDULES: tuple[Literal["serial"], Literal["parallel"]] = ("serial", "parallel")
STARTS = (1.0, 0.0)  # initial q: by examples, and uniform
# The curves, in the order of the first axis of the results.
FIXED = tuple(f"fixed {q:g}" for q in STARTS)
LEARNED = tuple(f"{schedule} from {q:g}" for schedule in SCHEDULES for q in STARTS)


@dataclass(frozen=True)
class Settings:
    """The paper's settings, where it states them."""

    seeds: int = 3  # each with its own data set and order of clients
    rounds: int = 200
    clients: int = 100
    cohort_size: int = 50  # to train, and as many fresh ones for the derivative
    alpha: float = 1.0
    beta: float = 1.0
    batch_size: int = 10
    client_learning_rate: float = 0.01
    server_learning_rate: float = 1.0
    hyper_learning_rate: float = 0.01  # Adam's
    eval_every: int = 5


def run(out: Path, settings: Settings, progress: Progress = True) -> Results:
    """Train all curves with all seeds. Both starts of q run side by side."""
    losses, accuracies, exponents = [], [], []
    for seed in range(settings.seeds):
        chosen = {"alpha": settings.alpha, "beta": settings.beta, "clients": settings.clients}
        task = fg.tasks.task("synthetic", seed=seed, **chosen)
        evaluations = evaluations_of(task, settings.eval_every)
        histories = []
        for kind, algorithm in algorithms(settings, task.loss).items():
            announce(progress, f"seed {seed + 1} of {settings.seeds}: q {kind}, from 1 and from 0")
            starts = fg.hyper.replace(algorithm.hyper, {"weight_exponent": jnp.asarray(STARTS)})
            key = jax.random.key(seed)
            result = fg.fit(
                fg.side_by_side(algorithm, starts),
                task.train,
                params=task.init(key),
                rounds=settings.rounds,
                cohort_size=settings.cohort_size,
                key=key,
                evaluate=evaluations,
                out=out / "runs" / f"seed-{seed}-{kind}",
                progress=progress,
            )
            histories.append(result.history)
        losses.append(_curves(histories, "eval.train.loss"))
        accuracies.append(_curves(histories, "eval.test.accuracy"))
        exponents.append(_curves(histories[1:], "hyper.weight_exponent"))
    return Results(
        experiment="client-weighting",
        settings=asdict(settings),
        facts={"curves": [*FIXED, *LEARNED], "learned": list(LEARNED)},
        arrays={
            "rounds": np.asarray(histories[0].rounds("eval.train.loss")),
            # curve x seed x evaluation: mean over all training examples of all clients
            "loss": np.stack(losses, axis=1),
            # on held-out examples, from the first evaluation after a round
            "accuracy": np.stack(accuracies, axis=1)[:, :, 1:],
            "exponent": np.stack(exponents, axis=1),  # learned curve x seed x round: as used in it
        },
    )


def algorithms(settings: Settings, loss: Any) -> dict[str, fg.Algorithm]:
    """Return FedAvg with q fixed, and with q learned in both schedules."""
    fixed = fg.fed_avg(
        loss,
        # Examples are stored in random order, and an epoch goes through them once.
        fg.local_training(
            settings.client_learning_rate, batch_size=settings.batch_size, shuffle=False
        ),
        server_learning_rate=settings.server_learning_rate,
        weighting="power",
    )
    adam = optax.adam(settings.hyper_learning_rate)
    return {
        "fixed": fixed,
        **{s: fg.self_tuning(fixed, ["weight_exponent"], adam, s) for s in SCHEDULES},
    }


def _curves(histories: list[fg.History], metric: str) -> np.ndarray:
    """Return the metric of both starts of each history: curves x rounds."""
    return np.concatenate([history[metric].T for history in histories])
