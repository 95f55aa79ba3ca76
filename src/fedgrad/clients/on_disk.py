"""A population on disk: only the cohort of a round is in memory."""

import functools
import os
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedgrad.clients import digest as hashing
from fedgrad.clients import sampling
from fedgrad.clients.cohort import Cohort
from fedgrad.clients.folder import Folder, Unreadable
from fedgrad.clients.in_memory import everywhere
from fedgrad.clients.population import Population, require_clients
from fedgrad.clients.prefetch import Prefetch
from fedgrad.clients.stored import Writer
from fedgrad.core.errors import CohortError, StoreError, known_arguments, warn
from fedgrad.core.types import Key

PORTION = 64 * 2**20  # bytes of examples per portion, for work on all clients
EVERYONE = 2**30  # the most bytes of examples to load at once
LOOKED_AT = 64  # the number of clients in some_data
DEVIATIONS = 6  # standard deviations above a cohort's mean number of examples: nearly all


@dataclass(frozen=True)
class Loaded:
    """The examples of some clients, in memory."""

    store: Any
    offset: np.ndarray
    count: np.ndarray
    index: np.ndarray


@dataclass(frozen=True, repr=False, eq=False)
class OnDisk(Population):
    """A population whose examples are in a folder. Make one with `fg.stored`."""

    folder: Folder
    counts: np.ndarray = field()
    here = True

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return (
            f"Population({len(self)} clients, {int(self.counts.sum())} examples in "
            f"{str(self.folder.path)!r})"
        )

    @property
    def sharding(self) -> Any:
        """Replication over the local devices, if there are several."""
        return everywhere()

    @functools.cached_property
    def names(self) -> list[str] | None:
        """The names that clients were stored with, if any."""
        return self.folder.names()

    @property
    def about(self) -> dict[str, Any]:
        """The description that was stored with the data."""
        return self.folder.about

    @property
    def bytes(self) -> int:
        """The size of all examples."""
        return self.folder.row_bytes * int(self.counts.sum(dtype=np.int64))

    @functools.cached_property
    def capacity(self) -> int:
        """The most examples that a client has."""
        return int(self.counts.max())

    @functools.cached_property
    def everyone(self) -> Cohort:
        """The cohort of all clients, if they are few enough to be loaded at once."""
        if self.bytes > EVERYONE:
            raise CohortError.here(
                f"All {len(self):,} clients of {self.folder.path} have {self.bytes / 2**30:.1f} "
                "GiB of examples, too much to be loaded at once. Take some: population.sample(key, "
                "1000). fg.Evaluation goes over all of them, portion by portion."
            )
        return self.select(np.arange(len(self)))

    def select(self, clients: Any) -> Cohort:
        """Return the cohort of these clients, whose examples are loaded now."""
        if isinstance(clients, jax.core.Tracer):
            raise CohortError.here(
                "A population on disk is sampled outside of jit, because its files are read there. "
                "Pass the cohort as an argument."
            )
        with _told():
            return self._cohort(self._load(require_clients(clients, len(self))))

    def draws(self, key: Key, size: int, role: str = "cohort") -> "Cohorts":
        """Return a function from rounds to cohorts, which prefetches those of the next rounds."""
        words, _ = sampling.read_key(key)

        def load(round: int) -> Loaded:
            return self._load(sampling.positions(words, round, role, len(self), size))

        return Cohorts(self, Prefetch(load))

    def portions(self) -> Generator[Cohort]:
        """Yield all clients, as many at a time as fit; the next ones are prefetched."""
        if self.bytes <= PORTION:
            yield self.everyone
            return
        size = self._together()
        starts = range(0, len(self), size)

        def load(number: int) -> Loaded:
            last = min(starts[number] + size, len(self))
            return self._load(np.arange(starts[number], last, dtype=np.int32))

        with closing(Cohorts(self, Prefetch(load, last=len(starts) - 1))) as portions:
            yield from map(portions, range(len(starts)))

    @functools.cached_property
    def digest(self) -> str:
        """A digest of every example, from the header; without one, all files are read."""
        if self.folder.digest is not None:
            return self.folder.digest
        if self.bytes > EVERYONE:
            warn(
                f"All {self.bytes / 2**30:.1f} GiB of {self.folder.path} are read, to tell its "
                "examples from others: its store.json has no digest of them, or is older than they "
                "are. fg.store writes one, and `cp -p` and `rsync -a` keep it."
            )
        found, size = bytearray(), self._together()
        for start in range(0, len(self), size):
            with _told():
                part = self._load(np.arange(start, min(start + size, len(self)), dtype=np.int32))
            found += hashing.of_each(jax.tree.leaves(part.store), part.offset, part.count)
        return hashing.of_all((leaf.kind for leaf in self.folder.leaves), found)

    def some_data(self) -> list[np.ndarray]:
        """Return the first example of a few clients, and all numbers of examples."""
        few = np.unique(np.linspace(0, len(self) - 1, LOOKED_AT).astype(np.int32))
        with _told():
            found = self.folder.read(few, int(self.counts[few].sum()))
        counts = self.counts[few]
        first = np.cumsum(counts) - counts
        return [self.counts, *(leaf[first] for leaf in jax.tree.leaves(found))]

    def _load(self, index: np.ndarray) -> Loaded:
        count = self.counts[index]
        rows = self._rows(len(index), int(count.sum(dtype=np.int64)))
        if rows >= 2**31:
            raise Unreadable(
                f"{len(index)} clients of {self.folder.path} have more examples than 32 bits can "
                "count. Take fewer."
            )
        offset = (np.cumsum(count, dtype=np.int64) - count).astype(np.int32)
        return Loaded(self.folder.read(index, rows), offset, count, index)

    def _cohort(self, loaded: Loaded) -> Cohort:
        self.folder.require_lossless(loaded.store)
        arrays = (loaded.store, loaded.offset, loaded.count, loaded.index)
        # XLA on a CPU uses these buffers without a copy.
        store, offset, count, index = jax.device_put(arrays, self.sharding)
        return Cohort(store, offset, count, index, self.capacity)

    def _rows(self, size: int, examples: int) -> int:
        """Return the number of rows of the arrays for a cohort of so many clients and examples.

        Nearly all cohorts of a size get the same number, so that a program is compiled for them
        once; each rare larger one at least doubles it. The number includes the spare rows that a
        last batch may read.
        """
        mean, deviation = self._spread
        usual = int(size * mean + DEVIATIONS * size**0.5 * deviation) + 1
        most = int(self._largest[min(size, len(self)) - 1])  # if no client is in it twice
        rows = min(usual, most)
        while rows < examples:
            rows *= 2
        return (min(rows, most) if examples <= most else rows) + self.capacity

    @functools.cached_property
    def _spread(self) -> tuple[float, float]:
        return float(self.counts.mean()), float(self.counts.std())

    @functools.cached_property
    def _largest(self) -> np.ndarray:
        """The number of examples of the largest client, of the two largest, ..."""
        return np.cumsum(-np.sort(-self.counts.astype(np.int64)))

    def _together(self) -> int:
        """Return how many consecutive clients form a portion, so that none is too large."""
        size = max(1, int(len(self) * PORTION / self.bytes))
        starts = np.arange(0, len(self), size)
        while size > 1:
            examples = np.add.reduceat(self.counts, starts, dtype=np.int64)
            if int(examples.max()) * self.folder.row_bytes <= 2 * PORTION:
                break
            size = max(1, size // 2)
            starts = np.arange(0, len(self), size)
        return size


class Cohorts:
    """Cohorts by number, of rounds or of portions, with prefetch."""

    def __init__(self, population: OnDisk, prefetch: Prefetch[Loaded]) -> None:
        self.population, self.prefetch = population, prefetch

    def __call__(self, number: int) -> Cohort:
        """Return the cohort with this number."""
        with _told():
            return self.population._cohort(self.prefetch(number))

    def close(self) -> None:
        """Stop loading."""
        self.prefetch.close()


@contextmanager
def _told() -> Generator[None]:
    """Raise errors of files with the line of the user's code."""
    try:
        yield
    except Unreadable as error:
        raise StoreError.here(str(error)) from error


@known_arguments()
def stored(path: str | os.PathLike[str]) -> Population:
    """Open the clients that `fg.store` or `fedgrad data prepare` wrote into a folder.

    Opening is immediate, however large the folder is: only the examples of a round's cohort are
    read, in the background while the devices work. Cohorts and numbers are those of
    `fg.population`.

    Args:
        path: The folder.

    Returns:
        A population.

    Raises:
        StoreError: If the folder is not a store, or is damaged.
    """
    folder = Folder.of(path)
    return OnDisk(folder, folder.counts)


@known_arguments()
def store(path: str | os.PathLike[str], clients: Iterable[Any]) -> Population:
    """Write clients into a new folder, and open it.

    Args:
        path: The folder, which must not exist or be empty.
        clients: One pytree of examples per client. With a generator, one client at a time is in
            memory. Examples keep their dtypes.

    Returns:
        A population on disk. If `clients` raises before its end, nothing is written.

    Raises:
        StoreError: If the folder exists or cannot be written.

    Example:

        clients = fg.store("clients", ({"x": read(name)} for name in names))
    """
    if isinstance(clients, dict) or not isinstance(clients, Iterable):
        raise CohortError.here(
            f"Clients are a list or a generator with one pytree for each, got "
            f"{type(clients).__name__}."
        )
    with Writer(path) as writer:
        for client in clients:
            writer.add(client)
    return stored(path)
