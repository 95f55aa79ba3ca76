"""The interface of all sources of clients: clients with columns, one after another."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedgrad.tasks.task_checks import TaskError

Columns = Mapping[str, Any]  # lists or arrays, with one entry per example
Tick = Callable[[str, int, int | None], None]  # (activity, done, total)
# The parts of a data set, by their names in files; "" is split into training and test examples.
PARTS = {
    "": "",
    "train": "train",
    "test": "test",
    "heldout": "validation",
    "validation": "validation",
    "val": "validation",
}


class DataError(TaskError):
    """Data of a task are missing, broken, or do not fit the task."""


@dataclass(frozen=True)
class RawClient:
    """A client as the source has it."""

    name: str
    part: str  # train, test or validation; "": to be split into train and test
    columns: Columns


class Source:
    """Clients that can be read repeatedly."""

    name: str  # of the file or folder, for messages
    total: int | None = None  # the number of entries of `clients`, if known

    @abstractmethod
    def clients(self) -> Iterator[RawClient]:
        """Yield the clients, in the same order each time; a client may occur once for each part."""


def part_of(name: Any, where: str) -> str:
    """Return train, test or validation for the name of a part in a file."""
    if not isinstance(name, str) or name not in PARTS:
        raise DataError.here(
            f"{where}: there is a part {name!r}. Known: {', '.join(filter(None, PARTS))}."
        )
    return PARTS[name]
