"""Clients in a folder: written once, one after another, and read again client by client.

A folder has `store.json`, which says what there is; `counts.bin`, how many examples each client
has, as 64-bit integers; and for each leaf of the examples a file with the rows of all clients, one
after another, as they are in memory (little-endian): `np.memmap(file, dtype, shape=(rows, *shape))`
reads it too. Clients who were given names have those in `names.txt`, a JSON string in each line.
"""

import json
import os
import secrets
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.in_memory import count_of
from fedgrad.core.errors import CohortError, StoreError

HEADER, COUNTS, NAMES = "store.json", "counts.bin", "names.txt"
FORMAT, VERSION = "clients of fedgrad", 1
BUFFER = 2**20  # bytes of each file that wait in memory to be written
ALIGNED = 64  # bytes: such buffers are used by XLA on CPUs as they are, without a copy


@dataclass(frozen=True)
class Leaf:
    """One leaf of the examples of all clients: a file of rows."""

    name: str
    file: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of one example

    @property
    def bytes(self) -> int:
        """Of one example."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Writer:
    """Writes clients into a folder, in the memory of one of them.

        with Writer("clients") as writer:
            for client in clients:
                writer.add({"x": images, "y": labels})

    The folder is there when this is left, whole; if it is left by an error, nothing is. A process
    that is killed leaves a folder whose name begins with a dot, which does not open. `about` is
    whatever is worth knowing about the data, as JSON.
    """

    def __init__(
        self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self.about = dict(about or {})
        self.counts: list[int] = []
        self.leaves: list[Leaf] = []
        self.first: Any = None  # the first client's examples, without any
        self.named = False

    def __enter__(self) -> Self:
        _require_free(self.path)
        try:
            json.dumps(self.about)
        except TypeError as error:
            raise StoreError.here(f"about= is written as JSON: {error}.") from None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.folder = self.path.with_name(f".{self.path.name}.writing-{secrets.token_hex(4)}")
        self.folder.mkdir()
        self.closing = ExitStack()
        self.files: list[BinaryIO] = []
        self.names = self._open(NAMES)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self.closing.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, examples: Any, name: str | None = None) -> None:
        """One more client: a pytree of arrays with one row for each example."""
        number = len(self.counts)
        arrays = jax.tree.map(np.asarray, examples)
        if self.first is None:
            self._begin(arrays, named=name is not None)
        if self.named != (name is not None):
            raise StoreError.here(
                f"Client {number} has {'no' if self.named else 'a'} name, unlike those before. "
                "Name all clients, or none."
            )
        count = count_of(number, arrays, self.first)
        for leaf, array in zip(self.leaves, jax.tree.leaves(arrays), strict=True):
            if array.dtype != leaf.dtype:
                raise CohortError.here(
                    f"Examples of client {number} are {array.dtype}{leaf.name}, those of client 0 "
                    f"{leaf.dtype}. Cast them: a store keeps one dtype."
                )
        for file, array in zip(self.files, jax.tree.leaves(arrays), strict=True):
            file.write(_bytes_of(np.ascontiguousarray(array)))
        if name is not None:
            self.names.write(json.dumps(name).encode() + b"\n")
        self.counts.append(count)

    def _begin(self, arrays: Any, named: bool) -> None:
        self.tree = _described(arrays)
        count_of(0, arrays, arrays)
        for i, (path, array) in enumerate(jax.tree_util.tree_flatten_with_path(arrays)[0]):
            name = jax.tree_util.keystr(path)
            if array.dtype.kind in "OUSMm" or array.dtype.names is not None:
                raise StoreError.here(
                    f"The examples{name} are {array.dtype}. A store keeps numbers: encode them."
                )
            if not array.dtype.isnative:
                raise StoreError.here(
                    f"The examples{name} have the byte order of another machine ({array.dtype}). "
                    "Cast them to that of this one: x.astype(x.dtype.newbyteorder('='))."
                )
            self.leaves.append(Leaf(name, f"leaf{i}.bin", array.dtype, array.shape[1:]))
            self.files.append(self._open(self.leaves[-1].file))
        self.first, self.named = jax.tree.map(lambda x: x[:0], arrays), named

    def _open(self, name: str) -> BinaryIO:
        return self.closing.enter_context(open(self.folder / name, "wb", buffering=BUFFER))

    def _finish(self) -> None:
        if not self.counts:
            raise StoreError.here(f"No clients were added, so {self.path} is not written.")
        counts = np.asarray(self.counts, "<i8").tobytes()
        header = {
            "format": FORMAT,
            "version": VERSION,
            "clients": len(self.counts),
            "examples": sum(self.counts),
            "counts_crc32": zlib.crc32(counts),
            "named": self.named,
            "tree": self.tree,
            "leaves": [
                {"name": x.name, "file": x.file, "dtype": x.dtype.name, "shape": list(x.shape)}
                for x in self.leaves
            ],
            "about": self.about,
        }
        # The header comes last: what has none does not open.
        for name, content in ((COUNTS, counts), (HEADER, json.dumps(header, indent=1).encode())):
            file = self._open(name)
            file.write(content)
            self.files.append(file)
        for file in (*self.files, self.names):
            file.flush()
            os.fsync(file.fileno())
        self.closing.close()
        if not self.named:
            (self.folder / NAMES).unlink()
        _require_free(self.path)
        os.rename(self.folder, self.path)


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
            checksum, tree = header["counts_crc32"], _rebuilt(header["tree"])
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
        """The examples of these clients, one client after another, in arrays of so many rows. The
        others are examples too, copies of the first one (`clients/padding.py` says why).

        Raises `Unreadable`, which knows no line of the user's code: this may run in any thread.
        """
        filled = int(self.counts[clients].sum())
        found = []
        for leaf in self.leaves:
            array = _aligned((rows, *leaf.shape), leaf.dtype)
            view = _bytes_of(array)
            try:
                with open(self.path / leaf.file, "rb", buffering=0) as file:
                    for client, start, place, length in self._runs(clients, leaf.bytes):
                        file.seek(start)
                        self._fill(file, view[place : place + length], client)
            except OSError as error:
                raise Unreadable(f"{self.path / leaf.file}: {error.strerror}") from error
            array[filled:] = array[0]
            found.append(array)
        return jax.tree.map(lambda number: found[number], self.tree)

    def _runs(self, clients: np.ndarray, size: int) -> Iterator[tuple[int, int, int, int]]:
        """What is read at once, neighbours together: the first client, and in bytes where it is in
        the file, where it goes, and how long it is."""
        begin, count = self.offsets[clients], self.counts[clients].astype(np.int64)
        end = begin + count
        first = np.flatnonzero(np.r_[True, begin[1:] != end[:-1]])
        last = np.r_[first[1:], len(clients)] - 1
        place = (np.cumsum(count) - count)[first]
        length = end[last] - begin[first]
        table = (clients[first], begin[first] * size, place * size, length * size)
        return zip(*(column.tolist() for column in table), strict=True)

    def _fill(self, file: BinaryIO, view: memoryview, client: int) -> None:
        done = 0
        while done < len(view):
            more = file.readinto(view[done:])  # type: ignore[attr-defined]
            if not more:
                raise Unreadable(
                    f"{file.name} ends before the examples of client {client} (or of one after "
                    "it) do. It was cut off since the store was opened: write it again."
                )
            done += more


class Unreadable(Exception):
    """What is wrong with a file of a store."""


def _require_free(path: Path) -> None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise StoreError.here(
            f"{path} exists already. A store is written once: remove it, or choose another path."
        )


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


def _bytes_of(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _described(tree: Any) -> Any:
    """The structure of a pytree as JSON: `{"dict": ...}`, `{"list": ...}`, `{"tuple": ...}`, None,
    and for a leaf its number."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        raise StoreError.here(f"The examples have no arrays: {tree!r}.")
    return _json(jax.tree.unflatten(structure, range(len(leaves))))


def _json(node: Any) -> Any:
    if node is None or isinstance(node, int):
        return node
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: _json(value) for key, value in node.items()}}
    if type(node) in (list, tuple):
        return {type(node).__name__: [_json(value) for value in node]}
    raise StoreError.here(
        f"The examples have a {type(node).__name__} in them. A store keeps arrays in dicts (with "
        "names as keys), lists and tuples."
    )


def _rebuilt(node: Any) -> Any:
    if node is None or isinstance(node, int):
        return node
    ((kind, inner),) = node.items()
    if kind == "dict":
        return {key: _rebuilt(value) for key, value in inner.items()}
    return {"list": list, "tuple": tuple}[kind](map(_rebuilt, inner))
