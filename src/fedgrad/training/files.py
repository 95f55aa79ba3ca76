"""The folder of a run: files that are there whole or not at all."""

import contextlib
import os
import secrets
from datetime import datetime
from pathlib import Path

from fedgrad.core.errors import FederatedError

SEARCH = "search.json"  # is in the folder of a search, and in no other


class RunFolderError(FederatedError):
    """The folder of a run cannot be written or read, or it belongs to another run."""


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder, made if it is not there."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError.here(f"Cannot make the folder {path}: {error.strerror}.") from error
    return path


def write_whole(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write a file so that after a crash at any moment there is the old one or the new one.

    The old one is kept as `previous` if that is given.
    """
    # A name of its own: reports of one run may be written by several processes.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a power cut could leave it empty
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        older = [old.name for old in (path, previous) if old is not None and old.exists()]
        raise RunFolderError.here(
            f"Cannot write {path} ({len(content):,} bytes): {error.strerror}. "
            + (f"What was written before is untouched: {older[0]}. " if older else "")
            + (
                f"Was {path.parent} removed meanwhile? Run it again."
                if isinstance(error, FileNotFoundError)
                else "Make room, or choose another folder, and run it again."
            )
        ) from error


def remove_unfinished(path: Path) -> None:
    """Remove what a process left that was killed while it wrote this file. Nobody writes it now."""
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        left.unlink(missing_ok=True)


def now() -> str:
    """Return the date and the time, as ISO has it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _sync(folder: Path) -> None:
    # The names of files are data of their folder. Not every system can open one.
    with contextlib.suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
