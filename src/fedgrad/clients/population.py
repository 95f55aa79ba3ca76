"""Populations: whatever clients can be sampled from, in memory, on disk, on a mesh or on nodes."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients import sampling
from fedgrad.clients.cohort import Cohort
from fedgrad.core.arguments import ClientData, Seen
from fedgrad.core.errors import ArgumentError, CohortError
from fedgrad.core.lossless import masked
from fedgrad.core.program import Executor
from fedgrad.core.types import Key


class Population(ClientData):
    """Whatever clients can be sampled from. `fg.population` makes one in memory.

    Another kind of clients is a class with `__len__` and `select`; all kinds draw the same clients
    with the same key.
    """

    counts: np.ndarray | None = None  # how many examples each client has, where that is known
    executor: Executor | None = None  # on which its programs run, if not on any
    sharding: Any = None  # where the data are, if on several devices: the model belongs there too
    here = False  # the data are on this machine, so a round is the same program whenever it runs

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def select(self, clients: Any) -> Any:
        """The cohort of these clients, by their index: what a program takes."""

    @functools.cached_property
    def everyone(self) -> Any:
        """The cohort of all clients."""
        return self.select(np.arange(len(self)))

    def indices(self, key: Key, size: int, round: int = 1, role: str = "cohort") -> Any:
        """Which clients `sample` draws."""
        if not 1 <= size <= len(self):
            raise CohortError.here(
                f"Cannot sample {size} of {len(self)} clients. Ask for 1 to {len(self)}."
            )
        return sampling.chosen(key, len(self), size, round, role)

    def sample(self, key: Key, size: int, round: int = 1, role: str = "cohort") -> Any:
        """A cohort of `size` different clients, drawn uniformly.

        It is the cohort that `fg.fit` with this key and size trains on in this round. `role`: the
        argument of the algorithm's round that it is for, where that takes several cohorts.
        """
        index = self.indices(key, size, round, role)
        cohort = self.select(index)
        # Whoever made the cohort may have numbered its clients anew.
        return replace(cohort, index=index) if isinstance(cohort, Cohort) else cohort

    def draws(self, key: Key, size: int, role: str = "cohort") -> Callable[[int], Any]:
        """`sample` as a function of the round, for many rounds. If it has a method `close`, that is
        called after the last one."""
        return lambda round: self.sample(key, size, round, role)

    def portions(self) -> Generator[Any]:
        """Cohorts that are all clients together: one, or each small enough for a device."""
        yield self.everyone

    @property
    def digest(self) -> str | None:
        """A digest of every example, by which a run that is resumed knows its data; None if they
        cannot be read, as on nodes: then only the number of clients is compared."""
        return None

    def some_data(self) -> list[np.ndarray]:
        """Return the few rows by which checkpoints know their data that have no digest of it."""
        return []

    def begin(self, one: Any) -> Any:
        """The states that all clients keep between rounds: each begins with this one."""
        rows = (len(self),)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, rows + jnp.shape(leaf)), one)

    def gather(self, states: Any, cohort: Any) -> Any:
        """Of the states of all clients, those of a cohort: an argument beside it."""
        return _rows(states, _index(cohort))

    def scatter(self, states: Any, cohort: Any, new: Any) -> Any:
        """The states of all clients, of which those of a cohort are new."""
        require_kept(states, new)
        return _with_rows(states, _index(cohort), new)

    def seen(self, where: str) -> Seen:
        """Refused: a program runs on a cohort."""
        raise CohortError.here(
            f"{where}: got a population. Choose clients: population.sample(key, size), or "
            "population.everyone for all of them."
        )


@dataclass(frozen=True, repr=False)
class Stored(Population):
    """All clients, their examples in one store, wherever that is."""

    everyone: Cohort = field()
    counts: np.ndarray = field()

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"Population({len(self)} clients, {int(self.counts.sum())} examples)"

    def select(self, clients: Any) -> Cohort:
        """The cohort of these clients, by their index in the population."""
        if isinstance(clients, jax.core.Tracer):  # of `sample` within jit
            return self.cohort(clients)
        return self.cohort(require_clients(clients, len(self)))

    @abstractmethod
    def cohort(self, index: Any) -> Cohort:
        """The cohort of these clients, who exist; an index may be traced."""

    @property
    def digest(self) -> str | None:
        """A digest of every example."""
        return self.everyone.digest

    def some_data(self) -> list[np.ndarray]:
        """Return every n/1000th row."""
        stored = jax.tree.leaves(self.everyone.store)
        if not all(leaf.is_fully_addressable for leaf in stored):
            return []
        return [self.counts, *(np.asarray(x)[:: max(1, len(x) // 1000)] for x in stored)]


def require_clients(clients: Any, there: int) -> np.ndarray:
    """Clients by their index, who exist."""
    if why := masked(clients):
        raise CohortError.here(f"Clients by their index{why}")
    clients = np.asarray(clients)
    if clients.ndim != 1 or clients.size == 0 or not np.issubdtype(clients.dtype, np.integer):
        raise CohortError.here(f"Select clients by a non-empty vector of indices, got {clients!r}.")
    if clients.min() < 0 or clients.max() >= there:
        raise CohortError.here(
            f"There are {there} clients, numbered from 0; got {clients.min()} to {clients.max()}."
        )
    return clients.astype(np.int32)


def require_kept(old: Any, new: Any) -> None:
    """Refuse what would not stay what it was: both have an axis over clients."""
    then: Any = jax.tree.structure(old)
    now: Any = jax.tree.structure(new)
    if then != now:
        raise ArgumentError.here(
            f"What clients keep was {then}, and is {now} after a round. Let the round give back "
            "what it was given."
        )
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if (a.shape[1:], a.dtype) != (b.shape[1:], b.dtype):
            raise ArgumentError.here(
                f"What clients keep was {a.dtype}{list(a.shape[1:])} each, and is {b.dtype}"
                f"{list(b.shape[1:])} after a round. Let the round give back what it was given."
            )


def _index(cohort: Any) -> Any:
    if not isinstance(cohort, Cohort):
        raise CohortError.here(
            f"A {type(cohort).__name__} does not say who its clients are, so what they keep is "
            "nobody's. Let select() give an fg.Cohort, or write gather() and scatter()."
        )
    return cohort.index


@jax.jit
def _rows(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


@jax.jit
def _with_rows(tree: Any, index: Any, rows: Any) -> Any:
    return jax.tree.map(lambda leaf, new: leaf.at[index].set(new), tree, rows)
