"""The objects that Flower makes of a message, on their way to and from a SuperLink."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedgrad.federation.flower import internals as flower
from fedgrad.federation.flower.connection import EngineError
from fedgrad.federation.flower.engine import FIELD, MESSAGE_TYPE, RECORD
from fedgrad.federation.flower.http import Denied, call

_OVERHEAD = 1 << 16  # of a message's bytes over those of its arrays


class TooLarge(EngineError):
    """A message has more bytes than are allowed here."""


def announced(messages: Sequence[flower.Message]) -> dict[str, list[Any]]:
    """What a request says of messages whose content follows: of each, its head and its objects."""
    for message in messages:
        message.metadata.__dict__["_message_id"] = message.object_id
    bare = [flower.remove_content_from_message(message) for message in messages]
    return {
        "messages_list": [flower.message_to_proto(message) for message in bare],
        "message_object_trees": [flower.get_object_tree(message) for message in messages],
    }


@dataclass(frozen=True)
class Post:
    """How a node, or the driver of a run, moves objects: by its API of the SuperLink."""

    api: Any  # has PushObject, PullObject and ConfirmMessageReceived
    node: Any
    most: int  # bytes of content that are fetched of a message

    def upload(
        self, run: int, session: str, messages: Iterable[flower.Message], wanted: Iterable[str]
    ) -> None:
        """Push those objects of the messages that the SuperLink wants."""
        objects: dict[str, Any] = {}
        for message in messages:
            objects.update(flower.get_all_nested_objects(message))
        for name in wanted:
            content = {"object_id": name, "object_content": objects[name].deflate()}
            request = flower.PushObjectRequest(
                node=self.node, run_id=run, session_id=session, **content
            )
            # Not stored means that the receiver has what it needs already, or that time is over.
            call(self.api.PushObject, request)

    def pull(self, run: int, name: str) -> Any:
        """An object, as far as it is there."""
        request = flower.PullObjectRequest(node=self.node, run_id=run, object_id=name)
        return call(self.api.PullObject, request)

    def discard(self, run: int, name: str) -> None:
        """Let the SuperLink forget the objects of a message, received or not."""
        request = flower.ConfirmMessageReceivedRequest(
            node=self.node, run_id=run, message_object_id=name
        )
        call(self.api.ConfirmMessageReceived, request)


def payload(tree: Any) -> list[str]:
    """The objects of a message that hold the envelope, all that a receiver of ours fetches: the one
    record of its content, or the one array of that and its pieces."""
    record = _only(_only(tree))
    if not record.children:
        return [record.object_id]
    array = _only(record)
    return [array.object_id, *(chunk.object_id for chunk in array.children)]


def _only(tree: Any) -> Any:
    if len(tree.children) != 1:
        raise Denied("The message is not one of fedgrad's.")
    return tree.children[0]


class Download:
    """A message that is announced, and whose content comes as its sender uploads it."""

    def __init__(self, post: Post, proto: Any, tree: Any) -> None:
        self.message = flower.message_from_proto(proto)
        self._post, self._run = post, self.message.metadata.run_id
        ours = not self.message.has_error() and self.message.metadata.message_type == MESSAGE_TYPE
        self._names = payload(tree) if ours else []
        self._contents: dict[str, bytes] = {}

    @property
    def answers(self) -> str:
        """The id of the message to which this one replies."""
        return str(self.message.metadata.reply_to_message_id)

    def advance(self) -> flower.Message | None:
        """Fetch what is there; the message once it is complete. Never waits for the sender."""
        for name in self._names[len(self._contents) :]:
            answer = self._post.pull(self._run, name)
            if not answer.object_found:
                raise Denied("Part of a message is gone: it was withdrawn, or expired.")
            if not answer.object_available:
                return None
            self._contents[name] = answer.object_content
            if sum(map(len, self._contents.values())) > self._post.most + _OVERHEAD:
                raise TooLarge(f"The message has more than {self._post.most} bytes.")
        if self._names:
            self.message.content = flower.RecordDict({RECORD: self._record()})
        return self.message

    def _record(self) -> flower.ConfigRecord | flower.ArrayRecord:
        first, *chunks = self._names
        if not chunks:
            return flower.ConfigRecord.inflate(self._contents[first])
        pieces: dict[str, flower.InflatableObject] = {
            name: flower.ArrayChunk.inflate(self._contents.pop(name)) for name in chunks
        }
        return flower.ArrayRecord({FIELD: flower.Array.inflate(self._contents[first], pieces)})

    def discard(self) -> None:
        """Let the SuperLink forget the message's objects. To be called at the end in any case."""
        self._post.discard(self._run, self.message.metadata.message_id)
