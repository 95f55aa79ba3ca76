"""A federation as the server sees it: connected clients, their data, and what they already know."""

import logging
import threading
import time
import weakref
from collections.abc import Collection
from typing import Any

from fedgrad.federation.protocol.envelope import Enough, Envelope, Transport
from fedgrad.federation.protocol.federation_errors import FederationError

log = logging.getLogger("fedgrad.federation")


class Hold:
    """The reason why a node keeps a value."""

    end: Any  # the finalizer that tells the node to forget the value


class Federation:
    """Clients behind a transport. A client is identified by its index, which survives a restart of
    its node if the node declares it (`partition-id`). Other nodes get the free indices by rank of
    their ids."""

    def __init__(self, transport: Transport, deadline: float = 60.0) -> None:
        self.transport, self.deadline = transport, deadline
        self.knows: dict[int, set[str]] = {}  # digests of programs and constants, by node
        self.declared: set[int] = set()  # nodes that know their client's index
        self.minimum_cohort: dict[int, int] = {}  # required by the site, by node
        self._clients: dict[int, int] = {}  # client -> node
        self.parts: dict[int, list[str]] = {}  # by node, once it has described itself
        self._silent: dict[int, tuple[float, str]] = {}  # unidentified nodes: when, why
        self._waste: dict[int, set[str]] = {}  # names that a node can forget
        self._lock = threading.RLock()

    # --- connected clients ----------------------------------------------------------------

    def clients(self) -> dict[int, int]:
        """Return the connected clients that answer, each with the id of its node."""
        return self.roll_call(self.deadline)[0]

    def roll_call(self, deadline: float) -> tuple[dict[int, int], dict[int, str]]:
        """Return the connected clients, each with the id of its node, and the other connected
        nodes, each with the reason why it is not a client."""
        connected = set(self.transport.nodes())
        self._meet(connected - self.parts.keys(), connected, deadline)
        with self._lock:
            present = {c: n for c, n in sorted(self._clients.items()) if n in connected}
            strangers = sorted(connected - self.parts.keys())
            return present, {node: self._silent[node][1] for node in strangers}

    def locate(self, wanted: Collection[int]) -> dict[int, int]:
        """Return the nodes of these clients, for those that are connected."""
        connected = set(self.transport.nodes())
        here = {c: n for c, n in self._clients.items() if c in wanted and n in connected}
        if len(here) < len(wanted):  # some may be back with another id
            now = time.monotonic()
            silent = {n for n, (at, _) in self._silent.items() if now - at < self.deadline}
            self._meet(connected - self.parts.keys() - silent, connected, self.deadline)
        with self._lock:
            return {c: n for c, n in self._clients.items() if c in wanted and n in connected}

    def _meet(self, new: set[int], connected: set[int], deadline: float) -> None:
        """Ask nodes to identify themselves."""
        replies = self.ask(dict.fromkeys(sorted(new), Envelope("describe", {})), deadline)
        with self._lock:
            good = {n: reply for n, reply in replies.items() if reply.kind == "ok"}
            # Nodes that declare an index come first; the others get the indices that are left.
            for node in sorted(good, key=lambda n: ("index" not in good[n].meta, n)):
                if node not in self.parts:  # otherwise another thread was faster
                    self._join(node, good[node], connected)
            for node in new - good.keys():
                why = replies[node].reason if node in replies else "it does not answer"
                self._silent[node] = time.monotonic(), why
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
        self.parts[node] = [str(part) for part in parts] if isinstance(parts, list) else []

    # --- messages -------------------------------------------------------------------------

    def ask(
        self, requests: dict[int, Envelope], deadline: float, enough: Enough | None = None
    ) -> dict[int, Envelope]:
        """Send requests to nodes and return at most one reply of each."""
        if not requests:
            return {}
        replies = self.transport.exchange(requests, deadline, enough)
        return {node: reply for node, reply in replies.items() if node in requests}

    def known_by(self, node: int) -> set[str]:
        """Return the digests of the programs and constants that a node has been sent."""
        with self._lock:
            return self.knows.setdefault(node, set())

    def hold(self, name: str, node: int) -> "Hold":
        """Return a hold: while it lives, the node keeps the value of this name."""
        hold = Hold()
        hold.end = weakref.finalize(hold, self._discard, name, node)
        hold.end.atexit = False
        return hold

    def _discard(self, name: str, node: int) -> None:
        with self._lock:
            self._waste.setdefault(node, set()).add(name)

    def waste(self, node: int) -> list[str]:
        """Pop the names that a node can be told to forget with the next message."""
        with self._lock:
            return sorted(self._waste.pop(node, ()))

    def flush(self) -> None:
        """Tell nodes now what they can forget, instead of with their next message."""
        connected = self.transport.nodes()
        waste = {node: self.waste(node) for node in connected}
        requests = {n: Envelope("forget", {"names": names}) for n, names in waste.items() if names}
        self.ask(requests, self.deadline)
