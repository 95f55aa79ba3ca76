"""What every source of clients gives, whatever it is: clients with columns, one after another."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedgrad.tasks.task_checks import TaskError

Columns = Mapping[str, Any]  # lists or arrays, with one entry per example
Tick = Callable[[str, int, int | None], None]  # what is done, how much of it, of how much
# The parts of a data set, by the names that they have in files; "" is to be cut in two.
PARTS = {
    "": "",
    "train": "train",
    "test": "test",
    "heldout": "validation",
    "validation": "validation",
    "val": "validation",
}


class DataError(TaskError):
    """Data of a task are missing, broken, or not what the task is about."""


@dataclass(frozen=True)
class RawClient:
    """A client as the source has it."""

    name: str
    part: str  # train, test or validation; "": some of it to train and some to test
    columns: Columns


class Source:
    """Clients that can be read again and again."""

    name: str  # of the file or folder, for messages
    total: int | None = None  # how many entries `clients` gives, if that is known

    @abstractmethod
    def clients(self) -> Iterator[RawClient]:
        """One after another, in the same order each time; a client may come once for each part."""


def part_of(name: Any, where: str) -> str:
    """train, test or validation, by its name in a file."""
    if not isinstance(name, str) or name not in PARTS:
        raise DataError.here(
            f"{where}: there is a part {name!r}. Known: {', '.join(filter(None, PARTS))}."
        )
    return PARTS[name]
