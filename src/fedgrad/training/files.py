"""Files of a run folder, written atomically."""

import contextlib
import os
import secrets
from datetime import datetime
from pathlib import Path

from fedgrad.core.errors import FederatedError

SEARCH = "search.json"  # exists only in the folder of a search


class RunFolderError(FederatedError):
    """The folder of a run cannot be written or read, or it belongs to another run."""


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """Create a folder, with its parents, unless it exists."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError.here(f"Cannot make the folder {path}: {error.strerror}.") from error
    return path


def write_whole(path: Path, content: bytes, previous: Path | None = None) -> None:
    """Write a file atomically: after a crash at any moment, either the old or the new file exists.

    If `previous` is given, the old file is kept under that name.
    """
    # The name is unique because several processes may write the report of one run.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a power cut could leave an empty file
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
    """Remove temporary files left by a process that was killed while writing this file. The caller
    holds the lock, so no other process is writing."""
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        left.unlink(missing_ok=True)


def now() -> str:
    """Return the current local date and time in ISO format."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _sync(folder: Path) -> None:
    # File names are data of their folder, so it is synced too; not every system can open one.
    with contextlib.suppress(PermissionError, IsADirectoryError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
