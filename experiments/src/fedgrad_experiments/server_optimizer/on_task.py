"""The experiment on one of the paper's tasks, or on a user's own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgrad_experiments.experiment import Experiment, OnTask, Progress
from fedgrad_experiments.results import Results
from fedgrad_experiments.server_optimizer.claims import claims
from fedgrad_experiments.server_optimizer.shown import figures, tables
from fedgrad_experiments.server_optimizer.training import Settings, run

# At most half an hour of one processor each, on real data. Other tasks use LAPTOP.
LAPTOP = Settings(
    kinds=("fixed", "learned"), trials=10, seeds=5, rounds=50, eval_every=10, evaluated_clients=50
)
LAPTOPS: Mapping[str, Settings] = {
    "cifar100": replace(
        LAPTOP,
        # As many images per client as in the paper.
        tasks=(OnTask("cifar100", {"clients": 120}, cohort_size=10),),
        trials=8,
        seeds=4,
        rounds=60,
        eval_every=20,
        evaluated_clients=100,
    ),
    "emnist": replace(
        LAPTOP, tasks=(OnTask("emnist", cohort_size=10),), eval_every=25, evaluated_clients=100
    ),
    "shakespeare": replace(
        LAPTOP,
        # Some clients only evaluate the loss for the hypergradient.
        tasks=(OnTask("shakespeare", {"validation": 0.1}, cohort_size=5),),
        kinds=("fixed", "learned", "validation"),
        trials=8,
        seeds=4,
        rounds=60,
        eval_every=20,
    ),
    "stackoverflow_tags": replace(
        LAPTOP,
        tasks=(OnTask("stackoverflow_tags", cohort_size=50),),
        trials=20,
        rounds=100,
        eval_every=20,
        evaluated_clients=500,
    ),
    "stackoverflow_words": replace(
        LAPTOP,
        tasks=(OnTask("stackoverflow_words", cohort_size=10),),
        rounds=60,
        eval_every=20,
        evaluated_clients=500,
    ),
}


def on_task(task: str, options: Mapping[str, Any]) -> Experiment:
    """Return the experiment on a task: FedAvgM with server learning rate and momentum fixed and
    learned."""
    usual = LAPTOPS.get(task, replace(LAPTOP, tasks=(OnTask(task),)))
    (on,) = usual.tasks
    laptop = replace(usual, tasks=(replace(on, options={**on.options, **options}),))
    others = {name: value for name, value in on.options.items() if name != "clients"}
    paper = OnTask.as_in_the_paper(task, {**others, **options})
    sizes = {
        "quick": replace(laptop, trials=3, seeds=2, rounds=4, eval_every=2, evaluated_clients=20),
        "default": laptop,
        "full": replace(laptop, trials=50, seeds=50),
        "paper": replace(
            laptop,
            tasks=(paper,),
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
            "four initializations, the best of n trials."
        ),
        sizes=sizes,
        run=run_it,
        figures=figures,
        tables=tables,
        claims=claims,
    )
