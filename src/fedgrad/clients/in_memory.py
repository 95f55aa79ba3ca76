"""A population in memory: the examples of all clients in one store, with a view for each client."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients import sampling
from fedgrad.clients.cohort import Cohort
from fedgrad.clients.padding import MOST, padded
from fedgrad.clients.population import Population, Stored
from fedgrad.core.errors import CohortError, known_arguments
from fedgrad.core.lossless import changed, masked, place
from fedgrad.core.types import Key

WORDS = "OSUmM"  # the kinds of NumPy arrays that are not numeric


@dataclass(frozen=True, repr=False)
class InMemory(Stored):
    """A population whose examples are stored once. Make one with `fg.population`."""

    offsets: np.ndarray
    here = True

    @property
    def sharding(self) -> Any:
        """Replication over the local devices, if there are several."""
        sharding = self.everyone.count.sharding
        return sharding if len(sharding.device_set) > 1 else None

    def cohort(self, index: Any) -> Cohort:
        """Return a cohort: two numbers per client, which the host also knows."""
        if isinstance(index, jax.core.Tracer):
            offsets, counts = self.everyone.offset, self.everyone.count
        else:
            offsets, counts = self.offsets, self.counts
        return replace(self.everyone, offset=offsets[index], count=counts[index], index=index)

    def draws(self, key: Key, size: int, role: str = "cohort") -> Callable[[int], Any]:
        """Return a function from rounds to cohorts; those of several rounds are placed together."""
        words, _ = sampling.read_key(key)
        put = sampling.placing(self.sharding)

        def block(rounds: range) -> list[Cohort]:
            chosen = [sampling.positions(words, r, role, len(self), size) for r in rounds]
            placed = put([(self.offsets[i], self.counts[i], i) for i in chosen])
            return [replace(self.everyone, offset=o, count=c, index=i) for o, c, i in placed]

        return sampling.ahead(block)


@known_arguments()
def population(clients: Sequence[Any]) -> Population:
    """Store clients in memory, once.

    On several local devices the store is replicated, so that no round moves data.

    Args:
        clients: A list with one pytree of examples per client, whose leaves have a leading example
            axis.

    Returns:
        A population.

    Raises:
        CohortError: If the clients differ in structure, shapes or dtypes, or one has no examples.

    Example:

        clients = fg.population([{"x": np.ones((5, 3))}, {"x": np.ones((8, 3))}])
    """
    arrays, sizes = read_clients(clients)
    total, capacity = int(sizes.sum()), int(sizes.max())

    def stored(path: Any, *leaves: Any) -> jax.Array:
        return _everywhere(joined(path, dict(enumerate(leaves)), total + capacity))

    store = jax.tree_util.tree_map_with_path(stored, *arrays)
    counts, offsets = sizes.astype(np.int32), (np.cumsum(sizes) - sizes).astype(np.int32)
    everyone = Cohort(
        store=store,
        offset=_everywhere(offsets),
        count=_everywhere(counts),
        index=_everywhere(np.arange(len(counts), dtype=np.int32)),
        capacity=capacity,
    )
    return InMemory(everyone, counts, offsets)


@known_arguments()
def cohort(clients: Sequence[Any]) -> Cohort:
    """Return a cohort from a list of clients of any sizes, for one call of a program."""
    return population(clients).everyone


def everywhere() -> Any:
    """Return the replication over all local devices; None if there is one."""
    devices = jax.local_devices()
    if len(devices) == 1:
        return None
    mesh = jax.sharding.Mesh(devices, ("devices",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _everywhere(x: np.ndarray) -> jax.Array:
    sharding = everywhere()
    return jnp.asarray(x) if sharding is None else jax.device_put(x, sharding)


def joined(path: Any, clients: Mapping[int, Any], rows: int) -> np.ndarray:
    """Concatenate a leaf of these clients for a store; refuse numbers that JAX would change."""
    whole: np.ndarray = padded([np.asarray(leaf) for leaf in clients.values()], rows)
    if changed(whole):
        for number, leaf in clients.items():
            if why := changed(np.asarray(leaf)):
                raise CohortError.here(f"Client {number}{place(path)}{why}")
    return whole


def read_clients(clients: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """Return the clients as arrays, and their numbers of examples; refuse unlike clients."""
    if isinstance(clients, str | os.PathLike):
        raise CohortError.here(
            f"fg.population takes the clients themselves; fg.stored({str(clients)!r}) opens a "
            "folder of them."
        )
    if isinstance(clients, dict) or not hasattr(clients, "__len__"):
        raise CohortError.here(
            f"Clients are a list with one pytree for each, got {type(clients).__name__}. "
            "Write fg.population([client_0, client_1, ...])."
        )
    if not len(clients):
        raise CohortError.here("There are no clients: the list is empty.")
    arrays = [read_client(i, client) for i, client in enumerate(clients)]
    counts = [count_of(i, client, arrays[0]) for i, client in enumerate(arrays)]
    _require_dtypes(arrays)
    return arrays, np.asarray(counts)


def read_client(number: int, client: Any) -> Any:
    """Convert a client's examples to arrays, from tensors or columns of tables."""
    if why := masked(client):
        raise CohortError.here(f"Client {number}{why}")
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), client)


