"""A population whose examples are spread over devices, each holding those of its own clients.

Clients do not move: a chosen client runs on the device that has its examples. So a cohort may give
some devices more work than others, and leave a few empty seats on those with less.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedgrad.clients import digest
from fedgrad.clients.cohort import Cohort
from fedgrad.clients.examples import Examples
from fedgrad.clients.in_memory import joined, read_clients
from fedgrad.clients.population import Population, Stored
from fedgrad.core.arguments import ClientData, Seen, Shared, map_parts
from fedgrad.core.errors import CohortError
from fedgrad.core.lossless import require_lossless
from fedgrad.core.program import Executor
from fedgrad.execution.devices import Devices
from fedgrad.execution.multi_process import gather, is_key


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class ShardedCohort(Cohort):
    """A cohort of a population that is spread over devices. Each client has a seat on the device
    that has its examples."""

    client: Any  # for each seat the index of a client of the cohort, or -1
    devices: Devices = field(metadata={"static": True})


@dataclass(frozen=True, eq=False)
class AtHome(ClientData):
    """A cohort as seen by each device: with the part of the store that the device has."""

    cohort: ShardedCohort

    def seen(self, where: str) -> Seen:
        """Return the clients' views of the examples; offsets count from the first row of the
        device."""
        cohort, devices = self.cohort, self.cohort.devices.count
        store = jax.tree.map(lambda x: Shared(x, devices), cohort.store)
        offset = cohort.offset % (len(jax.tree.leaves(cohort.store)[0]) // devices)
        view = Examples(store, offset, cohort.count, cohort.capacity)
        return Seen(view, cohort.index, cohort.count)


def by_device(argument: Any, devices: Devices) -> Any:
    """Return an argument as each of the devices sees it."""

    def seen(x: Any) -> Any:
        if not isinstance(x, ShardedCohort):
            return x
        if x.devices != devices:
            raise CohortError.here(
                f"The cohort's examples are on a mesh of {dict(x.devices.mesh.shape)}, but the "
                f"program runs on another, of {dict(devices.mesh.shape)}. Make the population with "
                "the mesh that the program runs on."
            )
        return AtHome(x)

    return map_parts(seen, argument)


@dataclass(frozen=True, repr=False)
class ShardedPopulation(Stored):
    """All clients, with the examples of each on one device. Make one with `mesh.population`."""

    offsets: np.ndarray
    device: np.ndarray  # for each client its device's position along the axis
    executor: Executor = field()
    known: str | None = None  # the digest of all examples, if no process has all of them

    @property
    def digest(self) -> str | None:
        """A digest of all examples."""
        return self.known or super().digest

    def cohort(self, index: Any) -> Cohort:
        """Return a cohort with seats on the devices that have the clients' examples."""
        if isinstance(index, jax.core.Tracer):
            raise CohortError.here(
                "A population that is spread over devices is sampled outside of jit, because where "
                "its clients run depends on who is chosen. Pass the cohort as an argument."
            )
        offset, count = self.offsets[index], self.counts[index]
        everyone: Any = self.everyone
        seats = _seats(self.device[index], count, everyone.devices.count)
        return dataclasses.replace(everyone, offset=offset, count=count, index=index, client=seats)


def population(own: Sequence[Any], devices: Devices, executor: Executor) -> Population:
    """Make a population of all processes' clients; `own` has one pytree of examples per client of
    this process."""
    own, counts = read_clients(own)
    device, sizes, start = _all_clients(own, counts, devices)
    capacity = int(sizes.max())
    offset, filled = np.zeros(len(sizes), np.int64), np.zeros(devices.count, np.int64)
    for client, d in enumerate(device):
        offset[client] = filled[d]
        filled[d] += sizes[client]
    rows = int(filled.max()) + capacity  # with spare rows that the last batch may read
    if rows * devices.count >= 2**31:
        raise CohortError.here(
            f"{rows} examples on each of {devices.count} devices are more than 32 bits can count. "
            "Use more devices or fewer examples."
        )

    def stored(path: Any, *leaves: Any) -> jax.Array:
        def on_device(index: Any) -> np.ndarray:
            d = (index[0].start or 0) // rows
            whose = enumerate(zip(leaves, device[start:], strict=False), start)
            whole = joined(path, {i: x for i, (x, where) in whose if where == d}, rows)
            return whole.astype(jax.dtypes.canonicalize_dtype(whole.dtype), copy=False)

        shape = (rows * devices.count, *leaves[0].shape[1:])
        return jax.make_array_from_callback(shape, devices.split, on_device)

    start_row = (offset + device * rows).astype(np.int32)
    index, seats = np.arange(len(sizes), dtype=np.int32), _seats(device, sizes, devices.count)
    store = jax.tree_util.tree_map_with_path(stored, *own)
    everyone = ShardedCohort(store, start_row, sizes, index, capacity, seats, devices)
    known = _digest(own, sizes[start:], devices) if len(devices.devices_of) > 1 else None
    return ShardedPopulation(everyone, sizes, start_row, device, executor, known)


