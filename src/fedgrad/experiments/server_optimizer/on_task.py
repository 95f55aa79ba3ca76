"""The experiment on one of the paper's tasks, or on one of the user's own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgrad.experiments.experiment import Experiment, OnTask, Progress
from fedgrad.experiments.results import Results
from fedgrad.experiments.server_optimizer.claims import claims
from fedgrad.experiments.server_optimizer.shown import figures, tables
from fedgrad.experiments.server_optimizer.training import Settings, run

# Less than half an hour of one processor, on real data; on a task that is not listed, LAPTOP.
LAPTOP = Settings(
    kinds=("fixed", "learned"), trials=10, seeds=5, rounds=60, eval_every=10, evaluated_clients=100
)
LAPTOPS: Mapping[str, Settings] = {}
VALIDATION = {"shakespeare": 0.1}  # part of the clients, by whose loss it is learned too
PAPER_SIZED = ("cifar100", "emnist", "shakespeare", "stackoverflow_tags", "stackoverflow_words")


def on_task(task: str, options: Mapping[str, Any]) -> Experiment:
    """FedAvgM on a task, its server's learning rate and momentum fixed and learned."""
    laptop = replace(LAPTOPS.get(task, LAPTOP), tasks=(_on(task, options),))
    if task in VALIDATION:
        laptop = replace(laptop, kinds=(*laptop.kinds, "validation"))
    sizes = {
        "quick": replace(laptop, trials=3, seeds=2, rounds=4, eval_every=2, evaluated_clients=20),
        "default": laptop,
        "full": replace(laptop, trials=50, seeds=50),
        "paper": replace(
            laptop,
            tasks=(_on(task, options, paper=True),),
            trials=50,
            seeds=50,
            rounds=1500,
            eval_every=50,
            evaluated_clients=None,
        ),
    }

    def run_it(out: Path, settings: Settings, progress: Progress) -> Results:
        found = run(out, settings, progress)
        return replace(found, facts={**found.facts, "task": task})

    return Experiment(
        name="server-optimizer",
        description=(
            f"FedAvgM on {task}, with server learning rate and momentum fixed against learned: "
            "four initialisations, the best of n trials."
        ),
        sizes=sizes,
        run=run_it,
        figures=figures,
        tables=tables,
        claims=claims,
    )


def _on(task: str, options: Mapping[str, Any], paper: bool = False) -> OnTask:
    """The task as it is asked for. What is asked for wins over what suits the size."""
    usual: dict[str, Any] = {}
    if task in VALIDATION:
        usual["validation"] = VALIDATION[task]
    if paper and task in PAPER_SIZED:
        usual["size"] = "paper"
    return OnTask(task, {**usual, **options}, 50 if paper else None)
