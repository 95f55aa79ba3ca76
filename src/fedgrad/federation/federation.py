"""A federation as the server sees it: who is there, what they have, and what they know already."""

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.cohort import Cohort
from fedgrad.core.errors import ArgumentError, CohortError, nearest
from fedgrad.federation.data import decoded
from fedgrad.federation.envelope import Envelope, Transport
from fedgrad.federation.errors import FederationError, NoAnswer
from fedgrad.federation.values import NodeValue, Remote

log = logging.getLogger("fedgrad.federation")
Enough = Callable[[dict[int, Envelope]], bool]


class Federation:
    """Clients behind a transport. A client is known by its index, which outlives a restart of its
    node if the node declares it (`partition-id`); else it is the rank of the node's id."""

    def __init__(self, transport: Transport, deadline: float = 60.0) -> None:
        self.transport, self.deadline = transport, deadline
        self.knows: dict[int, set[str]] = {}  # digests, by node
        self.declared: set[int] = set()  # nodes that know their client's index
        self.minimum_cohort: dict[int, int] = {}  # that the site of a node insists on
        self._clients: dict[int, int] = {}  # client -> node
        self._parts: dict[int, list[str]] = {}  # of each node that has described itself
        self._silent: dict[int, float] = {}  # nodes that did not say who they are, and when
        self._waste: dict[int, set[str]] = {}  # names that a node can forget
        self._lock = threading.RLock()

    # --- who is there ---------------------------------------------------------------------

    def clients(self) -> dict[int, int]:
        """The clients that are connected now and answer, each with the id of its node."""
        connected = set(self.transport.nodes())
        self._meet(connected - self._parts.keys(), connected)
        with self._lock:
            return {c: node for c, node in sorted(self._clients.items()) if node in connected}

    def locate(self, wanted: Collection[int]) -> dict[int, int]:
        """The nodes of these clients, as far as they are connected."""
        connected = set(self.transport.nodes())
        here = {c: n for c, n in self._clients.items() if c in wanted and n in connected}
        if len(here) < len(wanted):  # some may be back with another id
            now = time.monotonic()
            silent = {n for n, since in self._silent.items() if now - since < self.deadline}
            self._meet(connected - self._parts.keys() - silent, connected)
        with self._lock:
            return {c: n for c, n in self._clients.items() if c in wanted and n in connected}

    def _meet(self, new: set[int], connected: set[int]) -> None:
        """Ask nodes who they are."""
        replies = self.ask(dict.fromkeys(sorted(new), Envelope("describe", {})), self.deadline)
        with self._lock:
            good = {n: reply for n, reply in replies.items() if reply.kind == "ok"}
            # Who knows its index comes first; the others get what is left.
            for node in sorted(good, key=lambda n: ("index" not in good[n].meta, n)):
                if node not in self._parts:  # else another thread has met it meanwhile
                    self._join(node, good[node], connected)
            for node in new - good.keys():
                self._silent[node] = time.monotonic()
                why = replies[node].reason if node in replies else "it does not answer"
                log.warning("node %s takes no part: %s", node, why)

    def _join(self, node: int, reply: Envelope, connected: set[int]) -> None:
        index = reply.meta.get("index")
        if isinstance(index, int):
            other = self._clients.get(index)
            if other is not None and other != node and other in connected:
                raise FederationError.here(
                    f"Nodes {other} and {node} both say that they are client {index}. Give each "
                    "node its own partition-id."
                )
            self.declared.add(node)
        else:
            index = next(i for i in range(len(self._clients) + 1) if i not in self._clients)
        minimum = reply.meta.get("minimum_cohort", 1)
        self.minimum_cohort[node] = minimum if isinstance(minimum, int) else 1
        parts = reply.meta.get("parts", [])
        self._clients[index] = node
        self._parts[node] = [str(part) for part in parts] if isinstance(parts, list) else []

    def values(self, part: str = "") -> Any:
        """The data of all clients as they are, a tree of handles; all have the same shapes."""
        shapes = self._described(part, examples=False)
        structure, rows, dtypes, _ = _same(shapes, "use population(...) for different numbers")
        leaves = [
            NodeValue(Remote(["data", part, i]), shape, dtype, tuple(shapes))
            for i, (shape, dtype) in enumerate(zip(rows, dtypes, strict=True))
        ]
        return decoded(structure, leaves)

    def examples(self, part: str = "") -> Cohort:
        """All clients, which have different numbers of examples, as a cohort of handles."""
        shapes = self._described(part, examples=True)
        most = max(int(shape[3]) for shape in shapes.values())
        shapes = {client: (*shape[:3], most) for client, shape in shapes.items()}
        structure, rows, dtypes, _ = _same(shapes, "only the number of examples may differ")
        clients, int32 = tuple(shapes), np.dtype("int32")
        store = [
            NodeValue(
                Remote(["rows", part, i, most]), (2 * most, *shape), dtype, clients, shared=True
            )
            for i, (shape, dtype) in enumerate(zip(rows, dtypes, strict=True))
        ]
        return Cohort(
            store=decoded(structure, store),
            offset=NodeValue(Remote(["offset"]), (), int32, clients),
            count=NodeValue(Remote(["count", part]), (), int32, clients),
            index=np.asarray(clients, np.int32),
            capacity=most,
        )

    def _described(self, part: str, examples: bool) -> dict[int, Any]:
        """(structure, shapes, dtypes, capacity) of a part, of the clients that have it and answer
        now."""
        present = self.clients()
        if not present:
            raise NoAnswer.here(
                "No node of the federation is connected, or none can say who it is (see the log)."
            )
        having = {c: n for c, n in present.items() if not part or part in self._parts[n]}
        if not having:
            known = sorted({name for node in present.values() for name in self._parts[node]})
            raise ArgumentError.here(f"No client has data {part!r}." + nearest(part, known))
        request = Envelope("describe", {"part": part, "examples": examples})
        replies = self.ask(dict.fromkeys(having.values(), request), self.deadline)
        shapes: dict[int, Any] = {}
        for client, node in having.items():
            reply = replies.get(node)
            if reply is None:
                continue
            if reply.kind != "ok":
                raise FederationError.here(
                    f"Client {client} cannot say what its data are like: {reply.reason}."
                )
            try:
                shapes[client] = _read_description(reply.meta)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise FederationError.here(
                    f"Client {client} says of its data what makes no sense."
                ) from None
        if not shapes:
            raise NoAnswer.here("No node of the federation answers.")
        return shapes

    # --- messages -------------------------------------------------------------------------

    def ask(
        self, requests: dict[int, Envelope], deadline: float, enough: Enough | None = None
    ) -> dict[int, Envelope]:
        """The replies of these nodes, one each at most."""
        if not requests:
            return {}
        if enough is None:
            replies = self.transport.exchange(requests, deadline)
        else:
            replies = self.transport.exchange(requests, deadline, enough)
        return {node: reply for node, reply in replies.items() if node in requests}

    def known_by(self, node: int) -> set[str]:
        """Digests of the programs and constants that a node has been sent."""
        with self._lock:
            return self.knows.setdefault(node, set())

    def kept(self, name: str) -> Remote:
        """A handle to what nodes are told to keep. When it is gone, its nodes can forget that."""
        remote = Remote(["kept", name])
        weakref.finalize(remote, self._discard, name, remote.nodes).atexit = False
        return remote

    def _discard(self, name: str, nodes: set[int]) -> None:
        with self._lock:
            for node in nodes:
                self._waste.setdefault(node, set()).add(name)

    def waste(self, node: int) -> list[str]:
        """What a node can be told to forget with the next message."""
        with self._lock:
            return sorted(self._waste.pop(node, ()))

    def flush(self, deadline: float | None = None) -> None:
        """Tell nodes now what they can forget. Else they learn it with their next message."""
        connected = self.transport.nodes()
        waste = {node: self.waste(node) for node in connected}
        requests = {n: Envelope("forget", {"names": names}) for n, names in waste.items() if names}
        self.ask(requests, self.deadline if deadline is None else deadline)


def _read_description(meta: dict[str, Any]) -> tuple[Any, list[Any], list[Any], int]:
    structure, shapes, names, capacity = (
        json.loads(meta[name]) for name in ("structure", "shapes", "dtypes", "capacity")
    )
    dtypes = [jax.dtypes.canonicalize_dtype(jnp.dtype(name)) for name in names]
    rows = [tuple(map(int, shape)) for shape in shapes]
    decoded(structure, list(zip(rows, dtypes, strict=True)))  # fits together, or raises
    return structure, rows, dtypes, int(capacity or 0)


def _same(shapes: dict[int, Any], hint: str) -> Any:
    """What all clients say of their data, if they say the same."""
    first, described = next(iter(shapes.items()))
    for client, other in shapes.items():
        if other != described:
            raise CohortError.here(
                f"Clients {first} and {client} have different data: {_shown(described)} and "
                f"{_shown(other)}; {hint}."
            )
    return described


def _shown(described: Any) -> str:
    return ", ".join(f"{d}{list(s)}" for s, d in zip(*described[1:3], strict=True))
