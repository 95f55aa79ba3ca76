"""Envelopes as Flower messages, and a transport on a Flower grid. Uses only Flower's public API."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from fedgrad.core.errors import needs
from fedgrad.federation.flower.connection import EngineError, located
from fedgrad.federation.protocol.envelope import Arrived, Enough, Envelope, collected
from fedgrad.federation.protocol.packing import MalformedEnvelope, pack, unpack

with needs("A real federation", "flower"):
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

MESSAGE_TYPE = "query.fedgrad"
"""What a node's app is asked for; everything else about a request is in its envelope."""

DRIVEN = "fedgrad"
"""The group of messages of a run that is driven by `flower_driver`, not by Flower's own grid."""

RECORD, FIELD = "fedgrad", "envelope"
_SERIALIZATION = "fedgrad.envelope"
_INLINE = 1 << 18
"""Bytes up to which an envelope is one field of a config record, which takes fewest requests; a
larger one is an array, which Flower moves in pieces (and ten times faster, if there are many)."""
_CLOCKS_DIFFER = 60.0
"""Seconds by which a message outlives its deadline, as the clocks of two machines may differ."""


class Grid(Protocol):
    """The part of Flower's grid interface that is used here."""

    def get_node_ids(self) -> Iterable[int]: ...
    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...
    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


def content(envelope: Envelope, salt: str = "") -> RecordDict:
    """Return the content of a Flower message that carries an envelope."""
    data = pack(envelope, salt)
    if len(data) <= _INLINE:
        return RecordDict({RECORD: ConfigRecord({FIELD: data})})
    array = Array("uint8", (len(data),), _SERIALIZATION, data)
    return RecordDict({RECORD: ArrayRecord({FIELD: array})})


def envelope(message: Message) -> Envelope:
    """Return the envelope of a Flower message; errors on the way become error envelopes."""
    if message.has_error():
        failure = message.error
        return Envelope("error", {"reason": f"Flower, code {failure.code}: {failure.reason}"})
    record = message.content.get(RECORD)
    data = record.get(FIELD) if isinstance(record, ConfigRecord | ArrayRecord) else None
    data = data.data if isinstance(data, Array) else data
    if not isinstance(data, bytes):
        return Envelope("error", {"reason": "The message is not one of fedgrad's."})
    try:
        return unpack(data)
    except MalformedEnvelope as failure:
        return Envelope("error", {"reason": str(failure)})


def reply(message: Message, answer: Envelope) -> Message:
    """Return the Flower message that answers another one."""
    # Equal answers of two nodes would share objects at the SuperLink, and one node could hold up
    # the other. The request's id as salt keeps them distinct.
    return Message(content(answer, salt=message.metadata.message_id), reply_to=message)


def _message(to: int, data: RecordDict, seconds: float) -> Message:
    return Message(data, dst_node_id=to, message_type=MESSAGE_TYPE, ttl=seconds)


def pauses(longest: float) -> Iterator[float]:
    """Yield the pauses between polls: short at first, then longer."""
    pause = 0.01
    while True:
        yield pause
        pause = min(1.3 * pause, longest)


class GridTransport:
    """A transport over a Flower grid, such as the one that a ServerApp is given."""

    def __init__(
        self,
        grid: Grid,
        message: Callable[[int, RecordDict, float], Message] = _message,
    ) -> None:
        """`message` creates the message for a node, a content and a lifetime in seconds."""
        self.grid = grid
        self._message = message

    def nodes(self) -> list[int]:
        """Return the ids of the nodes that are connected now."""
        with located():
            return sorted(self.grid.get_node_ids())

    def exchange(
        self, requests: dict[int, Envelope], deadline: float, enough: Enough | None = None
    ) -> dict[int, Envelope]:
        """Send each node its request; return the replies that arrive in time, or until `enough`."""
        if not requests:
            return {}
        arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        over = threading.Event()

        def carry() -> None:
            awaited: dict[str, int] = {}
            try:
                awaited = self._send(requests, deadline)
                for node in requests.keys() - awaited.values():
                    arrived.put((node, Envelope("error", {"reason": "There is no such node."})))
                for pause in pauses(0.1):
                    if not awaited or over.wait(pause):
                        break
                    for message in self.grid.pull_messages(list(awaited)):
                        request = message.metadata.reply_to_message_id
                        if request in awaited:  # otherwise a duplicate, or not ours
                            arrived.put((awaited.pop(request), envelope(message)))
                self._tidy(awaited)
            except EngineError as failure:
                arrived.put(failure)
            except Exception as failure:
                arrived.put(EngineError(f"Flower failed: {failure!r}."))

        # In a thread, because a grid has no deadlines and waits long for incomplete replies.
        threading.Thread(target=carry, name="fedgrad-exchange", daemon=True).start()
        try:
            with located():
                return collected(arrived, requests, deadline, enough)
        finally:
            over.set()

    def _tidy(self, unanswered: Iterable[str]) -> None:
        """Clean up after an exchange; Flower's public API offers nothing for that."""

    def _send(self, requests: dict[int, Envelope], deadline: float) -> dict[str, int]:
        """Push all requests; return the node of each message by the message's id."""
        contents: dict[int, RecordDict] = {}
        for request in requests.values():
            if id(request) not in contents:  # the same request to many is packed once
                contents[id(request)] = content(request)
        messages = [
            self._message(node, contents[id(request)], deadline + _CLOCKS_DIFFER)
            for node, request in requests.items()
        ]
        ids = list(self.grid.push_messages(messages))
        return {name: node for name, node in zip(ids, requests, strict=True) if name}
