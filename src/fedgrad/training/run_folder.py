"""The folder of a run: config.json, history.jsonl, the checkpoint and a report."""

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax

from fedgrad.clients.handles import Handle, handles
from fedgrad.core.errors import ArgumentError, known_arguments, known_fields, require_whole
from fedgrad.core.types import Params, State
from fedgrad.training import checkpoint
from fedgrad.training.best import Best
from fedgrad.training.checkpoint import Checkpoint
from fedgrad.training.files import (
    SEARCH,
    RunFolderError,
    make_folder,
    remove_unfinished,
    write_whole,
)
from fedgrad.training.history import History
from fedgrad.training.live import Live, live
from fedgrad.training.lock import locked
from fedgrad.training.log import Log

CHECKPOINT_SECONDS = 30.0
OTHER_DATA = "other data"  # the value of resume= that allows other examples
SHARE = 50  # saving may take 1/SHARE of the time


@known_fields
@dataclass(frozen=True)
class RunFolder:
    """A folder for config.json, history.jsonl and the checkpoint of a run: `fg.fit(..., out=)`.

    A resumed run ends exactly as if it had never been interrupted. `report.html` shows the run from
    its first rounds on, and is updated during training.

    Args:
        path: The folder, created if needed.
        every: How many rounds lie between two checkpoints; by default one is written about twice a
            minute. Checkpoints are also written at the end and when training is interrupted.
        resume: Whether to resume from a checkpoint of the same run. One of a run on other examples
            is refused, unless `resume="other data"` allows it. With `resume=False` a new run
            overwrites the folder.
        config: Further settings to record in config.json.
        report: Whether to write `report.html`.
        open: Whether to open the report in a browser.

    Raises:
        ArgumentError: If the arguments do not fit together, or `config` is not JSON.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    every: int | None = None
    resume: bool | Literal["other data"] = True
    config: Mapping[str, Any] = field(default_factory=dict)
    report: bool = True
    open: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise ArgumentError.here(
                f'out= takes a folder, such as out="runs/1", got {self.path!r}.'
            )
        if not isinstance(self.resume, bool) and self.resume != OTHER_DATA:
            raise ArgumentError.here(
                f'fg.run_folder(resume={self.resume!r}): write True, False or "{OTHER_DATA}".'
            )
        if self.open and not self.report:
            raise ArgumentError.here("open=True opens the report, which report=False leaves out.")
        if self.every is not None:
            require_whole("every", self.every)
        try:
            json.dumps(self.config)
        except TypeError as error:
            raise ArgumentError.here(f"config= is written as JSON: {error}.") from None


run_folder = known_arguments(called="run_folder")(RunFolder)


class Keeping:
    """Writes a run to its folder, if it has one. With several processes, only the first writes."""

    def __init__(self, folder: RunFolder | None = None, config: Mapping[str, Any] = {}) -> None:
        self.folder, self.config = folder, json.loads(json.dumps(config))  # turns tuples into lists
        self.writes = folder is not None and jax.process_index() == 0
        self.saved, self.due = -1, time.monotonic() + CHECKPOINT_SECONDS
        self.log: Log | None = None
        self.lock = ExitStack()
        # Handles to node values of the last two checkpoints.
        self.states: tuple[list[Handle], ...] = ()

    def begin(self, state: State, rounds: int) -> Checkpoint:
        """Return where to start: at the initial state, or at the checkpoint of an interrupted run.

        Writes the config and a checkpoint, so that an unwritable folder fails now.
        """
        at = Checkpoint(0, state, History(), self.config)
        if self.folder is None:
            return at
        path = make_folder(self.folder.path)
        _require_ours(path)
        if self.writes:
            self.lock.enter_context(locked(path))
            remove_unfinished(path / checkpoint.NAME)
        other_data = self.folder.resume == OTHER_DATA
        found = None
        if self.folder.resume:
            found = checkpoint.load(path, state, self.config, other_data)
        if found is not None:
            self.saved, at = found.round, found
            self.config["planned"] = found.config.get("planned", found.config["rounds"])
        if at.round > rounds:
            raise RunFolderError.here(
                f"{path} has {at.round} rounds already, which is more than rounds={rounds}. "
                "Ask for more, or choose another folder, or give resume=False to fg.run_folder."
            )
        if self.writes:
            _write_config(path, self.config)
            self.log = Log(path / "history.jsonl", at.history)
            self.save(at.round, at.state, at.history, at.best)
        return at

    def shown(self, rounds: int, params: Params, history: History) -> Live:
        """Return the live view of the run."""
        if self.folder is None or not self.writes:
            return Live()
        path, more = Path(self.folder.path), (self.folder.report, self.folder.open)
        return live(path, self.config, rounds, params, history, *more)

    def write(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Log a round."""
        if self.log is not None:
            self.log.write(round, metrics)

    def save_if_due(
        self, round: int, state: State, history: History, best: Best | None = None
    ) -> None:
        """Save a checkpoint if one is due by `every`, or by the time since the last one."""
        every = None if self.folder is None else self.folder.every
        if time.monotonic() >= self.due if every is None else round % every == 0:
            self.save(round, state, history, best)

    def save(self, round: int, state: State, history: History, best: Best | None = None) -> None:
        """Save a checkpoint of the last complete round."""
        if self.folder is None or not self.writes or self.saved == round:
            return
        start = time.monotonic()
        now = Checkpoint(round, state, history.until(round), self.config, best)
        checkpoint.save(Path(self.folder.path), now)
        self.saved, end = round, time.monotonic()
        self.states = (handles(state), *self.states[:1])  # nodes keep the values of both
        self.due = end + max(CHECKPOINT_SECONDS, SHARE * (end - start))

    def rescue(
        self,
        round: int,
        state: State,
        history: History,
        error: BaseException,
        best: Best | None = None,
    ) -> None:
        """Save a checkpoint after an error, without replacing that error."""
        if self.folder is None:
            return
        try:
            self.save(round, state, history, best)
        except Exception as second:
            if str(second) != str(error):
                error.add_note(str(second))
        else:
            words = (
                f"Round {round} is saved in {self.folder.path}: run it again to go on from there."
            )
            error.add_note(words)
            if isinstance(error, SystemExit):  # its notes are not shown
                print(words, file=sys.stderr, flush=True)

    def end(self, stopped: str | None) -> None:
        """Write the reason to config.json if training ended before the last round."""
        if self.folder is not None and self.writes and stopped is not None:
            _write_config(Path(self.folder.path), {**self.config, "stopped": stopped})

    def close(self) -> None:
        """Close the log and release the lock. Nodes keep the values of the checkpoints."""
        with self.lock:
            for handle in handles(self.states):
                handle.leave()
            if self.log is not None:
                self.log.close()


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    write_whole(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())


def _require_ours(folder: Path) -> None:
    """Refuse to overwrite a config.json of other software, or to write into a search folder."""
    if (folder / SEARCH).exists():
        raise RunFolderError.here(
            f"{folder} holds a search ({SEARCH}), and a run is kept in a folder of its own. Choose "
            f"another one, such as out={str(folder / 'run')!r}."
        )
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        ours = "fedgrad" in found["versions"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise RunFolderError.here(
            f"{path} was not written by fedgrad, and would be lost. Choose another folder, such as "
            f"out={str(folder / 'run')!r}."
        )
