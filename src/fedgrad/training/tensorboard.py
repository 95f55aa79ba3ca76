"""A TensorBoard callback. The only file that uses TensorBoard."""

import os
import time
from collections.abc import Mapping
from typing import Any

from fedgrad.core.errors import known_fields, needs
from fedgrad.training.logger import FLUSH_SECONDS, Logger


@known_fields
class TensorBoard(Logger):
    """A callback that logs the metrics of every round to TensorBoard.

        fg.fit(..., callbacks=[fg.TensorBoard("runs/1")])

    Requires the extra `fedgrad[tensorboard]`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        with needs("fg.TensorBoard", "tensorboard"):
            from tensorboardX import SummaryWriter
        self.folder, self.make = os.fspath(folder), SummaryWriter

    def open(self, about: Mapping[str, Any]) -> None:
        """Begin a run."""
        # Hide earlier events: all rounds are logged again, including those before a resume.
        self.writer = self.make(self.folder, purge_step=0)
        self.flushed = time.monotonic()

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log a round, one curve per number. A killed process loses about a second at most."""
        for name, value in values.items():
            self.writer.add_scalar(name.replace(".", "/"), value, round)
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.writer.flush()
            self.flushed = time.monotonic()

    def end(self) -> None:
        """Close the event file."""
        self.writer.close()
