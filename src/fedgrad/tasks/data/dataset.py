"""The data of a task: the required columns, their origin, and the user's options."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgrad.core.lossless import masked
from fedgrad.tasks.data.source import Columns, RawClient
from fedgrad.tasks.task_checks import TaskError

HUGGING_FACE = "huggingface"
Divide = Callable[[Columns, str, int | None, np.random.Generator], list[np.ndarray]]


@dataclass(frozen=True)
class Origin:
    """The places to get the data from."""

    tff: str  # a file of TFF
    leaf: str = ""  # a data set of LEAF
    hugging_face: str = ""  # a data set of Hugging Face
    partition_by: str = ""  # its column that names the client of an example

    def __str__(self) -> str:
        ways = [f"{self.tff} from https://storage.googleapis.com/tff-datasets-public/{self.tff}"]
        if self.leaf:
            ways.append(f"{self.leaf} as JSON (https://leaf.cmu.edu)")
        if self.hugging_face:
            ways.append(f"data={HUGGING_FACE!r} for {self.hugging_face}")
        return f"Get {', or '.join(ways)}; without data=, it is generated."


@dataclass(frozen=True)
class DataSet:
    """The description of the data that a task reads.

    `columns` maps the task's names to those in files. `convert` makes a client's examples from its
    columns, with the result of `learn` on all training clients. `divide` assigns examples to
    clients, if a source has none.
    """

    name: str
    columns: Mapping[str, tuple[str, ...]]
    convert: Callable[[Columns, Any], dict[str, np.ndarray]]
    generate: Callable[[int | None, np.random.Generator], list[RawClient]]
    about: str  # a description of the generated data
    origin: Origin
    optional: tuple[str, ...] = ()
    learn: Callable[[Iterable[Columns]], Any] | None = None
    divide: Divide | None = None

    def picked(self, columns: Columns) -> Columns:
        """Return a client's columns by the task's names, with one entry per example."""
        found = {}
        sizes = {}
        for name, known in self.columns.items():
            there = next((k for k in known if k in columns), None)
            if there is not None:
                found[name] = columns[there]
                if not isinstance(found[name], list | np.ndarray):
                    raise ValueError(f"{there} is no list of examples, but {found[name]!r:.40}")
                if why := masked(found[name]):
                    raise ValueError(f"{there}{why}")
                sizes[there] = len(found[name])
            elif name not in self.optional:
                raise ValueError(f"has no {' nor '.join(known)}, but {', '.join(columns)}")
        if len(set(sizes.values())) > 1:
            each = ", ".join(f"{size} of {name}" for name, size in sizes.items())
            raise ValueError(f"has not one of each for every example: {each}")
        return found


@dataclass(frozen=True)
class Asked:
    """The user's options for a source."""

    clients: int | None = None  # the most clients of each part
    validation: float = 0.0  # the fraction of training clients to set aside
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clients is not None and not _is_whole(self.clients, least=1):
            raise TaskError.here(f"A task needs at least 1 client, got {self.clients!r}.")
        if not _is_whole(self.seed, least=0):
            raise TaskError.here(f"seed={self.seed!r}: give a whole number of at least 0.")
        if not isinstance(self.validation, int | float) or not 0 <= self.validation < 1:
            raise TaskError.here(
                f"validation={self.validation!r}: give the share of the training clients to set "
                "aside, between 0 and 1."
            )


def _is_whole(value: Any, least: int) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return bool(whole and value >= least)
