"""What a run leaves in its folder: config.json, history.jsonl, the checkpoint and a report."""

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

from fedgrad.core.errors import ArgumentError, known_arguments, known_fields, require_whole
from fedgrad.core.types import Params, State
from fedgrad.federation.protocol import state as on_nodes
from fedgrad.federation.protocol.values import NodeValue, handles
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
OTHER_DATA = "other data"  # what resume= says of examples that are meant to be others
SHARE = 50  # saving may take one part in so many of the time


@known_fields
@dataclass(frozen=True)
class RunFolder:
    """A folder for config.json, history.jsonl and the checkpoint of a run: `fg.fit(..., out=)`.

    The checkpoint is written every so many rounds (by default about twice a minute), at the end,
    and when training is interrupted. With `resume`, a run that finds its own checkpoint there goes
    on from it, and ends exactly as if it had never been interrupted. A checkpoint of a run on other
    examples is refused, unless `resume="other data"` says that they are meant to be others; with
    `resume=False` a new run writes over what is there. `config` is written into
    config.json too. `report.html` shows the run from its first rounds on (unless `report` is
    False), and follows it in a browser, which is opened with `open`.
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
    """A run that is being kept, if it has a folder. Of several processes only the first writes."""

    def __init__(self, folder: RunFolder | None = None, config: Mapping[str, Any] = {}) -> None:
        self.folder, self.config = folder, json.loads(json.dumps(config))  # tuples become lists
        self.writes = folder is not None and jax.process_index() == 0
        self.saved, self.due = -1, time.monotonic() + CHECKPOINT_SECONDS
        self.log: Log | None = None
        self.lock = ExitStack()
        # What nodes have of the checkpoint, and of the one before it.
        self.states: tuple[list[NodeValue], ...] = ()

    def begin(self, state: State, rounds: int) -> Checkpoint:
        """Where to go on: at the first state, or where the run was left.

        Say what this run is, and find out now whether the folder can be written.
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
        """What shows the run to those who look at its folder."""
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
        """Save every so many rounds, or every now and then."""
        every = None if self.folder is None else self.folder.every
        if time.monotonic() >= self.due if every is None else round % every == 0:
            self.save(round, state, history, best)

    def save(self, round: int, state: State, history: History, best: Best | None = None) -> None:
        """Save the last round that is complete."""
        if self.folder is None or not self.writes or self.saved == round:
            return
        start = time.monotonic()
        now = Checkpoint(round, state, history.until(round), self.config, best)
        checkpoint.save(Path(self.folder.path), now)
        self.saved, end = round, time.monotonic()
        self.states = (handles(state), *self.states[:1])  # so they keep what both need
        self.due = end + max(CHECKPOINT_SECONDS, SHARE * (end - start))

    def rescue(
        self,
        round: int,
        state: State,
        history: History,
        error: BaseException,
        best: Best | None = None,
    ) -> None:
        """Save what there is after an error, which stays the one that is raised."""
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
            if isinstance(error, SystemExit):  # which nobody shows
                print(words, file=sys.stderr, flush=True)

    def end(self, stopped: str | None) -> None:
        """Training has ended; write down why, if it was before the last round."""
        if self.folder is not None and self.writes and stopped is not None:
            _write_config(Path(self.folder.path), {**self.config, "stopped": stopped})

    def close(self) -> None:
        """Close the log, and leave the folder to others; what is saved stays on nodes."""
        with self.lock:
            on_nodes.left(self.states)
            if self.log is not None:
                self.log.close()


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    write_whole(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())


def _require_ours(folder: Path) -> None:
    """Refuse to write over what is somebody else's, or beside a search."""
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
