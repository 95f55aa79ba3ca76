"""Experiments by name."""

from collections.abc import Mapping

from fedgrad.experiments.client_weighting import CLIENT_WEIGHTING
from fedgrad.experiments.experiment import Experiment
from fedgrad.experiments.results import ExperimentError
from fedgrad.experiments.server_optimizer import SERVER_OPTIMIZER

EXPERIMENTS: Mapping[str, Experiment] = {e.name: e for e in (CLIENT_WEIGHTING, SERVER_OPTIMIZER)}


def experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise ExperimentError.here(f"There is no experiment {name!r}.", name, EXPERIMENTS)
    return EXPERIMENTS[name]
