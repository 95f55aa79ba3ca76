"""The lock of a run folder: only one training at a time writes to it.

The operating system holds the lock while a file is open, so it is released however the process
ends. On file systems without locks, there is none.
"""

import errno
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedgrad.training.files import RunFolderError, now

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

NAME = ".lock"
TAKEN = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES}  # error codes for a lock that is held
_held: set[int] = set()  # file descriptors


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder, or raise an error that says who holds the lock."""
    path, descriptor = folder / NAME, None
    try:
        descriptor = _opened(path)
        if descriptor is not None:
            _held.add(descriptor)
            who = {"process": os.getpid(), "machine": platform.node(), "since": now()}
            with suppress(OSError):  # such as a full disk
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, json.dumps(who).encode())
        yield
    finally:
        if descriptor in _held:  # in a forked child process the set is empty
            _held.discard(descriptor)
            with suppress(OSError):
                if _is_at(path, descriptor):
                    path.unlink()
            os.close(descriptor)


def _opened(path: Path) -> int | None:
    """Open and lock the lock file; return None if locking is not possible."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None  # writing to the folder will fail with the reason
        try:
            _lock(descriptor)
        except OSError as error:
            words = _holder(descriptor)
            os.close(descriptor)
            if error.errno not in TAKEN:
                return None
            raise RunFolderError.here(
                f"Another training writes to {path.parent}{words}. Wait until it has ended, or "
                "choose another out=."
            ) from None
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # the previous holder removed the file before we locked it


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        os.lseek(descriptor, 2**30, os.SEEK_SET)  # an offset that is never read
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """Return a phrase that says who holds the lock, if the file says so."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        who = json.loads(os.read(descriptor, 4096))
        own = (who["process"], who["machine"]) == (os.getpid(), platform.node())
        this = " (this one)" if own else ""
        return f": process {who['process']}{this} on {who['machine']}, since {who['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _forget() -> None:
    """Close the inherited locks in a forked process, or they would outlive the parent."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
