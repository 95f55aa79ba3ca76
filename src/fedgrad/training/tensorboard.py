"""TensorBoard, as a callback. The only file that knows of it."""

import os
from typing import Any

import numpy as np

from fedgrad.algorithms.metrics import Metrics
from fedgrad.core.errors import ArgumentError


class TensorBoard:
    """Writes the metrics of every round for TensorBoard. Make one with `fg.tensorboard`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self.make = _writer()
        self.writer: Any = None

    def __call__(self, round: int, state: Any, metrics: Metrics) -> None:
        """A round is over."""
        if self.writer is None:
            # What a killed run wrote of later rounds is hidden: they come again.
            self.writer = self.make(self.folder, purge_step=round)
        for name, value in metrics.named().items():
            values = np.asarray(value)
            if values.ndim == 0:
                self.writer.add_scalar(name.replace(".", "/"), float(values), round)
                continue
            for i, one in enumerate(values.ravel()):  # one curve for each trial
                self.writer.add_scalar(f"{name.replace('.', '/')}/{i}", float(one), round)

    def close(self) -> None:
        """Training is over."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def tensorboard(folder: str | os.PathLike[str]) -> TensorBoard:
    """A callback that writes the history for TensorBoard:
    `fg.fit(..., callbacks=[fg.tensorboard("runs/1")])`. Needs the extra `fedgrad[tensorboard]`."""
    return TensorBoard(folder)


def _writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ArgumentError.here(
            "fg.tensorboard needs tensorboardX, which is not installed: "
            "pip install 'fedgrad[tensorboard]'."
        ) from None
    return SummaryWriter
