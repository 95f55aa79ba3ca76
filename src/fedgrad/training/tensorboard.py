"""TensorBoard, as a callback. The only file that knows of it."""

import os
from typing import Any

import numpy as np

from fedgrad.algorithms.metrics import Metrics
from fedgrad.core.errors import known_fields, needs
from fedgrad.core.types import State


@known_fields
class TensorBoard:
    """A callback that writes the metrics of every round for TensorBoard:
    `fg.fit(..., callbacks=[fg.TensorBoard("runs/1")])`. Needs the extra `fedgrad[tensorboard]`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        with needs("fg.TensorBoard", "tensorboard"):
            from tensorboardX import SummaryWriter
        self.folder, self.make = os.fspath(folder), SummaryWriter
        self.writer: Any = None

    def __call__(self, round: int, state: State, metrics: Metrics) -> None:
        """A round is over."""
        if self.writer is None:
            # What a killed run wrote of later rounds is hidden: they come again.
            self.writer = self.make(self.folder, purge_step=round)
        for name, value in metrics.named().items():
            curve, values = name.replace(".", "/"), np.asarray(value)
            for i, one in enumerate(values.ravel()):  # one curve for each trial
                self.writer.add_scalar(f"{curve}/{i}" if values.ndim else curve, float(one), round)

    def close(self) -> None:
        """Training is over."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
