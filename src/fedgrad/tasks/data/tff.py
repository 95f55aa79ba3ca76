"""TFF's data sets: sqlite files, optionally lzma-compressed, of serialized `tf.train.Example`s."""

import contextlib
import itertools
import lzma
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedgrad.tasks.data.source import DataError, RawClient, Source, Tick, part_of

SQLITE = b"SQLite format 3\x00"
MEGABYTE = 1 << 20
LZMA = (b"\xfd7zXZ\x00", b"]\x00\x00")
ORDERED = """
    SELECT split_name, client_id, serialized_example_proto FROM examples
    ORDER BY split_name, client_id, rowid
"""
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5


class Sqlite(Source):
    """A file of TFF: the examples of clients, and the number of examples of each."""

    def __init__(self, path: Path, name: str = "") -> None:
        self.path, self.name = path, name or str(path)
        with self._reading() as database:
            tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
            missing = {"examples", "client_metadata"} - tables
            if missing:
                raise DataError.here(
                    f"{self.name} has no table {' nor '.join(sorted(missing))}: it is another "
                    "database than TFF's."
                )
            counts = database.execute(
                "SELECT split_name, client_id, num_examples FROM client_metadata"
            ).fetchall()
        self.counts = {(split, client): count for split, client, count in counts}
        self.total = len(self.counts)

    def clients(self) -> Iterator[RawClient]:
        """Yield the clients in one pass, and check that all are complete."""
        found = 0
        with self._reading() as database:
            rows = database.execute(ORDERED)
            for (split, client), group in itertools.groupby(rows, lambda row: (row[0], row[1])):
                examples = [self._parsed(row[2], client) for row in group]
                if self.counts.get((split, client)) != len(examples):
                    raise DataError.here(
                        f"{self.name}: client {client!r} has {len(examples)} examples in {split}, "
                        f"and should have {self.counts.get((split, client), 'none')}: the file is "
                        "not whole."
                    )
                found += 1
                yield RawClient(str(client), part_of(split, self.name), _columns(examples))
        if found != sum(count != 0 for count in self.counts.values()):
            raise DataError.here(
                f"{self.name} has examples of {found} clients, and should have those of "
                f"{len(self.counts)}: the file is not whole."
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        database = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            yield database
        except sqlite3.Error as error:
            raise DataError.here(f"{self.name} cannot be read as a database: {error}.") from error
        finally:
            database.close()

    def _parsed(self, serialized: Any, client: str) -> dict[str, Any]:
        try:
            return parse_example(serialized)
        except (LookupError, ValueError, TypeError, OverflowError) as error:
            raise DataError.here(
                f"{self.name}: an example of client {client!r} is no tf.train.Example: {error}."
            ) from error


@contextlib.contextmanager
def decompressed(path: Path, tick: Tick | None = None) -> Iterator[Path]:
    """Decompress an lzma file into a temporary file, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="fedgrad-") as folder:
        out = Path(folder) / path.stem
        total = path.stat().st_size
        try:
            with path.open("rb") as raw, lzma.open(raw) as packed, out.open("wb") as unpacked:
                while block := packed.read(MEGABYTE):
                    unpacked.write(block)
                    if tick:
                        tick("decompressing MB", raw.tell() // MEGABYTE, total // MEGABYTE)
        except (lzma.LZMAError, EOFError, OSError) as error:
            raise DataError.here(
                f"{path} cannot be decompressed into {folder}: {error}."
            ) from error
        yield out


def parse_example(serialized: bytes) -> dict[str, Any]:
    """Return the features of a `tf.train.Example`: each an array of numbers or a list of bytes.

    An example has features (1), which are a map (1) from names (1) to a feature (2), which is a
    list of bytes (1), floats (2) or integers (3), whose values are its field 1.
    """
    found = {}
    for _, features in _fields(memoryview(serialized), 1):
        for _, entry in _fields(features, 1):
            parts = dict(_fields(entry))
            kind, values = next(_fields(parts[2]), (1, memoryview(b"")))
            found[bytes(parts[1]).decode()] = _values(kind, values)
    return found


def _values(kind: int, message: memoryview) -> Any:
    fields = [value for _, value in _fields(message, 1)]
    if kind == 1:
        if not all(isinstance(value, memoryview) for value in fields):
            raise ValueError("a number where bytes should be")
        return [bytes(value) for value in fields]
    if kind == 2:
        parts = [
            np.frombuffer(
                value if isinstance(value, memoryview) else value.to_bytes(4, "little"), "<f4"
            )
            for value in fields
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if kind != 3:
        raise ValueError(f"a feature of kind {kind}")
    numbers = [
        _varints(value) if isinstance(value, memoryview) else np.array([value], np.uint64)
        for value in fields
    ]
    return np.concatenate([np.zeros(0, np.uint64), *numbers]).astype(np.int64)


def _fields(message: memoryview, only: int | None = None) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each field of a message; the value is bytes or an integer."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire = tag >> 3, tag & 7
        value: Any
        if wire == VARINT:
            value, place = _varint(message, place)
        elif wire in (FIXED_32, FIXED_64):
            size = 4 if wire == FIXED_32 else 8
            value = int.from_bytes(_cut(message, place, size), "little")
            place += size
        elif wire == BYTES:
            size, place = _varint(message, place)
            value = _cut(message, place, size)
            place += size
        else:
            raise ValueError(f"wire type {wire}")
        if only is None or number == only:
            yield number, value


def _cut(message: memoryview, place: int, size: int) -> memoryview:
    if place + size > len(message):
        raise ValueError("it ends too early")
    return message[place : place + size]


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _varints(message: memoryview) -> np.ndarray:
    """Decode many consecutive numbers at once, such as an image."""
    raw = np.frombuffer(message, np.uint8)
    last = raw < 0x80  # the last byte of a number
    if len(raw) and not last[-1]:
        raise ValueError("it ends too early")
    first = np.flatnonzero(np.r_[True, last[:-1]])[: len(raw)]
    place = np.arange(len(raw)) - np.repeat(first, np.diff(np.r_[first, len(raw)]))
    if place.max(initial=0) > 9:
        raise ValueError("a number of more than 64 bits")
    parts = (raw & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(parts, first) if len(raw) else parts


def _columns(examples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns, with single values (labels, texts) unpacked. A missing value is None,
    which is refused if it is used."""
    names = set().union(*examples)

    def plain(value: Any) -> Any:
        return value[0] if value is not None and len(value) == 1 else value

    return {name: [plain(example.get(name)) for example in examples] for name in sorted(names)}
