"""The paper's experiments, each reproducible by its name."""

from fedgrad_experiments.experiment import Experiment, Reproduction, reproduce, show
from fedgrad_experiments.registry import EXPERIMENTS, experiment
from fedgrad_experiments.results import ExperimentError, Results, load

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "ExperimentError",
    "Reproduction",
    "Results",
    "experiment",
    "load",
    "reproduce",
    "show",
]
