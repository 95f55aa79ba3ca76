"""Envelopes, which are all that crosses the wire, and the interface of engines that carry them."""

import queue
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Meta = str | int | float | bool | list[str] | list[int] | bytes


@dataclass(frozen=True)
class Envelope:
    """Everything that crosses the wire, in both directions.

    The kind of a request says what the node should do ("describe", "run", "forget"). The kind of a
    reply is "ok", "error" (something broke), "refused" (the site's policy says no) or "unknown"
    (the node lacks a program or constant and needs it sent again); all but "ok" carry
    `meta["reason"]`. Bulk values are numpy arrays; typed PRNG keys are sent as their key data.
    """

    kind: str
    meta: dict[str, Meta]
    arrays: tuple[np.ndarray[Any, Any], ...] = ()

    @property
    def reason(self) -> str:
        """The reason why the node did not do as requested."""
        return str(self.meta.get("reason", ""))

    @property
    def bytes(self) -> int:
        """The total size of the arrays in bytes."""
        return sum(array.nbytes for array in self.arrays)


Enough = Callable[[dict[int, Envelope]], bool]  # takes the replies so far, by node


class Transport(Protocol):
    """An engine that carries envelopes to nodes and back. It must be thread-safe."""

    def nodes(self) -> list[int]:
        """Return the ids of the nodes that are connected now."""
        ...

    def exchange(
        self, requests: dict[int, Envelope], deadline: float, enough: Enough | None = None
    ) -> dict[int, Envelope]:
        """Send each node its request and wait at most `deadline` seconds for the replies.

        `enough` is called after each reply with the replies so far, in order of arrival; waiting
        ends when it returns True. A node that did not answer is missing from the result. Late and
        duplicate replies are never returned. A failure of the engine for one node is reported as
        `Envelope("error", {"reason": ...})`. The same request to many nodes is one object.
        """
        ...


Arrived = tuple[int, Envelope | None] | Exception  # the node and its reply; None: it never will


def collected(
    arriving: "queue.SimpleQueue[Arrived]",
    nodes: Collection[int],
    deadline: float,
    enough: Enough | None,
) -> dict[int, Envelope]:
    """Collect the replies of these nodes from a queue, with the semantics of `exchange`."""
    ends, waiting = time.monotonic() + deadline, set(nodes)
    replies: dict[int, Envelope] = {}
    while waiting:
        try:
            item = arriving.get(timeout=max(0.0, ends - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(item, Exception):
            raise item
        node, reply = item
        waiting.discard(node)
        if reply is not None:
            replies[node] = reply
            if enough is not None and enough(replies):
                break
    return replies


_engine: list[Callable[..., Transport]] = []


def install_engine(connect: Callable[..., Transport]) -> None:
    """Install the engine. Called once, by fedgrad.federation: the protocol imports no engine."""
    _engine[:] = [connect]


def connect(address: str, **how: Any) -> Transport:
    """Connect to the federation at an address through the installed engine."""
    return _engine[0](address, **how)
