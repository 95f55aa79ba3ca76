"""Who sits where: the clients of a placement, over devices and in the order in which they run.

Clients of different sizes run in the order of their sizes, so that those that run together are
about equally long. Where they may move, they are dealt to the devices like cards, so that every
device has the same work. A device has as many seats as every other; some may stay empty.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.arguments import ClientData, parts
from fedgrad.core.errors import CohortError
from fedgrad.executors.devices import Devices
from fedgrad.executors.sharded import AtHome

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
