"""Folders written by `fedgrad data prepare`: a store of clients for each part, and a header.

The folder gets its name when it is complete; an interrupted conversion leaves nothing that opens.
"""

import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedgrad.clients.on_disk import stored
from fedgrad.clients.population import Population
from fedgrad.clients.stored import Writer, appearing
from fedgrad.tasks.data.source import DataError
from fedgrad.tasks.task_checks import TaskError

HEADER = "prepared.json"
FORMAT = 1
PARTS = ("train", "test", "validation")


def is_prepared(path: Path) -> bool:
    """Return whether a folder has the header of a prepared one."""
    return os.path.isfile(path / HEADER)  # False also if the folder is not readable


def opened(path: Path, task: str) -> tuple[Population, Population | None, Population | None]:
    """Return the training, test and validation clients; only headers are read."""
    try:
        header = json.loads((path / HEADER).read_text())
        its_task, version, parts = header["task"], header["format"], dict(header["clients"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError.here(f"{path / HEADER} is broken: {error}.") from error
    if its_task != task:
        raise DataError.here(f"{path} was prepared for the task {its_task!r}, not for {task!r}.")
    if version != FORMAT:
        raise DataError.here(
            f"{path} was prepared by another version of fedgrad. Prepare it again."
        )
    found: list[Any] = [stored(path / part) if part in parts else None for part in PARTS]
    for part, clients in zip(PARTS, found, strict=True):
        there = None if clients is None else len(clients)
        if there != parts.get(part) or (part == "train" and not there):
            raise DataError.here(
                f"{path} is not whole: it has {there or 'no'} clients to {part}, and should have "
                f"{parts.get(part, 'some')}. Prepare it again."
            )
    return found[0], found[1], found[2]


def require_free(path: Path) -> None:
    """Refuse to overwrite anything."""
    if os.path.lexists(path):
        raise DataError.here(f"{path} exists already. Remove it, or choose another folder.")


def written(
    path: Path, task: str, clients: Iterable[tuple[str, str, Any]], known: Any
) -> dict[str, int]:
    """Write (part, name, examples) of clients into a folder, and what was learned from all of them.
    Return the number of clients of each part."""
    require_free(path)
    counts: dict[str, int] = {}
    try:
        with appearing(path) as making:
            with ExitStack() as stack:
                writers: dict[str, Writer] = {}
                for part, name, examples in clients:
                    if part not in writers:
                        writers[part] = stack.enter_context(Writer(making / part))
                    writers[part].add(examples, name=name)
                    counts[part] = counts.get(part, 0) + 1
            (making / "known.json").write_text(json.dumps(known))
            header = {"format": FORMAT, "task": task, "clients": counts}
            (making / HEADER).write_text(json.dumps(header))
            require_free(path)
    except OSError as error:
        raise TaskError.here(f"{path} cannot be written: {error.strerror or error}.") from error
    return counts
