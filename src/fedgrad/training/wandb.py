"""Weights & Biases, and trackio, which has the same functions. The only file that knows of them."""

import inspect
from collections.abc import Mapping
from typing import Any

from fedgrad.core.errors import known_fields, needs
from fedgrad.training.interrupt import interrupted
from fedgrad.training.logger import Logger

FAILED, INTERRUPTED = 1, 255  # as Weights & Biases itself has it


@known_fields
class WandB(Logger):
    """A callback that logs to Weights & Biases: `fg.fit(..., callbacks=[fg.WandB("digits")])`; or
    to trackio, `fg.WandB("digits", module=trackio)`. Further arguments are those of `wandb.init`.

    A run that `fg.fit` resumes is a new one there, with all of its rounds; or the same one, if it
    is named: `fg.WandB("digits", id="first", resume="allow")`. Needs the extra `fedgrad[wandb]`.
    """

    def __init__(self, project: str, *, module: Any = None, **init: Any) -> None:
        super().__init__()
        if module is None:
            with needs("fg.WandB", "wandb"):
                import wandb
            module = wandb
        self.module, self.arguments = module, {"project": project, **init}

    def open(self, about: Mapping[str, Any]) -> None:
        """A run begins: what it is goes into its config."""
        config = {**about, **self.arguments.get("config", {})}
        self.run = self.module.init(**{**self.arguments, "config": config})
        self.first = getattr(self.run, "step", None) or 0  # of one that is resumed, the next one

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """A round is a step."""
        self.run.log(dict(values), step=round)

    def end(self) -> None:
        """Training is over, or has failed: then so has the run there. trackio cannot say so."""
        knows = "exit_code" in inspect.signature(self.run.finish).parameters
        if self.error is None or not knows:
            self.run.finish()
        else:
            self.run.finish(exit_code=INTERRUPTED if interrupted(self.error) else FAILED)
