"""Nodes in this process, for tests and for trying out a program as a federation would run it."""

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from fedgrad.federation.protocol.envelope import Arrived, Enough, Envelope, collected
from fedgrad.federation.protocol.node import Node
from fedgrad.federation.protocol.node_data import Context
from fedgrad.federation.protocol.policy import Policy


class Handler(Protocol):
    """A node, or a stand-in for one."""

    def handle(self, request: Envelope) -> Envelope | None:
        """Return the reply to a request, or None if there will never be one."""
        ...


class InProcess:
    """A transport to nodes that are objects in this process. Each request gets its own thread."""

    def __init__(self, nodes: Mapping[int, Handler]) -> None:
        self.handlers = dict(nodes)

    @classmethod
    def of(cls, clients: Sequence[Any], policy: Policy | None = None) -> Self:
        """Create one node for each client's data. Without a policy the nodes allow everything."""
        allowed = Policy(anything=True, minimum_cohort=1) if policy is None else policy

        def node(i: int, data: Any) -> Node:
            return Node(lambda _: data, allowed, context=Context({"partition-id": i}))

        return cls({1000 + i: node(i, data) for i, data in enumerate(clients)})

    def nodes(self) -> list[int]:
        """Return the ids of the nodes."""
        return sorted(self.handlers)

    def exchange(
        self, requests: dict[int, Envelope], deadline: float, enough: Enough | None = None
    ) -> dict[int, Envelope]:
        """Return the replies that arrive before the deadline; later ones are discarded."""
        answers: queue.SimpleQueue[Arrived] = queue.SimpleQueue()

        def work(node: int, request: Envelope) -> None:
            try:
                reply = self.handlers[node].handle(_copied(request))
            except Exception as error:
                reply = Envelope("error", {"reason": f"the node broke: {error!r}"})
            answers.put((node, None if reply is None else _copied(reply)))

        waiting = requests.keys() & self.handlers.keys()
        for node in waiting:
            threading.Thread(target=work, args=(node, requests[node]), daemon=True).start()
        return collected(answers, waiting, deadline, enough)


def _copied(envelope: Envelope) -> Envelope:
    """Copy an envelope, as sending it would: neither side sees the other modify its arrays."""
    arrays = tuple(array.copy() for array in envelope.arrays)
    return Envelope(envelope.kind, dict(envelope.meta), arrays)
