"""The registry of experiments by name."""

from collections.abc import Mapping
from typing import Any

from fedgrad_experiments.client_weighting import CLIENT_WEIGHTING
from fedgrad_experiments.experiment import Experiment
from fedgrad_experiments.no_tuning import NO_TUNING
from fedgrad_experiments.results import ExperimentError
from fedgrad_experiments.server_optimizer import SERVER_OPTIMIZER

EXPERIMENTS: Mapping[str, Experiment] = {
    e.name: e for e in (CLIENT_WEIGHTING, SERVER_OPTIMIZER, NO_TUNING)
}


def experiment(
    name: str, task: str | None = None, options: Mapping[str, Any] | None = None
) -> Experiment:
    """Return the experiment of this name; with a task, the same on that task, made with these
    options."""
    if name not in EXPERIMENTS:
        raise ExperimentError.here(f"There is no experiment {name!r}.", name, EXPERIMENTS)
    found = EXPERIMENTS[name]
    if task is None and not (options and found.tasks):
        if options:
            raise ExperimentError.here(f"Options of a task, but no task: {', '.join(options)}.")
        return found
    if found.on is None:
        raise ExperimentError.here(f"Experiment {name!r} does not take a task.")
    return found.on(task or "", options or {})
