"""Values that a node keeps from one message to the next."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PROGRAM, CONSTANT, KEPT = "program/", "constant/", "kept/"
MOST_PROGRAMS = 256


class Entry(NamedTuple):
    """An array, the time of its last use and, for a kept value, the stage that produced it."""

    array: Any
    used: float
    origin: str = ""


@dataclass
class Memory:
    """Arrays by name: programs and constants by digest, kept values by the name they were given.

    Entries that have not been used for `seconds` expire. Programs do not expire, but their number
    is limited. All state is in `entries`, for callers that store it elsewhere.
    """

    seconds: float
    clock: Callable[[], float] = time.time
    entries: dict[str, Entry] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock, repr=False)

    def get(self, name: str) -> Any:
        """Return the array or None, and mark it as just used."""
        with self.lock:
            found = self.entries.pop(name, None)
            if found is None:
                return None
            self.entries[name] = found._replace(used=self.clock())  # at the end: in order of use
            return found.array

    def origin(self, name: str) -> str | None:
        """Return the origin of a value, or None if it is not here."""
        with self.lock:
            found = self.entries.get(name)
            return None if found is None else found.origin

    def put(self, name: str, array: Any, origin: str = "") -> None:
        """Store an array."""
        with self.lock:
            self.entries.pop(name, None)
            self.entries[name] = Entry(array, self.clock(), origin)
            programs = [known for known in self.entries if known.startswith(PROGRAM)]
            for old in programs[:-MOST_PROGRAMS]:
                del self.entries[old]

    def forget(self, names: Iterable[str]) -> None:
        """Remove these entries, if present."""
        with self.lock:
            for name in names:
                self.entries.pop(name, None)

    def expire(self) -> None:
        """Remove expired entries. Each message does this; call it if none arrives for long."""
        with self.lock:
            oldest = self.clock() - self.seconds
            for name, entry in list(self.entries.items()):
                if entry.used < oldest and not name.startswith(PROGRAM):
                    del self.entries[name]

    @property
    def bytes(self) -> int:
        """The total size of constants and kept values in bytes."""
        with self.lock:
            return sum(e.array.nbytes for n, e in self.entries.items() if not n.startswith(PROGRAM))
