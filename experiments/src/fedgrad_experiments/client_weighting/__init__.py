"""Learned client weighting on Synthetic(1, 1): a client with n examples has weight n^q, and q is
learned."""

from fedgrad_experiments.client_weighting.claims import claims
from fedgrad_experiments.client_weighting.on_task import on_task
from fedgrad_experiments.client_weighting.shown import figures, tables
from fedgrad_experiments.client_weighting.training import Settings, run
from fedgrad_experiments.experiment import Experiment

CLIENT_WEIGHTING = Experiment(
    name="client-weighting",
    description=(
        "Learned client weighting on Synthetic(1, 1): a client with n examples counts n^q; q fixed "
        "at 1 and 0 against q learned from 1 and from 0, serial and parallel."
    ),
    sizes={
        "quick": Settings(seeds=1, rounds=40, clients=30, cohort_size=15),
        "default": Settings(),
        "full": Settings(seeds=10),
    },
    run=run,
    figures=figures,
    tables=tables,
    claims=claims,
    on=on_task,
)
