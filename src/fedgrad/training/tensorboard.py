"""TensorBoard, as a callback. The only file that knows of it."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedgrad.core.errors import needs


class TensorBoard:
    """Writes the metrics of every round for TensorBoard. Make one with `fg.tensorboard`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self.make = _writer()
        self.writer: Any = None

    def __call__(self, round: int, state: Any, metrics: Mapping[str, Any]) -> None:
        """A round is over."""
        if self.writer is None:
            # What a killed run wrote of later rounds is hidden: they come again.
            self.writer = self.make(self.folder, purge_step=round)
        for name, value in metrics.items():
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
    with needs("fg.tensorboard", "tensorboard"):
        from tensorboardX import SummaryWriter
    return SummaryWriter
