"""What a run leaves in its folder: config.json, history.jsonl and the checkpoint."""

import json
import os
import time
from typing import Any

import jax

from fedgrad.core.errors import ArgumentError
from fedgrad.training import checkpoint
from fedgrad.training.checkpoint import Checkpoint
from fedgrad.training.files import make_folder, write_whole
from fedgrad.training.history import History
from fedgrad.training.log import Log
from fedgrad.training.loop import Loop, Point

CHECKPOINT_SECONDS = 30.0
SHARE = 50  # saving may take one part in so many of the time


class RunFolder:
    """The files of one run. Of several processes only the first one writes."""

    def __init__(
        self, path: str | os.PathLike[str], config: dict[str, Any], every: int | None
    ) -> None:
        try:
            # As it will be read: tuples are lists in JSON.
            self.config = json.loads(json.dumps(config))
        except TypeError as error:
            raise ArgumentError.here(f"config= is written as JSON: {error}.") from None
        self.path, self.every = make_folder(path), every
        self.writes = jax.process_index() == 0
        self.saved, self.due = -1, time.monotonic() + CHECKPOINT_SECONDS
        self.log: Log | None = None

    def load(self, template: Any) -> Checkpoint | None:
        """The run as it was left, if it was. `template` is its first state."""
        found = checkpoint.load(self.path, template, self.config)
        self.saved = found.round if found else -1
        return found

    def begin(self, at: Point, history: History) -> None:
        """Say what this run is, and find out now whether the folder can be written."""
        if self.writes:
            text = json.dumps(self.config, indent=1) + "\n"
            write_whole(self.path / "config.json", text.encode())
            self.log = Log(self.path / "history.jsonl", history)
            self._save(at, history)

    def write(self, round: int, metrics: dict[str, Any]) -> None:
        """Log a round."""
        if self.log is not None:
            self.log.write(round, metrics)

    def save_if_due(self, loop: Loop) -> None:
        """Save every so many rounds, or every now and then."""
        now = time.monotonic() >= self.due
        if now if self.every is None else loop.at.round % self.every == 0:
            self.save(loop)

    def save(self, loop: Loop) -> None:
        """Save the last round that is complete."""
        self._save(loop.at, loop.history.until(loop.at.round))

    def rescue(self, loop: Loop, error: BaseException) -> None:
        """Save what there is after an error, which stays the one that is raised."""
        try:
            self.save(loop)
        except Exception as second:
            if str(second) != str(error):
                error.add_note(str(second))
        else:
            error.add_note(
                f"Round {loop.at.round} is saved in {self.path}: run it again to go on from there."
            )

    def close(self) -> None:
        """Close the log."""
        if self.log is not None:
            self.log.close()

    def _save(self, at: Point, history: History) -> None:
        if not self.writes or self.saved == at.round:
            return
        start = time.monotonic()
        checkpoint.save(self.path, Checkpoint(at.round, at.state, history, self.config))
        self.saved, end = at.round, time.monotonic()
        self.due = end + max(CHECKPOINT_SECONDS, SHARE * (end - start))
