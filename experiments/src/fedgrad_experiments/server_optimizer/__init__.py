"""FedAvgM with learned server learning rate and momentum, against fixed ones."""

from fedgrad_experiments.experiment import Experiment, OnTask
from fedgrad_experiments.server_optimizer.claims import claims
from fedgrad_experiments.server_optimizer.on_task import on_task
from fedgrad_experiments.server_optimizer.shown import figures, tables
from fedgrad_experiments.server_optimizer.training import Settings, run

SERVER_OPTIMIZER = Experiment(
    name="server-optimizer",
    description=(
        "FedAvgM with server learning rate and momentum fixed against learned, on digits and "
        "Synthetic(1, 1): four initializations, 50 trials of each, the best of n trials."
    ),
    sizes={
        "quick": Settings(
            tasks=(
                OnTask("digits", {"clients": 30}, cohort_size=5),
                OnTask("synthetic", {"clients": 20}, cohort_size=3),
            ),
            trials=6,
            seeds=2,
            rounds=20,
            eval_every=5,
        ),
        "default": Settings(),
        "full": Settings(
            tasks=(OnTask("digits", cohort_size=50), OnTask("synthetic", cohort_size=50)),
            seeds=50,
            rounds=500,
        ),
    },
    run=run,
    figures=figures,
    tables=tables,
    claims=claims,
    on=on_task,
)
