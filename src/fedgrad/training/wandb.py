"""A callback for Weights & Biases, or trackio with the same API. The only file that uses them."""

import inspect
from collections.abc import Mapping
from typing import Any

from fedgrad.core.errors import known_fields, needs
from fedgrad.training.interrupt import interrupted
from fedgrad.training.logger import Logger

FAILED, INTERRUPTED = 1, 255  # the exit codes of Weights & Biases


@known_fields
class WandB(Logger):
    """A callback that logs to Weights & Biases: `fg.fit(..., callbacks=[fg.WandB("digits")])`.

    A run that `fg.fit` resumes becomes a new W&B run with all of its rounds, unless it is named:
    `fg.WandB("digits", id="first", resume="allow")`. Requires the extra `fedgrad[wandb]`.

    Args:
        project: The name of the project.
        module: A module with the same API, such as `trackio`: `fg.WandB("digits", module=trackio)`.
        **init: Further arguments of `wandb.init`.
    """

    def __init__(self, project: str, *, module: Any = None, **init: Any) -> None:
        super().__init__()
        if module is None:
            with needs("fg.WandB", "wandb"):
                import wandb
            module = wandb
        self.module, self.arguments = module, {"project": project, **init}

    def open(self, about: Mapping[str, Any]) -> None:
        """Begin a run, with its description as the config."""
        config = {**about, **self.arguments.get("config", {})}
        self.run = self.module.init(**{**self.arguments, "config": config})
        self.first = getattr(self.run, "step", None) or 0  # the next step of a resumed W&B run

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log a round as a step."""
        self.run.log(dict(values), step=round)

    def end(self) -> None:
        """Finish the run, as failed if training failed, which trackio cannot express."""
        knows = "exit_code" in inspect.signature(self.run.finish).parameters
        if self.error is None or not knows:
            self.run.finish()
        else:
            self.run.finish(exit_code=INTERRUPTED if interrupted(self.error) else FAILED)
