"""The clients of a placement: who sits where, and how those of one device are run and summed.

Clients of different sizes run in the order of their sizes, so that those that run together are
about equally long. Where they may move, they are dealt to the devices like cards, so that every
device has the same work. A device has as many seats as every other; some may stay empty. Those of
a device run all at once (vmap) or chunk by chunk, by what is faster.
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
    """The seats of the clients of one placement."""

    clients: int
    count: int  # seats, on all devices
    devices: Devices | None = None  # None: there is one
    client: Array | None = None  # which client is in each seat; None: they sit as they came
    taken: Array | None = None  # is anybody there; None: in every seat
    stay: bool = False  # nobody changes the device, and `client` counts from each one's first
    own_stores: bool = False  # each device has a store of examples of its own clients

    def seated(self, x: Any) -> Any:
        """A value of all clients, one row for each seat. An empty seat repeats some client."""
        if self.stay and self.devices is not None:
            return self.devices.own_rows(lambda x, order: x[order], x, self.client)
        if self.client is not None:
            return self.spread(whole(x, self.devices)[self.client])
        if self.count != self.clients:
            last = jnp.minimum(jnp.arange(self.count, dtype=jnp.int32), self.clients - 1)
            return self.spread(whole(x, self.devices)[last])
        return x

    def as_came(self, x: Any) -> Any:
        """A value of all seats, one row for each client, in the order in which they came."""
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
        """A value of all seats as the caller gets it. Rows that cannot be split evenly are
        everywhere."""
        x = self.as_came(x)
        if self.devices is None or not self.devices.resident:
            return x
        return self.spread(x) if self.clients % self.devices.count == 0 else whole(x, self.devices)

    def spread(self, x: Any) -> Any:
        """A value with one row for each seat, put where the seats are."""
        if self.devices is None:
            return x
        return jax.lax.with_sharding_constraint(x, self.devices.split)


def whole(x: Any, devices: Devices | None) -> Any:
    """A value on every device, if that is where values live. So are those of which rows are picked:
    otherwise XLA may pick them by an all-reduce."""
    if devices is None or not devices.resident:
        return x
    return jax.lax.with_sharding_constraint(x, devices.whole)


def dealt(clients: int, sizes: Array | None, devices: Devices | None, may_move: bool) -> Seats:
    """The seats of so many clients; `sizes` are their numbers of examples if these differ.
    `may_move`: they may be on other devices than they came on."""
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
    """The seats of clients who sit where their examples are; None if these are everywhere."""
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
    # In an empty seat sits the smallest client, with what is there of other clients' examples.
    chosen = jnp.where(taken, client, jnp.argmin(home.count).astype(client.dtype))
    return Seats(len(home), len(client), home.devices, chosen, taken, own_stores=True)


# --- the clients of one device ----------------------------------------------------------------

# (sent down, shared stores, this client's values) -> (values to sum, values that stay)
OneClient = Callable[[list[Any], list[Any], list[Any]], tuple[list[Any], list[Any]]]


@dataclass(frozen=True)
class Work:
    """What one client does. `to_derive` does the same in a form that JAX can differentiate, where
    `run` is one that it cannot: for those who call `jax.grad` on a program that is being run."""

    run: OneClient
    to_derive: OneClient | None = None


# Bytes that a chunk of clients may touch. A device of several has one core, to which its clients
# should stay near. A single device uses all cores, but only on operations that are large enough.
CACHE = 160 * 2**10
LARGE = 2 * 2**20
SMALL_CLIENT = 2**20  # above that, one client's operations are large enough by themselves
RAGGED_BLOCK = 5  # clients of different sizes that run together wait for the longest of them


@dataclass(frozen=True)
class Clients:
    """How many clients a device has and how they are to be run."""

    count: int
    ragged: bool
    chunk: int | None
    alone: bool  # the device is the only one of its processor
    bytes: int  # of one client's own data and messages
    sums: tuple[Any, ...]  # what each sends, as shapes and dtypes

    @property
    def at_a_time(self) -> int:
        """How many run together."""
        if self.chunk is not None:
            return min(self.chunk, self.count)
        if jax.default_backend() != "cpu":
            return self.count  # an accelerator wants as much at once as there is
        large = self.alone and self.bytes <= SMALL_CLIENT
        fits = max(1, (LARGE if large else CACHE) // max(self.bytes, 1))
        most = min(self.count, fits, RAGGED_BLOCK if self.ragged else self.count)
        # A chunk that divides the cohort needs no masks, and is nearly as good as the largest.
        return next((c for c in range(most, most // 2, -1) if self.count % c == 0), most)


def map_sum(
    work: Work,
    clients: Clients,
    counts: Array | None,
    down: list[Any],
    shared: list[Any],
    each: list[Any],
) -> tuple[list[Array], list[Array]]:
    """The sums over the clients of a device, in the dtype in which they were added up, and what
    stays with each of them (stacked). `counts`: who counts in the sums; None: everybody."""
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
        # The last chunk is moved back to be full; the clients it repeats are left out of its sum.
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
    # The chunks are counted along: a list of their numbers would grow with the cohort.
    first = (jnp.int32(0), [sums.zero(s) for s in clients.sums])
    (_, totals), kept = jax.lax.scan(step, first, None, length=steps)
    return [sums.finish(s) for s in totals], [_joined(k, n, chunk) for k in kept]


def _seated(one: OneClient) -> OneClient:
    """The work of a seat that may be empty, as the first of its values says. An empty one computes
    with whatever rows are there; if that is NaN, `jax.grad` must not pull it back."""

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
        # One client needs no vectorized operations, and some of those are slow.
        return jax.tree.map(lambda x: jnp.asarray(x)[None], one(down, shared, [x[0] for x in each]))

    return single


def _joined(kept: Array, n: int, chunk: int) -> Array:
    """Chunks (steps, chunk, ...) as clients (n, ...), without those that the last one repeats."""
    if n % chunk == 0:
        return kept.reshape(n, *kept.shape[2:])
    full = (kept.shape[0] - 1) * chunk
    rest = n - full
    whole = kept[:-1].reshape(full, *kept.shape[2:])
    return jnp.concatenate([whole, kept[-1, chunk - rest :]])
