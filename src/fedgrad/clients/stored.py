"""The writer of clients in a folder, one after another (`folder.py` reads them).

A folder has `store.json`, which describes the rest; `counts.bin`, the number of examples of each
client as 64-bit integers; and for each leaf of the examples a file with the rows of all clients,
one after another, as they are in memory (little-endian): `np.memmap(file, dtype, shape=(rows,
*shape))` reads it too. If clients have names, they are in `names.txt`, one JSON string per line.
`store.json` has a digest of all examples (`digest.py`), unless an older version wrote it.
"""

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients import digest
from fedgrad.clients.in_memory import count_of, read_client
from fedgrad.core.errors import CohortError, StoreError
from fedgrad.core.lossless import extremes

HEADER, COUNTS, NAMES = "store.json", "counts.bin", "names.txt"
FORMAT, VERSION = "clients of fedgrad", 1
BUFFER = 2**20  # the write buffer of each file, in bytes


@dataclass(frozen=True)
class Leaf:
    """One leaf of the examples of all clients: a file of rows."""

    name: str
    file: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of one example
    # The least and the largest number, each with its client, for 64-bit numbers.
    ends: tuple[tuple[Any, int], ...] = ()

    @property
    def bytes(self) -> int:
        """The size of one example."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def kind(self) -> str:
        """The description of the leaf in the digest of all examples."""
        return digest.kind(self.name, self.dtype, self.shape)


class Writer:
    """Writes clients into a folder, using the memory of one of them.

        with Writer("clients") as writer:
            for client in clients:
                writer.add({"x": images, "y": labels})

    The complete folder appears when the context exits; after an error, nothing is left. A process
    that is killed leaves a folder whose name begins with a dot, which cannot be opened. `about` is
    a description of the data, as JSON.
    """

    def __init__(
        self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self.about = dict(about or {})
        self.counts: list[int] = []
        self.digests = bytearray()  # of each client
        self.leaves: list[Leaf] = []
        self.ends: dict[int, Any] = {}  # by leaf, as in `Leaf`
        self.first: Any = None  # the first client's examples, with no rows
        self.named = False

    def __enter__(self) -> Self:
        _require_free(self.path)
        try:
            json.dumps(self.about)
        except TypeError as error:
            raise StoreError.here(f"about= is written as JSON: {error}.") from None
        self.closing = ExitStack()
        try:
            self.folder = self.closing.enter_context(appearing(self.path))
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.files: list[BinaryIO] = []
        self.names = self._open(NAMES)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            with suppress(OSError):  # e.g. the disk is full again
                self.closing.__exit__(kind, error, trace)
            return
        try:
            with self.closing:
                self._finish()
        except OSError as failed:
            raise _unwritable(self.path, failed) from failed

    def add(self, examples: Any, name: str | None = None) -> None:
        """Add a client: a pytree of arrays with one row per example."""
        number = len(self.counts)
        arrays = jax.tree.map(np.asarray, read_client(number, examples))
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
        try:
            for file, array in zip(self.files, jax.tree.leaves(arrays), strict=True):
                file.write(digest.bytes_of(np.ascontiguousarray(array)))
            if name is not None:
                self.names.write(json.dumps(name).encode() + b"\n")
        except OSError as error:
            raise _unwritable(self.path, error) from error
        for i, array in enumerate(jax.tree.leaves(arrays)):
            if array.dtype.itemsize > 4:
                low, high = ((x, number) for x in extremes(array))
                least, most = self.ends.get(i, (low, high))
                self.ends[i] = min(least, low), max(most, high)
        self.counts.append(count)
        self.digests += digest.of_each(jax.tree.leaves(arrays), [0], [count])

    def _begin(self, arrays: Any, named: bool) -> None:
        self.tree = _described(arrays)
        count_of(0, arrays, arrays)
        for i, (path, array) in enumerate(jax.tree_util.tree_flatten_with_path(arrays)[0]):
            name = jax.tree_util.keystr(path)
            if not keeps(array.dtype):
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
                {
                    "name": x.name,
                    "file": x.file,
                    "dtype": x.dtype.name,
                    "shape": list(x.shape),
                    "ends": self.ends.get(i, ()),
                }
                for i, x in enumerate(self.leaves)
            ],
            "about": self.about,
            "digest": digest.of_all((leaf.kind for leaf in self.leaves), self.digests),
        }
        # The header is written last: a folder without one does not open.
        for name, content in ((COUNTS, counts), (HEADER, json.dumps(header, indent=1).encode())):
            file = self._open(name)
            file.write(content)
            self.files.append(file)
        for file in (*self.files, self.names):
            file.flush()
            os.fsync(file.fileno())
        if not self.named:
            self.names.close()
            (self.folder / NAMES).unlink()
        _require_free(self.path)


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Create a hidden folder next to `path` to write to, and rename it to `path` at the end. After
    an error, nothing is left."""
    hidden = path.with_name(f".{path.name}.writing-{secrets.token_hex(4)}")
    hidden.mkdir(parents=True)
    try:
        yield hidden
        os.rename(hidden, path)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _require_free(path: Path) -> None:
    try:
        free = not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))
    except OSError as error:
        raise _unwritable(path, error) from error
    if not free:
        raise StoreError.here(
            f"{path} exists already. A store is written once: remove it, or choose another path."
        )


def keeps(dtype: np.dtype[Any]) -> bool:
    """Return whether a store supports this dtype."""
    return bool(jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_)


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError.here(f"{path} cannot be written: {error.strerror or error}.")


def _described(tree: Any) -> Any:
    """Return the structure of a pytree as JSON: `{"dict": ...}`, `{"list": ...}`, `{"tuple": ...}`,
    None, and for a leaf its number."""
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


def rebuilt(node: Any) -> Any:
    """Return the structure that JSON describes, with the number of a leaf in each place."""
    if node is None or isinstance(node, int):
        return node
    ((kind, inner),) = node.items()
    if kind == "dict":
        return {key: rebuilt(value) for key, value in inner.items()}
    return {"list": list, "tuple": tuple}[kind](map(rebuilt, inner))
