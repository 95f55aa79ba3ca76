"""Selection of the source for `data=`: by its type, and for a file by its first bytes."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedgrad.tasks.data import hugging_face, tff
from fedgrad.tasks.data.arrays import ZIP, Arrays
from fedgrad.tasks.data.dataset import HUGGING_FACE, Asked, DataSet
from fedgrad.tasks.data.json_files import GZIP, Json
from fedgrad.tasks.data.source import Columns, DataError, RawClient, Source, Tick
from fedgrad.tasks.task_checks import TaskError


class Generated(Source):
    """Generated clients."""

    name = "generated"

    def __init__(self, clients: list[RawClient]) -> None:
        self.found, self.total = clients, len(clients)

    def clients(self) -> Iterator[RawClient]:
        """Return the clients in order."""
        return iter(self.found)


@contextlib.contextmanager
def opened(dataset: DataSet, data: Any, asked: Asked, tick: Tick | None = None) -> Iterator[Source]:
    """Open the source that `data` names. Errors in the data also say where to get them."""
    try:
        with contextlib.ExitStack() as stack:
            yield _source(dataset, data, asked, functools.partial(_unpacked, stack, tick))
    except DataError as error:
        if str(dataset.origin) in str(error):
            raise
        raise DataError(f"{error} {dataset.origin}") from error


def _source(dataset: DataSet, data: Any, asked: Asked, unpacked: Callable[[Path], Path]) -> Source:
    rng = np.random.default_rng(asked.seed)

    def divide(columns: Columns, part: str) -> list[np.ndarray]:
        assert dataset.divide is not None
        return dataset.divide(dataset.picked(columns), part or "train", asked.clients, rng)

    its = divide if dataset.divide else None
    if data is None:
        return Generated(dataset.generate(asked.clients, rng))
    if hasattr(data, "load_partition"):
        return hugging_face.Partitions(data, type(data).__name__)
    if not isinstance(data, str | os.PathLike):
        raise TaskError.here(
            f"data= takes a file, a folder, {HUGGING_FACE!r}, or what has load_partition(i); got "
            f"{type(data).__name__}."
        )
    if str(data).partition(":")[0] == HUGGING_FACE:
        return _of_hugging_face(dataset, str(data).partition(":")[2], its)
    path = Path(data)
    if os.path.isdir(path):
        try:
            os.listdir(path)
        except OSError as error:
            raise DataError.here(f"{path} cannot be read: {error.strerror}.") from None
        found = Json.folder(path)
        if found is None:
            raise DataError.here(f"{path} is neither a prepared folder nor one of LEAF's.")
        return found
    return _of_file(path, its, unpacked)


def _unpacked(stack: contextlib.ExitStack, tick: Tick | None, path: Path) -> Path:
    return stack.enter_context(tff.decompressed(path, tick))


def _of_file(path: Path, divide: Any, unpacked: Callable[[Path], Path]) -> Source:
    """Return the source for a file by its first bytes, whatever its name."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except (OSError, ValueError) as error:  # ValueError: not a valid file name
        reason = getattr(error, "strerror", error)
        raise DataError.here(f"{path} cannot be opened: {reason}.") from None
    if start.startswith(tff.LZMA):
        return tff.Sqlite(unpacked(path), str(path))
    if start.startswith(tff.SQLITE):
        return tff.Sqlite(path)
    if start.startswith(ZIP):
        return Arrays.file(path, divide)
    if start.startswith(GZIP) or start.lstrip()[:1] in (b"{", b"["):
        return Json([("", path)], str(path))
    kind = "is empty" if not start else "is neither sqlite, lzma, npz nor JSON"
    raise DataError.here(f"{path} {kind}.")


def _of_hugging_face(dataset: DataSet, name: str, divide: Any) -> Source:
    origin = dataset.origin
    if not origin.hugging_face:
        raise DataError.here(f"Hugging Face has no data set for {dataset.name} that is known here.")
    name = name or origin.hugging_face
    if origin.partition_by:
        return hugging_face.by_column(name, origin.partition_by)
    return hugging_face.divided(name, divide)
