"""The reader of a folder of clients, client by client (`stored.py` describes the format)."""

import json
import os
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from operator import index
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.digest import bytes_of
from fedgrad.clients.padding import MOST, fill
from fedgrad.clients.stored import (
    COUNTS,
    FORMAT,
    HEADER,
    NAMES,
    VERSION,
    Leaf,
    keeps,
    rebuilt,
)
from fedgrad.core.errors import StoreError
from fedgrad.core.lossless import extremes, misfit

ALIGNED = 64  # bytes: XLA on CPUs uses buffers with this alignment without a copy


class Unreadable(Exception):
    """A file of a store cannot be read."""


@dataclass(frozen=True, eq=False)
class Folder:
    """A folder of clients, as described by its header. It holds no open file."""

    path: Path
    counts: np.ndarray  # the number of examples of each client
    offsets: np.ndarray  # the first row of each client
    leaves: tuple[Leaf, ...]
    stamps: tuple[int, ...]  # the modification times of the leaves' files
    tree: Any  # the structure of the examples, with the number of a leaf in each place
    named: bool
    about: dict[str, Any]
    digest: str | None  # of all examples, if the header has it

    @staticmethod
    def of(path: str | os.PathLike[str]) -> "Folder":
        """Open a folder; refuse it if it is damaged."""
        folder = Path(path)
        header = _header(folder)
        try:
            leaves = tuple(
                Leaf(
                    str(x["name"]),
                    str(x["file"]),
                    _dtype(x["dtype"]),
                    tuple(map(index, x["shape"])),
                    tuple((number, index(client)) for number, client in x.get("ends", ())),
                )
                for x in header["leaves"]
            )
            clients, examples = int(header["clients"]), int(header["examples"])
            checksum, tree = header["counts_crc32"], rebuilt(header["tree"])
            named, about = bool(header["named"]), dict(header["about"])
            digest = None if header.get("digest") is None else bytes.fromhex(header["digest"]).hex()
            if sorted(jax.tree.leaves(tree)) != list(range(len(leaves))):
                raise ValueError("its tree has other leaves")
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _broken(
                folder, f"{HEADER} is damaged ({type(error).__name__}: {error})"
            ) from None
        sizes = {COUNTS: 8 * clients, **{x.file: x.bytes * examples for x in leaves}}
        stamps = []
        for file, size in sizes.items():
            try:
                found = (folder / file).stat()
            except OSError as error:
                raise _broken(folder, f"{file}: {error.strerror}") from None
            if found.st_size != size:
                raise _broken(folder, f"{file} has {found.st_size:,} bytes and not {size:,}")
            stamps.append(found.st_mtime_ns)
        try:
            content = (folder / COUNTS).read_bytes()
        except OSError as error:
            raise _broken(folder, f"{COUNTS}: {error.strerror}") from None
        counts = np.frombuffer(content, "<i8")
        right = zlib.crc32(content) == checksum and counts.sum() == examples
        if not right or not len(counts) or counts.min() < 1:
            raise _broken(folder, f"{COUNTS} is damaged")
        if counts.max() > MOST:
            raise _broken(folder, f"a client has more than {MOST:,} examples")
        if (folder / HEADER).stat().st_mtime_ns < max(stamps):
            digest = None  # the examples were changed, or the files copied one by one
        offsets, written = np.cumsum(counts) - counts, tuple(stamps[1:])
        known = (leaves, written, tree, named, about, digest)
        return Folder(folder, counts.astype(np.int32), offsets, *known)

    @property
    def row_bytes(self) -> int:
        """The size of one example, all leaves together."""
        return sum(leaf.bytes for leaf in self.leaves)

    def names(self) -> list[str] | None:
        """Return the names of all clients, if they have any."""
        if not self.named:
            return None
        try:
            names = [json.loads(line) for line in (self.path / NAMES).read_bytes().splitlines()]
        except (OSError, ValueError) as error:
            raise _broken(self.path, f"{NAMES} cannot be read ({error})") from None
        if len(names) != len(self.counts):
            raise _broken(self.path, f"{NAMES} has {len(names)} names, not {len(self.counts)}")
        return names

    def read(self, clients: np.ndarray, rows: int) -> Any:
        """Return the examples of these clients, one after another, in arrays of so many rows.

        Raises `Unreadable`, which has no line of the user's code, because this may run in any
        thread.
        """
        filled = int(self.counts[clients].sum())
        found = []
        for leaf, stamp in zip(self.leaves, self.stamps, strict=True):
            array = _aligned((rows, *leaf.shape), leaf.dtype)
            view = bytes_of(array)
            try:
                with open(self.path / leaf.file, "rb", buffering=0) as file:
                    self._require_unchanged(os.fstat(file.fileno()), leaf, stamp)
                    for start, place, length in self._runs(clients, leaf.bytes):
                        file.seek(start)
                        self._fill(file, view[place : place + length], leaf)
            except OSError as error:
                raise Unreadable(f"{self.path / leaf.file}: {error.strerror}") from error
            fill(array, filled)
            found.append(array)
        return jax.tree.map(lambda number: found[number], self.tree)

    def require_lossless(self, read: Any) -> None:
        """Refuse a store with numbers that JAX would change, in these clients or in others, before
        training starts."""
        arrays = jax.tree.leaves(read)
        for number, array in zip(jax.tree.leaves(self.tree), arrays, strict=True):
            leaf = self.leaves[number]
            if leaf.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype):
                continue
            for end, client in leaf.ends or ((end, "?") for end in extremes(array)):
                if why := misfit((end,), leaf.dtype):
                    raise StoreError.here(f"{self.path}: client {client}{leaf.name}: {why}")

    def _runs(self, clients: np.ndarray, size: int) -> Iterator[tuple[int, int, int]]:
        """Return contiguous reads, with neighboring clients joined: (offset in the file, offset in
        the array, length), in bytes."""
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
                raise self._unreadable(leaf, file.tell(), why)
            done += more

    def _require_unchanged(self, file: os.stat_result, leaf: Leaf, stamp: int) -> None:
        """Refuse a file that was rewritten: clients may be elsewhere in it."""
        if file.st_size < leaf.bytes * int(self.counts.sum(dtype=np.int64)):
            raise self._unreadable(leaf, file.st_size, "the file was cut off")
        if file.st_mtime_ns != stamp:
            raise Unreadable(
                f"{self.path / leaf.file}: it was written to since the store was opened. Open it "
                "again: fg.stored(path)."
            )

    def _unreadable(self, leaf: Leaf, place: int, why: str) -> Unreadable:
        client = int(np.searchsorted(self.offsets, place // leaf.bytes, side="right")) - 1
        return Unreadable(
            f"{self.path / leaf.file}: the examples of client {client} cannot be read ({why}), as "
            "they could when the store was opened. Write it again."
        )


def _header(folder: Path) -> dict[str, Any]:
    try:
        there = stat.S_ISDIR(folder.stat().st_mode)
        what = "is a file and no folder"
    except FileNotFoundError:
        there, what = False, "does not exist"
    except OSError as error:
        there, what = False, f"cannot be read: {error.strerror}"
    if not there:
        raise StoreError.here(
            f"{folder} {what}. A store of clients is a folder: fg.store(path, clients) writes one."
        )
    try:
        header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        advice = "fg.store(path, clients) writes one."
        within = sorted(file.parent.name for file in folder.glob(f"*/{HEADER}"))
        if within:
            advice = f"Stores are within it: {', '.join(within)}."
        elif ".writing-" in folder.name:
            advice = "It was being written when that was interrupted: delete it and write it again."
        raise StoreError.here(
            f"{folder} is no store of clients: it has no {HEADER}. {advice}"
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


def _dtype(name: str) -> np.dtype[Any]:
    dtype = jnp.dtype(name)
    if dtype.name != name or not keeps(dtype):
        raise ValueError(f"dtype {name}")
    return dtype


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
