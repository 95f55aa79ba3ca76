"""Handles to values on nodes: the server passes them around and never sees what they are."""

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
    """Where every client finds its value: a source that nodes understand (see `sources`)."""

    source: list[Any]
    constants: dict[str, Any] = field(default_factory=dict)  # by digest, those of the source
    holds: tuple[Any, ...] = ()  # what must live as long as this
    kept: dict[int, Any] = field(default_factory=dict)  # by client, why its node may keep it
    made: Source | None = None  # what a program that has it for an argument declares, if not that

    @property
    def declared(self) -> Source:
        """What a program that has this for an argument declares it to be."""
        return self.source if self.made is None else self.made

    def row(self, i: int) -> "Remote":
        """Row i of each client's array."""
        if self.source[0] == "stack":
            return self.holds[i]
        made = row(self.declared, i)
        return Remote(row(self.source, i), self.constants, (self,), made=made)

    def of(self, client: int) -> "Remote":
        """Where one client finds its value."""
        return self

    def alone(self, client: int) -> "Remote":
        """That of one client: the nodes of the others need not keep theirs because of it."""
        if self.source[0] == "stack":
            return _stack([row.alone(client) for row in self.holds])
        return replace(self, holds=(self.kept[client],), kept={}) if self.kept else self

    @staticmethod
    def read(source: Source, declared: Source) -> "Remote":
        """What was written as its source and what is declared of it."""
        if source[0] == "stack":
            return _stack([Remote.read(*row) for row in zip(source[1], declared[1], strict=True)])
        return Remote(source, made=declared)


@dataclass(frozen=True, eq=False)
class Versions:
    """Where clients find their values, if not all in the same way: each its own."""

    remotes: dict[int, Remote]  # by client

    def of(self, client: int) -> Remote:
        """Where one client finds its value; of another placement, it has none and any will do."""
        return self.remotes.get(client) or next(iter(self.remotes.values()))

    def row(self, i: int) -> "Versions":
        """Row i of each client's array."""
        return Versions({client: remote.row(i) for client, remote in self.remotes.items()})


Place = Remote | Versions


def stacked(rows: Sequence[Place]) -> Place:
    """Each client's rows as one array."""
    clients = {client for row in rows if isinstance(row, Versions) for client in row.remotes}
    if clients:
        return Versions({c: _stack([row.of(c) for row in rows]) for c in sorted(clients)})
    return _stack([row.of(0) for row in rows])


def _stack(rows: Sequence[Remote]) -> Remote:
    constants = {digest: x for row in rows for digest, x in row.constants.items()}
    made = ["stack", [row.declared for row in rows]]
    return Remote(["stack", [row.source for row in rows]], constants, tuple(rows), made=made)


def constant(x: Any) -> Remote:
    """A value that all clients have and that depends on nothing: sent once, as programs are."""
    array = np.asarray(to_data(x))
    head = f"{array.dtype}{array.shape}".encode()
    digest = hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()
    return Remote(["constant", digest], {digest: array}, made=["constant"])


@dataclass(frozen=True, eq=False, repr=False)
class NodeValue(Handle):
    """A value that each of some clients has on its node. Pass it to a program where a stacked array
    of all clients' values would go in simulation; it has the shape of that, but not the values.

    Nodes forget a program's result when this handle to it is gone.
    """

    remote: Place
    one: tuple[int, ...]  # the shape of one client's value
    dtype: Any
    clients: tuple[int, ...]  # in the order of the cohort
    wanted: int | None = None  # so many of them are enough: the first that answer
    shared: bool = False  # a store of examples, which has no axis over clients in simulation

    def __len__(self) -> int:
        return len(self.clients) if self.wanted is None else self.wanted

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stacked array that this stands for."""
        return self.one if self.shared else (len(self), *self.one)

    def __repr__(self) -> str:
        return f"NodeValue({self.dtype}{list(self.shape)} on {len(self)} nodes)"

    def gather(self) -> NoReturn:
        """Refused: a client's values do not leave its node."""
        raise FederationError.here(
            f"{self!r} stays on the nodes: a client's values do not leave it. Only sums do: write "
            "fg.sum(...) or fg.mean(...) in the program."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.gather()

    def saved(self) -> list[dict[str, list[Any]]]:
        """By client, where its value is and what is declared of it; clients that are as they began
        are not in it."""
        remotes = {client: self.remote.of(client) for client in self.clients}
        changed = {c: remote for c, remote in remotes.items() if remote.source[0] != "constant"}
        return [{str(c): [remote.source, remote.declared] for c, remote in changed.items()}]

    def restored(self, saved: list[dict[str, list[Any]]]) -> "NodeValue":
        """Return the handle that was saved; this one is to what clients began with."""
        (found,) = saved
        remotes = {int(client): Remote.read(*written) for client, written in found.items()}
        known = {client: self.remote.of(client) for client in self.clients}
        return replace(self, remote=Versions(known | remotes)) if remotes else self

    def leave(self) -> None:
        """Let nodes keep the value when this handle is gone, until it is too old for them."""

        def detach(remote: Remote) -> None:
            for held in (*remote.holds, *remote.kept.values()):
                detach(held) if isinstance(held, Remote) else held.end.detach()

        for client in self.clients:
            detach(self.remote.of(client))

    def origin(self) -> bytes:
        """Return the source of the value, the same for all clients when they begin."""
        return str(self.remote.of(0).source).encode()


def choose(argument: Any, clients: Sequence[int], wanted: int | None = None) -> Any:
    """The same argument of fewer clients: of these, or of the first `wanted` of them to answer."""

    def chosen(x: Any) -> Any:
        if isinstance(x, Cohort):
            store, offset, count = (jax.tree.map(chosen, y) for y in (x.store, x.offset, x.count))
            return Cohort(store, offset, count, np.asarray(clients, np.int32), x.capacity)
        if isinstance(x, NodeValue):
            return replace(x, clients=tuple(clients), wanted=wanted)
        return x

    return map_parts(chosen, argument)
