"""Clients of different sizes: a population is stored once, a cohort chooses from it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.examples import Examples, spare_rows
from fedgrad.core.arguments import ClientData, Seen, Shared
from fedgrad.core.errors import CohortError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cohort(ClientData):
    """A choice of clients from a population. A program's client code sees each as `fg.Examples`.

    It holds the population's store (not a copy) and three small vectors, so a new cohort of the
    same size moves no data and compiles nothing.
    """

    store: Any
    offset: Any  # one integer per client, of numpy or JAX
    count: Any
    index: Any
    capacity: int = field(metadata={"static": True})

    def __len__(self) -> int:
        return len(self.count)

    def seen(self, where: str) -> Seen:
        """Each client has a view of the store, which all of them share."""
        store = jax.tree.map(Shared, self.store)
        view = Examples(store, self.offset, self.count, self.capacity)
        return Seen(view, self.index, self.count)

    def __repr__(self) -> str:
        return f"Cohort({len(self)} clients of at most {self.capacity} examples)"


@dataclass(frozen=True, repr=False)
class Population(ClientData):
    """All clients, their examples stored once. Make one with `fg.population`."""

    everyone: Cohort
    offsets: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"Population({len(self)} clients, {int(self.counts.sum())} examples)"

    def seen(self, where: str) -> Seen:
        """Refused: a program runs on a cohort."""
        raise CohortError.here(
            f"{where}: got a population. Choose clients: population.sample(key, size), or "
            "population.everyone for all of them."
        )

    def sample(self, key: jax.Array, size: int) -> Cohort:
        """A cohort of `size` different clients, drawn uniformly."""
        if not 1 <= size <= len(self):
            raise CohortError.here(
                f"Cannot sample {size} of {len(self)} clients. Ask for 1 to {len(self)}."
            )
        return self._chosen(_draw(self._vectors, key, size))

    def select(self, clients: Any) -> Cohort:
        """The cohort of these clients, by their index in the population."""
        clients = np.asarray(clients)
        if clients.ndim != 1 or clients.size == 0 or not np.issubdtype(clients.dtype, np.integer):
            raise CohortError.here(
                f"Select clients by a non-empty vector of indices, got {clients!r}."
            )
        if clients.min() < 0 or clients.max() >= len(self):
            raise CohortError.here(
                f"There are {len(self)} clients, numbered from 0; got {clients.min()} to "
                f"{clients.max()}."
            )
        index = clients.astype(np.int32)
        return self._chosen((self.offsets[index], self.counts[index], index))

    @property
    def _vectors(self) -> tuple[Any, Any, Any]:
        return self.everyone.offset, self.everyone.count, self.everyone.index

    def _chosen(self, vectors: tuple[Any, Any, Any]) -> Cohort:
        return Cohort(self.everyone.store, *vectors, self.everyone.capacity)


def population(clients: Sequence[Any]) -> Population:
    """Store clients, one pytree of examples each (leaves with a leading example axis), once.

    On several local devices the store is put on each of them, so that no round moves data.
    """
    counts = _counts(clients)
    capacity = int(counts.max())
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])

    def stored(*leaves: Any) -> jax.Array:
        rows = [np.asarray(leaf) for leaf in leaves]
        return _everywhere(np.concatenate([*rows, spare_rows(rows[0], capacity)]))

    return Population(
        Cohort(
            store=jax.tree.map(stored, *clients),
            offset=_everywhere(offsets.astype(np.int32)),
            count=_everywhere(counts.astype(np.int32)),
            index=_everywhere(np.arange(len(counts), dtype=np.int32)),
            capacity=capacity,
        ),
        offsets.astype(np.int32),
        counts.astype(np.int32),
    )


def cohort(clients: Sequence[Any]) -> Cohort:
    """Clients of different sizes from a list, one entry per client, for one call of a program."""
    return population(clients).everyone


@functools.partial(jax.jit, static_argnums=2)
def _draw(vectors: Any, key: jax.Array, size: int) -> Any:
    clients = jax.random.permutation(key, len(vectors[0]))[:size]
    return jax.tree.map(lambda leaf: leaf[clients], vectors)


def _everywhere(x: np.ndarray) -> jax.Array:
    devices = jax.local_devices()
    if len(devices) == 1:
        return jnp.asarray(x)
    mesh = jax.sharding.Mesh(devices, ("devices",))
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))


def _counts(clients: Sequence[Any]) -> np.ndarray:
    if isinstance(clients, dict) or not hasattr(clients, "__len__"):
        raise CohortError.here(
            f"Clients are a list with one pytree for each, got {type(clients).__name__}. "
            "Write fg.population([client_0, client_1, ...])."
        )
    if not len(clients):
        raise CohortError.here("There are no clients: the list is empty.")
    tree = jax.tree.structure(clients[0])
    counts = []
    for i, client in enumerate(clients):
        if not _same_tree(client, clients[0]):
            raise CohortError.here(
                f"Client {i} has another structure than client 0: {jax.tree.structure(client)} "
                f"and {tree}. Give every client the same pytree."
            )
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(client)]
        sizes = {shape[0] if shape else None for shape in shapes}
        if len(sizes) != 1 or None in sizes:
            raise CohortError.here(
                f"Every leaf of a client has one row per example; client {i} has leaves of shapes "
                f"{shapes}."
            )
        if sizes == {0}:
            raise CohortError.here(f"Client {i} has no examples. Leave it out.")
        for here, first in zip(shapes, jax.tree.leaves(clients[0]), strict=True):
            if here[1:] != np.shape(first)[1:]:
                raise CohortError.here(
                    f"Examples of client {i} have shape {here[1:]}, those of client 0 "
                    f"{np.shape(first)[1:]}. Only the number of examples may differ."
                )
        counts.append(sizes.pop())
    return np.asarray(counts)


def _same_tree(a: Any, b: Any) -> bool:
    trees: list[Any] = [jax.tree.structure(a), jax.tree.structure(b)]
    return bool(trees[0] == trees[1])
