"""Checks whether self-tuning training needs no tuning: one run against the best of a sweep."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fedgrad_experiments.experiment import Experiment
from fedgrad_experiments.no_tuning.claims import claims
from fedgrad_experiments.no_tuning.methods import Settings
from fedgrad_experiments.no_tuning.shown import figures, tables
from fedgrad_experiments.no_tuning.tasks import TASKS
from fedgrad_experiments.no_tuning.training import run
from fedgrad_experiments.results import ExperimentError


def on_tasks(tasks: str, options: Mapping[str, Any]) -> Experiment:
    """Return the experiment on some of its tasks, `digits,wine_x1`, or on all (an empty string);
    the option `data` is the folder of real data. Results of other tasks in the same folder are
    shown, too."""
    names = tuple(name for name in tasks.split(",") if name)
    for name in names:
        if name not in TASKS:
            raise ExperimentError.here(f"There is no task {name!r} in it.", name, TASKS)
    for option in options:
        if option != "data":
            raise ExperimentError.here(f"Its tasks have no option {option!r}.", option, ["data"])
    return replace(NO_TUNING, run=partial(run, tasks=names, data=options.get("data")))


NO_TUNING = Experiment(
    name="no-tuning",
    description=(
        "Training that needs no tuning: fed_auto against the best of 50 fixed FedAvgM and 25 fixed "
        "FedAdam trainings, and against what else one could take, on ten data sets."
    ),
    sizes={
        "quick": Settings(
            tasks=("digits", "wine_x1"),
            fixed=6,
            adam=4,
            starts=2,
            seeds=2,
            others=1,
            searched=3,
            rounds=12,
        ),
        "default": Settings(),
        "full": Settings(starts=50, seeds=50, others=20),
    },
    run=run,
    figures=figures,
    tables=tables,
    claims=claims,
    on=on_tasks,
    tasks=TASKS,
)
