"""Client weighting on one task: whether it matters that q is learned."""

from collections.abc import Mapping
from typing import Any

from fedgrad_experiments.client_weighting.on_task.claims import claims
from fedgrad_experiments.client_weighting.on_task.shown import figures, tables
from fedgrad_experiments.client_weighting.on_task.sizes import sizes
from fedgrad_experiments.client_weighting.on_task.training import run
from fedgrad_experiments.experiment import Experiment


def on_task(task: str, options: Mapping[str, Any]) -> Experiment:
    """Return the experiment on this task, made with these options."""
    return Experiment(
        name="client-weighting",
        description=(
            f"Learned client weighting on {task}: a client with n examples counts n^q; q fixed at "
            "1 and 0 against q learned from 1 and from 0, in pairs of runs that share their seed."
        ),
        sizes=sizes(task, options),
        run=run,
        figures=figures,
        tables=tables,
        claims=claims,
    )
