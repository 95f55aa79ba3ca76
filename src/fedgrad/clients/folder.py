"""A folder of clients, read client by client (`stored.py` says what is in it)."""

import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.padding import fill
from fedgrad.clients.stored import COUNTS, FORMAT, HEADER, NAMES, VERSION, Leaf, bytes_of, rebuilt
from fedgrad.core.errors import StoreError

ALIGNED = 64  # bytes: such buffers are used by XLA on CPUs as they are, without a copy


@dataclass(frozen=True, eq=False)
class Folder:
    """A folder of clients, as its header says. It holds no open file."""

    path: Path
    counts: np.ndarray  # of examples, for each client
    offsets: np.ndarray  # the row at which each client begins
    leaves: tuple[Leaf, ...]
    tree: Any  # the structure of the examples, with the number of a leaf in each place
    named: bool
    about: dict[str, Any]

    @staticmethod
    def of(path: str | os.PathLike[str]) -> "Folder":
        """What there is, or what is wrong with it."""
        folder = Path(path)
        header = _header(folder)
        try:
            leaves = tuple(
                Leaf(x["name"], x["file"], jnp.dtype(x["dtype"]), tuple(x["shape"]))
                for x in header["leaves"]
            )
            clients, examples = int(header["clients"]), int(header["examples"])
            checksum, tree = header["counts_crc32"], rebuilt(header["tree"])
            named, about = bool(header["named"]), dict(header["about"])
        except (KeyError, TypeError, ValueError) as error:
            raise _broken(
                folder, f"{HEADER} is damaged ({type(error).__name__}: {error})"
            ) from None
        sizes = {COUNTS: 8 * clients, **{x.file: x.bytes * examples for x in leaves}}
        for file, size in sizes.items():
            try:
                found = (folder / file).stat().st_size
            except OSError as error:
                raise _broken(folder, f"{file}: {error.strerror}") from None
            if found != size:
                raise _broken(folder, f"{file} has {found:,} bytes and not {size:,}")
        content = (folder / COUNTS).read_bytes()
        counts = np.frombuffer(content, "<i8")
        if zlib.crc32(content) != checksum or counts.sum() != examples or counts.min() < 1:
            raise _broken(folder, f"{COUNTS} is damaged")
        offsets = np.cumsum(counts) - counts
        return Folder(folder, counts.astype(np.int32), offsets, leaves, tree, named, about)

    @property
    def row_bytes(self) -> int:
        """Of one example, all leaves together."""
        return sum(leaf.bytes for leaf in self.leaves)

    def names(self) -> list[str] | None:
        """Those of all clients, where they have any."""
        if not self.named:
            return None
        return [json.loads(line) for line in (self.path / NAMES).read_bytes().splitlines()]

    def read(self, clients: np.ndarray, rows: int) -> Any:
        """The examples of these clients, one client after another, in arrays of so many rows.

        Raises `Unreadable`, which knows no line of the user's code: this may run in any thread.
        """
        filled = int(self.counts[clients].sum())
        found = []
        for leaf in self.leaves:
            array = _aligned((rows, *leaf.shape), leaf.dtype)
            view = bytes_of(array)
            try:
                with open(self.path / leaf.file, "rb", buffering=0) as file:
                    for start, place, length in self._runs(clients, leaf.bytes):
                        file.seek(start)
                        self._fill(file, view[place : place + length], leaf)
            except OSError as error:
                raise Unreadable(f"{self.path / leaf.file}: {error.strerror}") from error
            fill(array, filled)
            found.append(array)
        return jax.tree.map(lambda number: found[number], self.tree)

    def _runs(self, clients: np.ndarray, size: int) -> Iterator[tuple[int, int, int]]:
        """What is read at once, neighbours together: in bytes where it is in the file, where it
        goes, and how long it is."""
        begin, count = self.offsets[clients], self.counts[clients].astype(np.int64)
        end = begin + count
        first = np.flatnonzero(np.r_[True, begin[1:] != end[:-1]])
        last = np.r_[first[1:], len(clients)] - 1
        place = (np.cumsum(count) - count)[first]
        table = (begin[first], place, end[last] - begin[first])
        return zip(*((column * size).tolist() for column in table), strict=True)

    def _fill(self, file: FileIO, view: memoryview, leaf: Leaf) -> None:
        done = 0
        while done < len(view):
            try:
                more, why = file.readinto(view[done:]), "the file was cut off"
            except OSError as error:
                more, why = None, str(error.strerror)
            if not more:
                row = file.tell() // leaf.bytes
                client = int(np.searchsorted(self.offsets, row, side="right")) - 1
                raise Unreadable(
                    f"{self.path / leaf.file}: the examples of client {client} cannot be read "
                    f"({why}), as they could when the store was opened. Write it again."
                )
            done += more


class Unreadable(Exception):
    """What is wrong with a file of a store."""


def _header(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        what = "is a file and no folder" if folder.exists() else "does not exist"
        raise StoreError.here(
            f"{folder} {what}. A store of clients is a folder: fg.store(path, clients) writes one."
        )
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        unfinished = (
            " It was being written when that was interrupted: delete it and write it again."
            if ".writing-" in folder.name
            else " fg.store(path, clients) writes one."
        )
        raise StoreError.here(
            f"{folder} is no store of clients: it has no {HEADER}.{unfinished}"
        ) from None
    except (OSError, ValueError) as error:
        raise _broken(folder, f"{HEADER} cannot be read ({error})") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise StoreError.here(
            f"{folder} is no store of clients: its {HEADER} is somebody else's. "
            "fg.store(path, clients) writes one."
        )
    if header.get("version") != VERSION:
        raise StoreError.here(
            f"{folder} has version {header.get('version')} of the format, and this fedgrad reads "
            f"version {VERSION}. Write it again, or use the fedgrad that wrote it."
        )
    if sys.byteorder != "little":
        raise StoreError.here(f"{folder}: stores are read on little-endian machines only.")
    return header


def _broken(folder: Path, what: str) -> StoreError:
    return StoreError.here(
        f"The store {folder} is broken: {what}. Copy it again from where it is whole, or write it "
        "again."
    )


def _aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGNED, np.uint8)
    start = -raw.ctypes.data % ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)
