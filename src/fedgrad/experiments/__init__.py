"""The paper's experiments, each to be reproduced by its name."""

from fedgrad.experiments.experiment import Experiment, Reproduction, reproduce, show
from fedgrad.experiments.registry import EXPERIMENTS, experiment
from fedgrad.experiments.results import ExperimentError, Results, load

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
