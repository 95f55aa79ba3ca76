"""The data of a task: what a source must have, and how its clients become populations."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedgrad.clients.in_memory import population
from fedgrad.clients.population import Population
from fedgrad.tasks import split
from fedgrad.tasks.contract import TaskError
from fedgrad.tasks.data import hugging_face, prepared, tff
from fedgrad.tasks.data.arrays import ZIP, Arrays
from fedgrad.tasks.data.json_files import GZIP, Json
from fedgrad.tasks.data.source import Columns, DataError, RawClient, Source, Tick

HUGGING_FACE = "huggingface"
HELD_OUT = 0.2  # of a client's examples, where a source does not say which are to test
Divide = Callable[[Columns, str, int | None, np.random.Generator], list[np.ndarray]]


@dataclass(frozen=True)
class Origin:
    """Where to get the data."""

    tff: str
    leaf: str
    hugging_face: str
    partition_by: str

    def __str__(self) -> str:
        ways = [f"{self.tff} from https://storage.googleapis.com/tff-datasets-public/{self.tff}"]
        if self.leaf:
            ways.append(f"{self.leaf} as JSON (https://leaf.cmu.edu)")
        if self.hugging_face:
            ways.append(f"data={HUGGING_FACE!r} for {self.hugging_face}")
        return f"Get {', or '.join(ways)}; without data=, it is generated."


@dataclass(frozen=True)
class DataSet:
    """What a task reads. `columns`: its own names and those that they have in files. `convert`
    makes a client's examples of them, with what `learn` found in those of all training clients.
    `divide` gives examples to clients, where a source has none."""

    name: str
    columns: MappingABC[str, tuple[str, ...]]
    convert: Callable[[Columns, Any], dict[str, np.ndarray]]
    generate: Callable[[int | None, np.random.Generator], list[RawClient]]
    about: str  # what is generated
    origin: Origin
    optional: tuple[str, ...] = ()
    learn: Callable[[Iterable[Columns]], Any] | None = None
    divide: Divide | None = None

    def picked(self, columns: Columns) -> Columns:
        """A client's columns by our names."""
        found = {}
        for name, known in self.columns.items():
            there = next((k for k in known if k in columns), None)
            if there is not None:
                found[name] = columns[there]
            elif name not in self.optional:
                raise ValueError(f"has no {' nor '.join(known)}, but {', '.join(columns)}")
        return found


@dataclass(frozen=True)
class Populations:
    """The clients of a task, and what they are."""

    train: Population
    test: Population | None
    validation: Population | None
    about: str


@dataclass(frozen=True)
class Asked:
    """What a user wants of a source."""

    clients: int | None = None  # at most so many of each part
    validation: float = 0.0  # of the training clients, set aside
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clients is not None and self.clients < 1:
            raise TaskError.here(f"A task needs at least 1 client, got {self.clients}.")
        if not 0 <= self.validation < 1:
            raise TaskError.here(
                f"validation={self.validation}: give the share of the training clients to set "
                "aside, between 0 and 1."
            )


class Generated(Source):
    """What is made here."""

    name = "generated"

    def __init__(self, clients: list[RawClient]) -> None:
        self.found, self.total = clients, len(clients)

    def clients(self) -> Iterator[RawClient]:
        """In order."""
        return iter(self.found)


def populations(
    dataset: DataSet, data: Any, clients: int | None, validation: float, seed: int
) -> Populations:
    """The clients of `data`: a file, a folder, "huggingface", or None for what is made here."""
    asked = Asked(clients, validation, seed)
    if isinstance(data, str | os.PathLike) and prepared.is_prepared(Path(data)):
        if clients is not None or validation:
            raise TaskError.here(
                f"{data} was prepared, so clients= and validation= have no effect. Give them to "
                "`fedgrad data prepare`."
            )
        return Populations(*prepared.opened(Path(data), dataset.name), about=f"From {data}")
    parts: dict[str, list[Any]] = {"train": [], "test": [], "validation": []}
    with opened(dataset, data, asked) as source:
        for part, _, examples in converted(dataset, source, asked, learned(dataset, source)):
            parts[part].append(examples)
        about = dataset.about if data is None else f"From {source.name}"
    made = [population(found) if found else None for found in parts.values()]
    assert made[0] is not None
    return Populations(made[0], made[1], made[2], about)


