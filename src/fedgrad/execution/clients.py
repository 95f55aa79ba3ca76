"""The clients of a placement: their assignment to devices, and how one device runs and sums them.

Clients of different sizes are sorted by size, so that clients that run together take about equally
long. Where clients may move, they are dealt to the devices in turn, like cards, so that all devices
get the same amount of work. Every device has the same number of seats; some may stay empty. The
clients of a device run all at once (vmap) or in chunks, whichever is faster.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.aggregate import sums
from fedgrad.core.arguments import ClientData, parts
from fedgrad.core.errors import CohortError
from fedgrad.core.primitives import source_p
from fedgrad.execution.devices import Devices
from fedgrad.execution.sharded import AtHome

Array = jax.Array


@dataclass(frozen=True, eq=False)
class Seats:
    """The assignment of the clients of one placement to seats on devices."""

    clients: int
    count: int  # seats on all devices together
    devices: Devices | None = None  # None: a single device
    client: Array | None = None  # the client in each seat; None: in the order of the arguments
    taken: Array | None = None  # whether a seat has a client; None: all have
    stay: bool = False  # clients stay on their devices; `client` is an index within the device
    own_stores: bool = False  # each device stores only the examples of its own clients

    def seated(self, x: Any) -> Any:
        """Rearrange a value of all clients to one row per seat. An empty seat repeats some
        client."""
        if self.stay and self.devices is not None:
            return self.devices.own_rows(lambda x, order: x[order], x, self.client)
        if self.client is not None:
            return self.spread(whole(x, self.devices)[self.client])
        if self.count != self.clients:
            last = jnp.minimum(jnp.arange(self.count, dtype=jnp.int32), self.clients - 1)
            return self.spread(whole(x, self.devices)[last])
        return x

    def as_came(self, x: Any) -> Any:
        """Rearrange a value of all seats to one row per client, in their original order."""
        if self.stay and self.devices is not None:
            return self.devices.own_rows(lambda x, order: x[jnp.argsort(order)], x, self.client)
        if self.client is not None:
            client = self.client
            if self.taken is not None:
                client = jnp.where(self.taken, client, self.clients)
            return whole(x, self.devices)[jnp.argsort(client)[: self.clients]]
        if self.count != self.clients:
            return whole(x, self.devices)[: self.clients]
        return x

    def result(self, x: Any) -> Any:
        """Return a value of all seats as the caller gets it. Rows that cannot be split evenly are
        replicated."""
        x = self.as_came(x)
        if self.devices is None or not self.devices.resident:
            return x
        return self.spread(x) if self.clients % self.devices.count == 0 else whole(x, self.devices)

    def spread(self, x: Any) -> Any:
        """Shard a value with one row per seat over the devices of the seats."""
        if self.devices is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.devices.split)


def whole(x: Any, devices: Devices | None) -> Any:
    """Replicate a value on all devices, if values live on them. This includes values whose rows are
    picked; otherwise XLA may pick them by an all-reduce."""
    if devices is None or not devices.resident:
        return x
    return jax.lax.with_sharding_constraint(x, devices.whole)


def dealt(clients: int, sizes: Array | None, devices: Devices | None, may_move: bool) -> Seats:
    """Assign clients to seats.

    Args:
        clients: The number of clients.
        sizes: Their numbers of examples, if these differ.
        devices: The devices, or None for a single one.
        may_move: Whether clients may run on other devices than those that hold their values.
    """
    if devices is None:
        return Seats(clients, clients, client=None if sizes is None else jnp.argsort(-sizes))
    count = -(-clients // devices.count) * devices.count
    if sizes is None:
        taken = None if count == clients else jnp.arange(count, dtype=jnp.int32) < clients
        return Seats(clients, count, devices, taken=taken)
    if not may_move and count == clients:
        order = devices.own_rows(lambda size: jnp.argsort(-size), sizes)
        return Seats(clients, count, devices, order, stay=True)
    by_size = jnp.argsort(-jax.lax.with_sharding_constraint(sizes, devices.whole))
    card = jnp.arange(count, dtype=jnp.int32).reshape(-1, devices.count).T.reshape(-1)
    taken = None if count == clients else card < clients
    return Seats(clients, count, devices, by_size[jnp.minimum(card, clients - 1)], taken)


def at_home(arguments: list[Any]) -> Seats | None:
    """Return the seats of clients that run where their examples are, or None if all devices have
    them."""
    cohorts = [part for part in parts(arguments) if isinstance(part, ClientData)]
    home = next((c.cohort for c in cohorts if isinstance(c, AtHome)), None)
    if home is None:
        return None
    if len(cohorts) > 1:
        raise CohortError.here(
            f"{len(cohorts)} cohorts for the same clients, of whom one says where they are. Make "
            "one population of both: a client's examples may be any pytree."
        )
    client = jnp.asarray(home.client)
    taken = client >= 0
    # An empty seat gets the smallest client, which reads other clients' examples there.
    chosen = jnp.where(taken, client, jnp.argmin(home.count).astype(client.dtype))
    return Seats(len(home), len(client), home.devices, chosen, taken, own_stores=True)


# --- the clients of one device ----------------------------------------------------------------

# (sent down, shared stores, this client's values) -> (values to sum, values that stay)
OneClient = Callable[[list[Any], list[Any], list[Any]], tuple[list[Any], list[Any]]]


@dataclass(frozen=True)
class Work:
    """The work of one client. If JAX cannot differentiate `run`, `to_derive` is an equivalent
    function that it can, for callers of `jax.grad` on a program that is being run."""

    run: OneClient
    to_derive: OneClient | None = None


# Bytes that a chunk of clients may touch. If there are several devices, each has one core, and its
# clients should fit that core's cache. A single device uses all cores, but only for operations that
# are large enough.
CACHE = 160 * 2**10
LARGE = 2 * 2**20
SMALL_CLIENT = 2**20  # above this, the operations of a single client are large enough
RAGGED_BLOCK = 5  # clients of different sizes that run together wait for the longest one


@dataclass(frozen=True)
class Clients:
    """The number of clients of a device, and how to run them."""

    count: int
    ragged: bool
    chunk: int | None
    alone: bool  # it is the only device of its process
    bytes: int  # one client's own data and messages
    sums: tuple[Any, ...]  # shapes and dtypes of what each client sends

    @property
    def at_a_time(self) -> int:
        """The number of clients that run together."""
        if self.chunk is not None:
            return min(self.chunk, self.count)
        if jax.default_backend() != "cpu":
            return self.count  # an accelerator is fastest with everything at once
        large = self.alone and self.bytes <= SMALL_CLIENT
        fits = max(1, (LARGE if large else CACHE) // max(self.bytes, 1))
        most = min(self.count, fits, RAGGED_BLOCK if self.ragged else self.count)
        # A chunk that divides the cohort needs no masks, and is nearly as fast as the largest one.
        return next((c for c in range(most, most // 2, -1) if self.count % c == 0), most)


def map_sum(
    work: Work,
    clients: Clients,
    counts: Array | None,
    down: list[Any],
    shared: list[Any],
    each: list[Any],
) -> tuple[list[Array], list[Array]]:
    """Return the sums over the clients of a device, in the dtype of the accumulation, and the
    values that stay with each of them (stacked). `counts` selects the clients that are summed; None
    means all."""
    n, chunk = clients.count, clients.at_a_time
    if counts is not None:
        derived = None if work.to_derive is None else _seated(work.to_derive)
        work, each = Work(_seated(work.run), derived), [counts, *each]
    if chunk == n:
        up, kept = _vmap(work, n, down, shared, each)
        return [sums.stacked(x, counts) for x in up], kept

    def step(carry: Any, _: None) -> tuple[Any, list[Array]]:
        i, totals = carry
        start = jnp.minimum(i * chunk, n - chunk)
        # The last chunk is moved back to be full; clients that it repeats are masked out of its
        # sum.
        now = start + jnp.arange(chunk, dtype=jnp.int32) >= i * chunk if n % chunk else None
        if counts is not None:
            here = jax.lax.dynamic_slice_in_dim(counts, start, chunk)
            now = here if now is None else here & now
        mine = [jax.lax.dynamic_slice_in_dim(x, start, chunk) for x in each]
        up, kept = _vmap(work, chunk, down, shared, mine)
        more = [sums.stacked(x, now) for x in up]
        added = [sums.add(c, s, steps) for c, s in zip(totals, more, strict=True)]
        return (i + 1, added), kept

    steps = -(-n // chunk)
    # Carry the chunk number: an array of chunk numbers would grow with the cohort.
    first = (jnp.int32(0), [sums.zero(s) for s in clients.sums])
    (_, totals), kept = jax.lax.scan(step, first, None, length=steps)
    return [sums.finish(s) for s in totals], [_joined(k, n, chunk) for k in kept]


def _seated(one: OneClient) -> OneClient:
    """Wrap the work of one client for a seat that may be empty, which the first value says. An
    empty seat computes with arbitrary rows; if these give NaN, `jax.grad` must not propagate it."""

    def seated(down: list[Any], shared: list[Any], each: list[Any]) -> Any:
        taken, *own = each

        def mark(x: Any) -> Any:
            return source_p.bind(x, taken) if jnp.issubdtype(x.dtype, jnp.inexact) else x

        return one([mark(x) for x in down], shared, [mark(x) for x in own])

    return seated


def _vmap(
    work: Work, n: int, down: list[Any], shared: list[Any], each: list[Any]
) -> tuple[list[Array], list[Array]]:
    if work.to_derive is None:
        return _for_all(work.run, n)(down, shared, each)
    fast = jax.custom_jvp(_for_all(work.run, n))
    plain = _for_all(work.to_derive, n)
    fast.defjvp(lambda primals, tangents: (fast(*primals), jax.jvp(plain, primals, tangents)[1]))
    return fast(down, shared, each)


def _for_all(one: OneClient, n: int) -> Callable[..., tuple[list[Array], list[Array]]]:
    if n > 1:
        return jax.vmap(one, in_axes=(None, None, 0), axis_size=n)

    def single(down: list[Any], shared: list[Any], each: list[Any]) -> Any:
        # A single client needs no vectorized operations, some of which are slow.
        return jax.tree.map(lambda x: jnp.asarray(x)[None], one(down, shared, [x[0] for x in each]))

    return single


def _joined(kept: Array, n: int, chunk: int) -> Array:
    """Reshape chunks (steps, chunk, ...) to clients (n, ...), without the repeats of the last
    chunk."""
    if n % chunk == 0:
        return kept.reshape(n, *kept.shape[2:])
    full = (kept.shape[0] - 1) * chunk
    rest = n - full
    whole = kept[:-1].reshape(full, *kept.shape[2:])
    return jnp.concatenate([whole, kept[-1, chunk - rest :]])
