"""An MLflow callback. The only file that uses MLflow."""

import re
from collections.abc import Mapping
from typing import Any

from fedgrad.algorithms.hyper import paths
from fedgrad.core.errors import known_fields, needs
from fedgrad.training.interrupt import interrupted
from fedgrad.training.logger import Logger


@known_fields
class MLflow(Logger):
    """A callback that logs to MLflow: `fg.fit(..., callbacks=[fg.MLflow("digits")])`.

    If an MLflow run is active, it is used and left open. A run that `fg.fit` resumes becomes a new
    MLflow run with all of its rounds, unless `run_id` names the earlier one. Requires the extra
    `fedgrad[mlflow]`.

    Args:
        experiment: The name of the MLflow experiment.
        **start: Further arguments of `mlflow.start_run`.
    """

    def __init__(self, experiment: str | None = None, **start: Any) -> None:
        super().__init__()
        with needs("fg.MLflow", "mlflow"):
            import mlflow
        self.mlflow, self.experiment, self.start = mlflow, experiment, start

    def open(self, about: Mapping[str, Any]) -> None:
        """Begin a run, and log its description as parameters."""
        active = self.mlflow.active_run()
        if active is None and self.experiment is not None:
            self.mlflow.set_experiment(self.experiment)
        run = active or self.mlflow.start_run(**self.start)
        self.run_id, self.own = run.info.run_id, active is None
        there = self.mlflow.MlflowClient().get_metric_history(self.run_id, "seconds")
        self.first = max((metric.step + 1 for metric in there), default=0)
        known = self.mlflow.get_run(self.run_id).data.params  # MLflow refuses to change them
        words = {_allowed(name): value for name, value in paths(dict(about)).items()}
        self.mlflow.log_params({name: v for name, v in words.items() if name not in known})

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log a round as a step."""
        found = {_allowed(name): value for name, value in values.items()}
        self.mlflow.log_metrics(found, step=round, run_id=self.run_id)

    def end(self) -> None:
        """End the MLflow run, as failed or killed if training was, unless it is the user's own."""
        if not self.own:
            return
        if self.error is None:
            self.mlflow.end_run()
        else:
            self.mlflow.end_run("KILLED" if interrupted(self.error) else "FAILED")


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)