def shard(own: Any, devices: Devices) -> Any:
    """Combine the stacked values of this process's clients with those of all other processes."""
    require_lossless(own, "mesh.shard: the arrays")
    leaves = jax.tree.leaves(own)
    counts = {np.shape(x)[0] if np.ndim(x) else None for x in leaves}
    if len(counts) != 1 or None in counts:
        raise CohortError.here(
            "mesh.shard takes a pytree of arrays with one row for each client of this process; got "
            f"leaves of shapes {[np.shape(x) for x in leaves]}."
        )
    given = gather(devices, np.array([len(leaves[0]), len(devices.own)], np.int32))
    shares = given[:, 0] / given[:, 1]
    if (shares != given[0, 0] // given[0, 1]).any():
        raise CohortError.here(
            "mesh.shard: every device has to get as many clients as every other. The processes "
            f"have {given[:, 0].tolist()} clients and {given[:, 1].tolist()} devices. Give each "
            "the same multiple of its devices, or use mesh.population, which takes any number."
        )
    n = int(shares[0]) * devices.count

    def spread(x: Any) -> jax.Array:
        if is_key(x):
            data = spread(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.make_array_from_process_local_data(devices.split, x, (n, *x.shape[1:]))

    return jax.tree.map(spread, own)


def _all_clients(
    own: list[Any], sizes: np.ndarray, devices: Devices
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the device and the number of examples of all processes' clients, and the index of this
    process's first client."""
    kinds_of = [(jax.dtypes.canonicalize_dtype(x.dtype), x.shape) for x in jax.tree.leaves(own[0])]
    shapes = [f"{dtype}{shape[1:]}" for dtype, shape in kinds_of]
    kind = zlib.crc32(f"{jax.tree.structure(own[0])} {shapes}".encode())
    header = np.array([kind, len(own), len(devices.own)], np.uint32)
    kinds, numbers, places = gather(devices, header).T
    if (numbers < places).any():
        raise CohortError.here(
            f"mesh.population: the processes have {numbers.tolist()} clients for "
            f"{places.tolist()} devices. Give each at least one for every device."
        )
    if (kinds != kind).any():
        raise CohortError.here(
            f"mesh.population: examples have not the same structure, shapes and dtypes in every "
            f"process. Here they are {jax.tree.structure(own[0])} with {shapes}."
        )
    # Largest clients first, each to the device with the fewest examples so far.
    filled = dict.fromkeys(devices.own, 0)
    device = np.zeros(len(own), np.int32)
    for client in np.argsort(-sizes, kind="stable"):
        device[client] = min(filled, key=lambda d: filled[d])
        filled[device[client]] += sizes[client]
    table = np.zeros((int(numbers.max()), 2), np.int32)
    table[: len(own)] = np.stack([device, sizes], 1)
    tables = zip(gather(devices, table), numbers, strict=True)
    every = np.concatenate([rows[:n] for rows, n in tables])
    before = list(devices.devices_of).index(jax.process_index())
    return every[:, 0], every[:, 1], int(numbers[:before].sum())


def _digest(own: list[Any], sizes: np.ndarray, devices: Devices) -> str:
    """Return the digest of all processes' clients. All processes compute it together here, because
    later perhaps only one of them asks for it."""
    named, _ = jax.tree_util.tree_flatten_with_path(own[0])
    kinds = [digest.kind(jax.tree_util.keystr(p), x.dtype, x.shape[1:]) for p, x in named]
    each = [digest.of_each(jax.tree.leaves(c), [0], [n]) for c, n in zip(own, sizes, strict=False)]
    numbers = gather(devices, np.array([len(own)], np.int32))[:, 0].tolist()
    table = np.zeros((max(numbers), digest.SIZE), np.uint8)
    table[: len(own)] = np.frombuffer(b"".join(each), np.uint8).reshape(len(own), -1)
    every = zip(gather(devices, table), numbers, strict=True)
    return digest.of_all(kinds, b"".join(rows[:n].tobytes() for rows, n in every))


def _seats(device: np.ndarray, count: np.ndarray, devices: int) -> np.ndarray:
    """Return the client in each seat of each device, largest clients first.

    The number of seats is rounded up, so that cohorts of one size have few distinct numbers of
    seats: each number compiles a program once.
    """
    order = np.lexsort((-count, device))
    taken = np.bincount(device, minlength=devices)
    step = max(1, len(device) // (4 * devices))
    share = -(-int(taken.max()) // step) * step
    rank = np.arange(len(order)) - np.repeat(np.cumsum(taken) - taken, taken)
    seats = np.full(devices * share, -1, np.int32)
    seats[device[order] * share + rank] = order
    return seats
