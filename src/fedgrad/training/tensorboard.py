"""TensorBoard, as a callback. The only file that knows of it."""

import os
import time
from collections.abc import Mapping
from typing import Any

from fedgrad.core.errors import known_fields, needs
from fedgrad.training.logger import FLUSH_SECONDS, Logger


@known_fields
class TensorBoard(Logger):
    """A callback that writes the metrics of every round for TensorBoard:
    `fg.fit(..., callbacks=[fg.TensorBoard("runs/1")])`. Needs the extra `fedgrad[tensorboard]`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        with needs("fg.TensorBoard", "tensorboard"):
            from tensorboardX import SummaryWriter
        self.folder, self.make = os.fspath(folder), SummaryWriter

    def open(self, about: Mapping[str, Any]) -> None:
        """A run begins."""
        # Whatever was written here before is hidden: all rounds come, those before a resume again.
        self.writer = self.make(self.folder, purge_step=0)
        self.flushed = time.monotonic()

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """A round, one curve for each number; those of a killed process are a second old."""
        for name, value in values.items():
            self.writer.add_scalar(name.replace(".", "/"), value, round)
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.writer.flush()
            self.flushed = time.monotonic()

    def end(self) -> None:
        """Training is over."""
        self.writer.close()
