"""What crosses the wire, and what an engine must offer to carry it."""

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

    A request's kind says what the node is to do ("describe", "run", "forget"); a reply's is "ok",
    "error" (something broke), "refused" (the site's policy says no) or "unknown" (the node has not
    got a program or a constant and wants it sent again), with `meta["reason"]`. Bulk values are
    numpy arrays; typed PRNG keys travel as their key data.
    """

    kind: str
    meta: dict[str, Meta]
    arrays: tuple[np.ndarray[Any, Any], ...] = ()

    @property
    def reason(self) -> str:
        """Why the node says no."""
        return str(self.meta.get("reason", ""))

    @property
    def bytes(self) -> int:
        """Of the arrays."""
        return sum(array.nbytes for array in self.arrays)


Enough = Callable[[dict[int, Envelope]], bool]  # of the replies so far, by node


class Transport(Protocol):
    """An engine that carries envelopes to nodes and back. Used by several threads at once."""

    def nodes(self) -> list[int]:
        """The ids of the nodes that are connected now."""
        ...

    def exchange(
        self, requests: dict[int, Envelope], deadline: float, enough: Enough | None = None
    ) -> dict[int, Envelope]:
        """Send each node its request and wait at most `deadline` seconds for the replies.

        `enough` is asked after each reply, with those that came so far in the order in which they
        came; when it says yes, waiting ends. A missing key is a node that did not answer. Late and
        duplicate replies are never returned. What fails in the engine for one node is an
        `Envelope("error", {"reason": ...})`. The same request to many nodes is one object.
        """
        ...


Arrived = tuple[int, Envelope | None] | Exception  # who answers, and what; None: never will


def collected(
    arriving: "queue.SimpleQueue[Arrived]",
    nodes: Collection[int],
    deadline: float,
    enough: Enough | None,
) -> dict[int, Envelope]:
    """The replies of these nodes out of a queue, as `exchange` gives them."""
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
    """Called once, by fedgrad.federation: the protocol does not know what carries it."""
    _engine[:] = [connect]


def connect(address: str, **how: Any) -> Transport:
    """The engine's way to the federation at an address."""
    return _engine[0](address, **how)
