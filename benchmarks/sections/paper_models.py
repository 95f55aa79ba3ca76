"""The paper's five models in full size: some rounds of training, its time and its memory."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import real_data
from report import table
from timing import isolated

import fedgrad as fg
from fedgrad.tasks import layers

JUDGES = 50  # clients that train with the others, whose loss is taken before and after


@dataclass(frozen=True)
class Training:
    """How a task is trained, with so many clients a round that some minutes on two cores do."""

    client: float  # learning rate
    server: dict[str, float]  # settings of the algorithm
    algorithm: str = "fed_avgm"
    cohort: int = 10
    rounds: int = 20
    clients: int | None = None  # into how many the data are divided, or those that there are


# With the paper's learning rates. CIFAR-100 has more clients in a round than the others: few have
# few classes, and the last layer then follows those of the last cohort.
TRAININGS = {
    "emnist": Training(10**-1.5, {"server_learning_rate": 10**-0.5, "momentum": 0.9}),
    "cifar100": Training(
        10**-1.5, {"server_learning_rate": 1.0, "momentum": 0.9}, cohort=25, rounds=24, clients=600
    ),
    "shakespeare": Training(1.0, {"server_learning_rate": 10**-0.5, "momentum": 0.9}, cohort=5),
    "stackoverflow_words": Training(10**-0.5, {"server_learning_rate": 1.0, "momentum": 0.9}),
    "stackoverflow_tags": Training(100.0, {"server_learning_rate": 1.0}, algorithm="fed_avg"),
}


def run(quick: bool) -> dict[str, Any]:
    """By task: each trained in a process of its own, so that its memory is its own."""
    found = {}
    for name, training in TRAININGS.items():
        some = replace(training, cohort=2, rounds=3) if quick else training
        data = real_data.file(name)
        print(f"[paper_models] {name}, {data or 'generated'}", flush=True)
        measured = isolated(
            "sections.paper_models", "measure", name=name, data=data, training=asdict(some)
        )
        found[name] = asdict(some) | measured
    return found


def measure(name: str, data: str | None, training: dict[str, Any]) -> dict[str, Any]:
    """Train; the loss of some clients before and after, seconds of a round, and the peak."""
    how = Training(**training)
    task = fg.tasks.task(name, size="paper", data=data, clients=how.clients if data else None)
    train = task.train
    some = np.linspace(0, len(train) - 1, min(JUDGES, len(train))).astype(int)
    judged = fg.Evaluation({"loss": task.loss}, train.select(some), batch_size=20)
    local = fg.local_training(how.client, batch_size=task.defaults.batch_size)
    algorithm = getattr(fg, how.algorithm)(task.loss, local, **how.server)
    params = task.init(jax.random.key(0))
    ends = [(time.perf_counter(), time.process_time())]

    def note(round: int, state: Any, metrics: Any) -> None:
        jax.block_until_ready(state.params)
        ends.append((time.perf_counter(), time.process_time()))

    trained = fg.fit(
        algorithm,
        train,
        params=params,
        rounds=how.rounds,
        cohort_size=min(how.cohort, len(train)),
        key=jax.random.key(1),
        callbacks=[note],
        progress=False,
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # before it is evaluated
    first, *others = np.diff(ends, axis=0).tolist()
    seconds, cpu = (statistics.mean(times) for times in zip(*others, strict=True))
    return {
        "data": Path(data).name if data else "generated",
        "trained on": len(train),
        "examples": int(np.asarray(train.everyone.count).sum()),
        "parameters": layers.parameters(params),
        "before": float(judged(params)["loss"]),
        "after": float(judged(trained.params)["loss"]),
        "cohort losses": np.asarray(trained.history["loss"], float).tolist(),
        "seconds": seconds,
        "cpu seconds": cpu,
        "first": first[0],
        "peak": peak,
    }


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = [
        [
            name,
            f"{one['parameters']:,}",
            one["data"],
            f"{one['trained on']:,}",
            _algorithm(one),
            f"{one['rounds']} of {one['cohort']}",
            f"{one['before']:.2f} → **{one['after']:.2f}**",
            f"{one['seconds']:.1f} ({one['cpu seconds']:.1f})",
            f"{one['peak'] / 1e9:.1f}",
        ]
        for name, one in data.items()
    ]
    head = ["task", "numbers in the model", "data", "clients", "algorithm", "rounds of clients"]
    head += ["loss", "s a round", "GB at most"]
    return "\n\n".join(
        [
            "The paper's models and batches. The loss is that of the same training clients, at "
            f"most {JUDGES}, before and after, dropout included. Seconds, by the clock and in "
            "brackets of the processor, are the mean of all rounds but the first, which compiles; "
            "memory is the most that the process had while it trained.",
            table(head, rows),
        ]
    )


def _algorithm(one: dict[str, Any]) -> str:
    server = (f"{name}={value:.3g}" for name, value in one["server"].items())
    return f"`{one['algorithm']}(client={one['client']:.3g}, {', '.join(server)})`"
