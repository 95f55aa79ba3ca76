"""Conversion of the clients of a source to the populations of a task."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedgrad.clients.in_memory import population
from fedgrad.clients.population import Population
from fedgrad.tasks import split
from fedgrad.tasks.data import prepared_folder
from fedgrad.tasks.data.dataset import Asked, DataSet
from fedgrad.tasks.data.opening import opened
from fedgrad.tasks.data.source import Columns, DataError, Source, Tick
from fedgrad.tasks.task_checks import TaskError

HELD_OUT = 0.2  # the test fraction of a client's examples, if a source has no split


@dataclass(frozen=True)
class Populations:
    """The clients of a task, and a description of them."""

    train: Population
    test: Population | None
    validation: Population | None
    about: str


def populations(
    dataset: DataSet, data: Any, clients: int | None, validation: float, seed: int
) -> Populations:
    """Return the clients of `data`: a file, a folder, "huggingface", or None for generated data."""
    asked = Asked(clients, validation, seed)
    if isinstance(data, str | os.PathLike) and prepared_folder.is_prepared(Path(data)):
        if clients is not None or validation or seed:
            raise TaskError.here(
                f"{data} was prepared, so clients= and validation= have no effect, nor has seed=. "
                "Give them to `fedgrad data prepare`."
            )
        return Populations(*prepared_folder.opened(Path(data), dataset.name), about=f"From {data}")
    parts: dict[str, list[Any]] = {"train": [], "test": [], "validation": []}
    with opened(dataset, data, asked) as source:
        for part, _, examples in converted(dataset, source, asked, learned(dataset, source)):
            parts[part].append(examples)
        about = dataset.about if data is None else f"From {source.name}"
    made = [population(found) if found else None for found in parts.values()]
    assert made[0] is not None
    return Populations(made[0], made[1], made[2], about)


def learned(dataset: DataSet, source: Source, tick: Tick | None = None) -> Any:
    """Compute what the conversion needs from all training clients, such as a vocabulary."""
    if dataset.learn is None:
        return None

    reading = "nobody"

    def training() -> Iterator[Columns]:
        nonlocal reading
        for i, client in enumerate(source.clients()):
            if tick:
                tick("reading clients", i + 1, source.total)
            if client.part in ("", "train"):
                reading = client.name
                yield dataset.picked(client.columns)

    with _about(source, lambda: reading):
        return dataset.learn(training())


def converted(
    dataset: DataSet, source: Source, asked: Asked, known: Any, tick: Tick | None = None
) -> Iterator[tuple[str, str, dict[str, np.ndarray]]]:
    """Yield (part, client, examples) of every client that has any."""
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
        with _about(source, lambda: client.name):  # noqa: B023
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


@contextlib.contextmanager
def _about(source: Source, client: Callable[[], str]) -> Iterator[None]:
    """Raise errors in the data of a client with its name."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise DataError.here(f"{source.name}: client {client()!r}: {error}.") from error
