"""The objects that Flower splits a message into, on their way to and from a SuperLink."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedgrad.federation.flower import internals as flower
from fedgrad.federation.flower.connection import EngineError
from fedgrad.federation.flower.engine import FIELD, MESSAGE_TYPE, RECORD
from fedgrad.federation.flower.http import Denied, call

_OVERHEAD = 1 << 16  # bytes of a message beyond those of its arrays


class TooLarge(EngineError):
    """A message has more bytes than are allowed here."""


def announced(messages: Sequence[flower.Message]) -> dict[str, list[Any]]:
    """Return the request fields that announce messages: the head and object tree of each."""
    for message in messages:
        message.metadata.__dict__["_message_id"] = message.object_id
    bare = [flower.remove_content_from_message(message) for message in messages]
    return {
        "messages_list": [flower.message_to_proto(message) for message in bare],
        "message_object_trees": [flower.get_object_tree(message) for message in messages],
    }


@dataclass(frozen=True)
class Post:
    """Transfer of objects for a node, or the driver of a run, through its API of the SuperLink."""

    api: Any  # has PushObject, PullObject and ConfirmMessageReceived
    node: Any
    most: int  # bytes of content to fetch of a message, at most

    def upload(
        self, run: int, session: str, messages: Iterable[flower.Message], wanted: Iterable[str]
    ) -> None:
        """Push the objects of the messages that the SuperLink requests."""
        objects: dict[str, Any] = {}
        for message in messages:
            objects.update(flower.get_all_nested_objects(message))
        for name in wanted:
            content = {"object_id": name, "object_content": objects[name].deflate()}
            request = flower.PushObjectRequest(
                node=self.node, run_id=run, session_id=session, **content
            )
            # "Not stored" means that the receiver already has what it needs, or that time is up.
            call(self.api.PushObject, request)

    def pull(self, run: int, name: str) -> Any:
        """Return an object, if it is available."""
        request = flower.PullObjectRequest(node=self.node, run_id=run, object_id=name)
        return call(self.api.PullObject, request)

    def discard(self, run: int, name: str) -> None:
        """Let the SuperLink forget the objects of a message, received or not."""
        request = flower.ConfirmMessageReceivedRequest(
            node=self.node, run_id=run, message_object_id=name
        )
        call(self.api.ConfirmMessageReceived, request)


def payload(tree: Any) -> list[str]:
    """Return the objects of a message that hold the envelope, the only ones that our receivers
    fetch: the single record of its content, or that record's single array and its chunks."""
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
    """An announced message, whose content arrives as its sender uploads it."""

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
        """Fetch what is available; return the message once complete. Never waits for the sender."""
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
        """Let the SuperLink forget the message's objects. Always call this at the end."""
        self._post.discard(self._run, self.message.metadata.message_id)
