"""Populations: collections of clients to sample from, in memory, on disk, on a mesh or on nodes."""

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
from fedgrad.core.errors import ArgumentError, CohortError, public
from fedgrad.core.lossless import masked
from fedgrad.core.program import Executor
from fedgrad.core.types import Key


@public
class Population(ClientData):
    """A collection of clients to sample from. `fg.population` makes one in memory.

    Another kind of population is a class with `__len__` and `select`; all kinds sample the same
    clients with the same key.
    """

    counts: np.ndarray | None = None  # the number of examples of each client, if known
    executor: Executor | None = None  # the executor that its programs need, if any
    sharding: Any = None  # where the data are, if on several devices; the model belongs there too
    here = False  # data are on this machine, so every run of a round is the same program

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def select(self, clients: Any) -> Any:
        """Return the cohort of these clients, by index, as an argument for a program."""

    @functools.cached_property
    def everyone(self) -> Any:
        """The cohort of all clients."""
        return self.select(np.arange(len(self)))

    def indices(self, key: Key, size: int, round: int = 1, role: str = "cohort") -> Any:
        """Return the indices of the clients that `sample` draws."""
        if not 1 <= size <= len(self):
            raise CohortError.here(
                f"Cannot sample {size} of {len(self)} clients. Ask for 1 to {len(self)}."
            )
        return sampling.chosen(key, len(self), size, round, role)

    def sample(self, key: Key, size: int, round: int = 1, role: str = "cohort") -> Any:
        """Return a cohort of `size` different clients, drawn uniformly.

        It is the cohort that `fg.fit` with this key and size trains on in this round.

        Args:
            key: A JAX key.
            size: The number of clients.
            round: The number of the round; the first one is 1.
            role: The argument of the algorithm's round that the cohort is for, if it takes several.

        Returns:
            A cohort, an argument for programs.
        """
        index = self.indices(key, size, round, role)
        cohort = self.select(index)
        # `select` may have renumbered the clients.
        return replace(cohort, index=index) if isinstance(cohort, Cohort) else cohort

    def draws(self, key: Key, size: int, role: str = "cohort") -> Callable[[int], Any]:
        """Return `sample` as a function of the round, for many rounds. Its method `close`, if it
        has one, is called after the last round."""
        return lambda round: self.sample(key, size, round, role)

    def portions(self) -> Generator[Any]:
        """Yield cohorts that together are all clients: one, or several that fit on a device."""
        yield self.everyone

    @property
    def digest(self) -> str | None:
        """A digest of every example, which identifies the data of a resumed run. None if the
        examples cannot be read, as on nodes: then only the number of clients is compared."""
        return None

    def some_data(self) -> list[np.ndarray]:
        """Return a few rows that identify the data for checkpoints without a digest."""
        return []

    def begin(self, one: Any) -> Any:
        """Return the initial states of all clients: `one` for each."""
        rows = (len(self),)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, rows + jnp.shape(leaf)), one)

    def gather(self, states: Any, cohort: Any) -> Any:
        """Return the states of a cohort out of those of all clients, as an argument beside it."""
        return _rows(states, _index(cohort))

    def scatter(self, states: Any, cohort: Any, new: Any) -> Any:
        """Return the states of all clients with those of a cohort replaced."""
        require_kept(states, new)
        return _with_rows(states, _index(cohort), new)

    def seen(self, where: str) -> Seen:
        """Refuse a population as an argument: a program runs on a cohort."""
        raise CohortError.here(
            f"{where}: got a population. Choose clients: population.sample(key, size), or "
            "population.everyone for all of them."
        )


@dataclass(frozen=True, repr=False)
class Stored(Population):
    """A population whose examples are in one store, wherever that is."""

    everyone: Cohort = field()
    counts: np.ndarray = field()

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"Population({len(self)} clients, {int(self.counts.sum())} examples)"

    def select(self, clients: Any) -> Cohort:
        """Return the cohort of these clients, by their index in the population."""
        if isinstance(clients, jax.core.Tracer):  # from `sample` under jit
            return self.cohort(clients)
        return self.cohort(require_clients(clients, len(self)))

    @abstractmethod
    def cohort(self, index: Any) -> Cohort:
        """Return the cohort of these existing clients; the index may be traced."""

    @property
    def digest(self) -> str | None:
        """A digest of every example."""
        return self.everyone.digest

    def some_data(self) -> list[np.ndarray]:
        """Return every (n/1000)th row."""
        stored = jax.tree.leaves(self.everyone.store)
        if not all(leaf.is_fully_addressable for leaf in stored):
            return []
        return [self.counts, *(np.asarray(x)[:: max(1, len(x) // 1000)] for x in stored)]


def require_clients(clients: Any, there: int) -> np.ndarray:
    """Return the indices of clients; refuse clients that do not exist."""
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
    """Refuse client states whose structure, shape or dtype has changed; both have a client axis."""
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