def count_of(number: int, client: Any, first: Any) -> int:
    """Return a client's number of examples; refuse examples unlike those of the first client."""
    if not _same_tree(client, first):
        raise CohortError.here(
            f"Client {number} has another structure than client 0: {jax.tree.structure(client)} "
            f"and {jax.tree.structure(first)}. Give every client the same pytree."
        )
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(client)]
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) != 1 or None in sizes:
        raise CohortError.here(
            f"Every leaf of a client has one row per example; client {number} has leaves of shapes "
            f"{shapes}."
        )
    if sizes == {0}:
        raise CohortError.here(f"Client {number} has no examples. Leave it out.")
    if (count := int(shapes[0][0])) > MOST:
        raise CohortError.here(
            f"Client {number} has {count:,} examples, more than 32 bits can count. Make several "
            "clients of it."
        )
    for here, wanted in zip(shapes, map(np.shape, jax.tree.leaves(first)), strict=True):
        if here[1:] != wanted[1:]:
            raise CohortError.here(
                f"Examples of client {number} have shape {here[1:]}, those of client 0 "
                f"{wanted[1:]}. Only the number of examples may differ."
            )
    return count


def _require_dtypes(clients: Sequence[Any]) -> None:
    """Refuse examples with other dtypes than the first client's: stored together, all would
    silently be promoted to a common dtype."""
    first = _dtypes(clients[0])
    for path, dtype in zip(_paths(clients[0]), first, strict=True):
        if getattr(dtype, "kind", "") in WORDS:
            raise CohortError.here(
                f"Examples of client 0 are {dtype}{path}, and JAX computes with numbers. Give each "
                "word its own: np.unique(words, return_inverse=True). Numbers of which some are "
                "missing, fill and cast: x.fillna(0).to_numpy(np.float32)."
            )
    for number, client in enumerate(clients):
        if (here := _dtypes(client)) == first:
            continue
        for path, found, wanted in zip(_paths(client), here, first, strict=True):
            kept = map(jax.dtypes.canonicalize_dtype, (found, wanted))  # float32 without x64
            if len({*kept}) > 1:
                raise CohortError.here(
                    f"Examples of client {number} are {found}{path}, those of client 0 {wanted}. "
                    "Cast them: a population keeps one dtype."
                )


def _paths(client: Any) -> list[str]:
    """Return the path of each leaf, in words."""
    return [place(path) for path, _ in jax.tree_util.tree_leaves_with_path(client)]


def _dtypes(client: Any) -> list[Any]:
    return [x.dtype for x in jax.tree.leaves(client)]


def _same_tree(a: Any, b: Any) -> bool:
    trees: list[Any] = [jax.tree.structure(a), jax.tree.structure(b)]
    return bool(trees[0] == trees[1])
