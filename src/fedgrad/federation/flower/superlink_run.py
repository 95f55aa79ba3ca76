"""A run at a SuperLink that this process drives: sends messages and receives replies."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from fedgrad.federation.flower import internals as flower
from fedgrad.federation.flower.connection import EngineError
from fedgrad.federation.flower.engine import DRIVEN, MESSAGE_TYPE
from fedgrad.federation.flower.http import Denied, call
from fedgrad.federation.flower.objects import Download, Post, TooLarge, announced

_LATE = 3600.0  # seconds after which late replies are no longer looked for


class RunGrid:
    """The grid of a run that this process drives. Unlike Flower's own, it never blocks for long."""

    def __init__(self, api: Any, run: int, known: set[bytes] | None, most: int) -> None:
        self.run = run
        self._api = api
        self._known = known
        self._post = Post(api, flower.Node(node_id=flower.SUPERLINK_NODE_ID), most)
        self._arriving: dict[str, Download] = {}
        self._received: list[Download] = []
        self._abandoned: dict[str, float] = {}

    def get_node_ids(self) -> list[int]:
        """Return the connected nodes, restricted to known keys if any were given."""
        nodes = _ask(self._api.GetNodes, flower.GetNodesRequest()).nodes
        return [n.node_id for n in nodes if self._known is None or n.public_key in self._known]

    def message(self, to: int, data: flower.RecordDict, seconds: float) -> flower.Message:
        """Create a message of this run. (Flower's constructor supports one run per process.)"""
        metadata = flower.Metadata(
            run_id=self.run,
            message_id="",
            src_node_id=flower.SUPERLINK_NODE_ID,
            dst_node_id=to,
            reply_to_message_id="",
            group_id=DRIVEN,
            created_at=flower.now().timestamp(),
            ttl=seconds,
            message_type=MESSAGE_TYPE,
        )
        return flower.make_message(metadata, data)

    def push_messages(self, messages: Iterable[flower.Message]) -> list[str]:
        """Send messages; return their ids, empty where the node does not exist."""
        messages = list(messages)
        with flower.no_object_id_recompute():
            request = flower.PushAppMessagesRequest(**announced(messages))
            answer = _ask(self._api.PushMessages, request)
            # Nodes can begin with the objects of the envelope, which lead each message's list.
            wanted = list(answer.objects_to_push)
            self._post.upload(self.run, answer.session_id, messages, wanted)
        return list(answer.message_ids)

    def pull_messages(self, message_ids: Iterable[str]) -> list[flower.Message]:
        """Return the replies that are complete, and fetch the available parts of the others."""
        ids = list(message_ids)
        waiting = [name for name in ids if name not in self._arriving]
        self._arriving |= {reply.answers: reply for reply in self._announced(waiting)}
        complete = []
        for name in ids:
            if (reply := self._arriving.get(name)) and (message := _advanced(reply)):
                self._received.append(self._arriving.pop(name))
                complete.append(message)
        return complete

    def tidy(self, unanswered: Iterable[str]) -> None:
        """Let the SuperLink forget what has been received, and withdraw unanswered requests: a node
        that has not started on one no longer gets it."""
        received, self._received = self._received, []
        for reply in received:
            reply.discard()
        for name in unanswered:
            if half := self._arriving.pop(name, None):
                half.discard()
            self._post.discard(self.run, name)
            self._abandoned[name] = time.monotonic() + _LATE

    def finish(self) -> None:
        """End the run."""
        ended = flower.PushTaskOutputRequest(sub_status=flower.SubStatus.COMPLETED, details="")
        try:
            call(self._api.PushTaskOutput, ended)
        except EngineError:
            pass  # the SuperLink is gone, and the run with it
        self._api.close()

    def keep_alive(self) -> None:
        """Tell the SuperLink that the run is alive, and discard replies that came too late."""
        call(self._api.SendTaskHeartbeat, flower.SendTaskHeartbeatRequest())
        for reply in self._announced(list(self._abandoned)):
            self._abandoned.pop(reply.answers, None)
            reply.discard()
        for name in [n for n, until in list(self._abandoned.items()) if until < time.monotonic()]:
            self._abandoned.pop(name, None)

    def _announced(self, ids: list[str]) -> list[Download]:
        if not ids:
            return []
        answer = _ask(self._api.PullMessages, flower.PullAppMessagesRequest(message_ids=ids))
        pairs = zip(answer.messages_list, answer.message_object_trees, strict=True)
        return [Download(self._post, message, tree) for message, tree in pairs]


def _advanced(reply: Download) -> flower.Message | None:
    """Return the reply once it is complete, or an error message if it never will be."""
    try:
        return reply.advance()
    except (Denied, TooLarge) as failure:
        error = flower.Error(0, str(failure))
        return flower.make_message(reply.message.metadata, error=error)


def _ask(method: Callable[[Any], Any], request: object) -> Any:
    try:
        return call(method, request)
    except Denied as denied:
        if denied.code != flower.ApiErrorCode.RUNTIME_AUTHENTICATION_FAILED:
            raise
        raise Denied(
            "The run is over: somebody stopped it, or the SuperLink had not heard of this process "
            "for a minute. Connect again."
        ) from None
