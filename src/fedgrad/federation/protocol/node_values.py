"""Handles to values on nodes. The server passes them around but never sees the values."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import numpy as np

from fedgrad.clients.cohort import Cohort
from fedgrad.clients.handles import Handle
from fedgrad.core.arguments import map_parts
from fedgrad.federation.protocol.exported import to_data
from fedgrad.federation.protocol.federation_errors import FederationError
from fedgrad.federation.protocol.provenance.sources import Source, row


@dataclass(frozen=True, eq=False)
class Remote:
    """The source of every client's value, in the form that nodes understand (see `sources`)."""

    source: list[Any]
    constants: dict[str, Any] = field(default_factory=dict)  # constants of the source, by digest
    holds: tuple[Any, ...] = ()  # objects that must live as long as this one
    kept: dict[int, Any] = field(default_factory=dict)  # by client, the hold on its node
    made: Source | None = None  # the declared source, where it differs from `source`

    @property
    def declared(self) -> Source:
        """The source that a program declares when it takes this value as an argument."""
        return self.source if self.made is None else self.made

    def row(self, i: int) -> "Remote":
        """Return row i of each client's array."""
        if self.source[0] == "stack":
            return self.holds[i]
        made = row(self.declared, i)
        return Remote(row(self.source, i), self.constants, (self,), made=made)

    def of(self, client: int) -> "Remote":
        """Return the source of one client's value."""
        return self

    def alone(self, client: int) -> "Remote":
        """Restrict this to one client, so that it keeps no values on the nodes of other clients."""
        if self.source[0] == "stack":
            return _stack([row.alone(client) for row in self.holds])
        return replace(self, holds=(self.kept[client],), kept={}) if self.kept else self

    @staticmethod
    def read(source: Source, declared: Source) -> "Remote":
        """Rebuild a remote from its saved source and declared source."""
        if source[0] == "stack":
            return _stack([Remote.read(*row) for row in zip(source[1], declared[1], strict=True)])
        return Remote(source, made=declared)


@dataclass(frozen=True, eq=False)
class Versions:
    """A separate source for each client, for values that clients do not all find the same way."""

    remotes: dict[int, Remote]  # by client

    def of(self, client: int) -> Remote:
        """Return one client's source; any source for a client of another placement (no value)."""
        return self.remotes.get(client) or next(iter(self.remotes.values()))

    def row(self, i: int) -> "Versions":
        """Return row i of each client's array."""
        return Versions({client: remote.row(i) for client, remote in self.remotes.items()})


Place = Remote | Versions


def stacked(rows: Sequence[Place]) -> Place:
    """Stack each client's rows into one array."""
    clients = {client for row in rows if isinstance(row, Versions) for client in row.remotes}
    if clients:
        return Versions({c: _stack([row.of(c) for row in rows]) for c in sorted(clients)})
    return _stack([row.of(0) for row in rows])


def _stack(rows: Sequence[Remote]) -> Remote:
    constants = {digest: x for row in rows for digest, x in row.constants.items()}
    made = ["stack", [row.declared for row in rows]]
    return Remote(["stack", [row.source for row in rows]], constants, tuple(rows), made=made)


def constant(x: Any) -> Remote:
    """Return a value that all clients share and that depends on nothing. It is sent only once."""
    array = np.asarray(to_data(x))
    head = f"{array.dtype}{array.shape}".encode()
    digest = hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()
    return Remote(["constant", digest], {digest: array}, made=["constant"])


@dataclass(frozen=True, eq=False, repr=False)
class NodeValue(Handle):
    """A value that each of some clients has on its node. Pass it to a program where simulation
    takes the stacked array of all clients' values; it has that array's shape, but not its values.

    Nodes forget the result of a program once this handle to it is garbage collected.
    """

    remote: Place
    one: tuple[int, ...]  # the shape of one client's value
    dtype: Any
    clients: tuple[int, ...]  # in the order of the cohort
    wanted: int | None = None  # the first `wanted` of them to answer are enough
    shared: bool = False  # a store of examples, which has no client axis in simulation

    def __len__(self) -> int:
        return len(self.clients) if self.wanted is None else self.wanted

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stacked array that this handle represents."""
        return self.one if self.shared else (len(self), *self.one)

    def __repr__(self) -> str:
        return f"NodeValue({self.dtype}{list(self.shape)} on {len(self)} nodes)"

    def gather(self) -> NoReturn:
        """Raise FederationError: a client's values do not leave its node."""
        raise FederationError.here(
            f"{self!r} stays on the nodes: a client's values do not leave it. Only sums do: write "
            "fg.sum(...) or fg.mean(...) in the program."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.gather()

    def saved(self) -> list[dict[str, list[Any]]]:
        """Return the source and the declared source of each client's value. Clients that still have
        their initial value are omitted."""
        remotes = {client: self.remote.of(client) for client in self.clients}
        changed = {c: remote for c, remote in remotes.items() if remote.source[0] != "constant"}
        return [{str(c): [remote.source, remote.declared] for c, remote in changed.items()}]

    def restored(self, saved: list[dict[str, list[Any]]]) -> "NodeValue":
        """Return the handle that was saved. `self` is the handle to the clients' initial values."""
        (found,) = saved
        remotes = {int(client): Remote.read(*written) for client, written in found.items()}
        known = {client: self.remote.of(client) for client in self.clients}
        return replace(self, remote=Versions(known | remotes)) if remotes else self

    def leave(self) -> None:
        """Let nodes keep the value after this handle is gone, until it expires there."""

        def detach(remote: Remote) -> None:
            for held in (*remote.holds, *remote.kept.values()):
                detach(held) if isinstance(held, Remote) else held.end.detach()

        for client in self.clients:
            detach(self.remote.of(client))

    def origin(self) -> bytes:
        """Return the source of the value, which initially is the same for all clients."""
        return str(self.remote.of(0).source).encode()


def choose(argument: Any, clients: Sequence[int], wanted: int | None = None) -> Any:
    """Restrict an argument to these clients, or to the first `wanted` of them to answer."""

    def chosen(x: Any) -> Any:
        if isinstance(x, Cohort):
            store, offset, count = (jax.tree.map(chosen, y) for y in (x.store, x.offset, x.count))
            return Cohort(store, offset, count, np.asarray(clients, np.int32), x.capacity)
        if isinstance(x, NodeValue):
            return replace(x, clients=tuple(clients), wanted=wanted)
        return x

    return map_parts(chosen, argument)