@contextlib.contextmanager
def opened(dataset: DataSet, data: Any, asked: Asked, tick: Tick | None = None) -> Iterator[Source]:
    """The source that `data` names. What is wrong with it is said with where to get it."""
    try:
        with contextlib.ExitStack() as stack:
            yield _source(dataset, data, asked, functools.partial(_unpacked, stack, tick))
    except DataError as error:
        if str(dataset.origin) in str(error):
            raise
        raise DataError(f"{error} {dataset.origin}") from error


def learned(dataset: DataSet, source: Source, tick: Tick | None = None) -> Any:
    """What must be known of all training clients before one of them can be converted."""
    if dataset.learn is None:
        return None

    def training() -> Iterator[Columns]:
        for i, client in enumerate(source.clients()):
            if tick:
                tick("reading clients", i + 1, source.total)
            if client.part in ("", "train"):
                with _about(source, client):
                    yield dataset.picked(client.columns)

    return dataset.learn(training())


def converted(
    dataset: DataSet, source: Source, asked: Asked, known: Any, tick: Tick | None = None
) -> Iterator[tuple[str, str, dict[str, np.ndarray]]]:
    """(part, client, examples) of every client that has any."""
    rng = np.random.default_rng([asked.seed, 1])
    seen: dict[str, int] = {}
    given: dict[str, int] = {"train": 0}
    for i, client in enumerate(source.clients()):
        if tick:
            tick("converting clients", i + 1, source.total)
        seen[client.part] = seen.get(client.part, 0) + 1
        if asked.clients is not None and seen[client.part] > asked.clients:
            continue
        if asked.validation and client.part == "validation":
            raise DataError.here(
                f"{source.name} has validation clients of its own: validation= has no effect."
            )
        with _about(source, client):
            examples = dataset.convert(dataset.picked(client.columns), known)
        size = len(next(iter(examples.values())))
        if not size:
            continue
        part = client.part
        if part != "test" and asked.validation and rng.random() < asked.validation:
            part = "validation"
        cut = {part: examples}
        if part == "":
            cut = {"train": examples}
            if size > 1:
                (rest,), (held_out,) = split.hold_out([examples], HELD_OUT, rng)
                cut = {"train": rest, "test": held_out}
        for name, its in cut.items():
            given[name] = given.get(name, 0) + 1
            yield name, client.name, its
    if not given["train"]:
        raise DataError.here(f"{source.name} has no examples to train on.")
    if asked.validation and "validation" not in given:
        raise DataError.here(
            f"validation={asked.validation} of {given['train']} clients is none. Ask for more."
        )


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
    if path.is_dir():
        found = Json.folder(path)
        if found is None:
            raise DataError.here(f"{path} is neither a prepared folder nor one of LEAF's.")
        return found
    return _of_file(path, its, unpacked)


def _unpacked(stack: contextlib.ExitStack, tick: Tick | None, path: Path) -> Path:
    return stack.enter_context(tff.decompressed(path, tick))


def _of_file(path: Path, divide: Any, unpacked: Callable[[Path], Path]) -> Source:
    """By what a file begins with, whatever it is called."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise DataError.here(f"{path} cannot be opened: {error.strerror}.") from None
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


@contextlib.contextmanager
def _about(source: Source, client: RawClient) -> Iterator[None]:
    """What is wrong with a client is said with its name."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise DataError.here(f"{source.name}: client {client.name!r}: {error}.") from error


def images(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Images of this shape in bytes; floating-point numbers are from 0 to 1."""
    found = np.asarray([np.asarray(value) for value in values])
    if found.size != len(values) * np.prod(shape):
        raise ValueError(f"images of shape {found.shape[1:]}, not {shape}")
    if np.issubdtype(found.dtype, np.floating):
        found = np.round(255 * found)
    elif not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"images are numbers, got {found.dtype}")
    if found.size and not (found.min() >= 0 and found.max() <= 255):
        raise ValueError("images with values out of range")
    return found.reshape(len(values), *shape).astype(np.uint8)


def whole(values: Any, below: int, dtype: Any) -> np.ndarray:
    """Labels: whole numbers from 0 on."""
    found = np.asarray(values)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"labels are whole numbers, got {found.dtype} of shape {found.shape}")
    if found.size and not (found.min() >= 0 and found.max() < below):
        raise ValueError(f"labels from {found.min()} to {found.max()}, not from 0 to {below - 1}")
    return found.astype(dtype)


def text(value: Any) -> str:
    """Text, which TFF has as bytes."""
    if isinstance(value, list | np.ndarray) and not len(value):
        return ""
    if not isinstance(value, str | bytes):
        raise ValueError(f"texts are expected, got {type(value).__name__}")
    return value.decode(errors="replace") if isinstance(value, bytes) else value
