"""A node at a SuperLink: it registers, says that it lives, and answers one message at a time."""

import threading
import time
from collections.abc import Callable
from typing import Any

from fedgrad.federation.flower import internals as flower
from fedgrad.federation.flower.connection import Connection, EngineError
from fedgrad.federation.flower.engine import DRIVEN, MESSAGE_TYPE, envelope, pauses, reply
from fedgrad.federation.flower.http import Denied, Heartbeat, Unreachable, call, client
from fedgrad.federation.flower.keys import new_key
from fedgrad.federation.flower.objects import Download, Post, TooLarge, announced, payload
from fedgrad.federation.protocol.envelope import Envelope

INTERVAL = 10.0
"""Flower's shortest: a node that dies is known to be gone after twice this many seconds."""
_LONGEST_PAUSE = 0.25


class Fleet:
    """One node's place at a SuperLink, from `join` to `leave`."""

    def __init__(self, connection: Connection, key: Any | None, most: int) -> None:
        """`key` is the node's private key; without one, it makes one for as long as it stays.
        Requests with more than `most` bytes are refused."""
        self._passing = key is None
        key = new_key() if key is None else key
        self._public = flower.public_key_to_bytes(key.public_key())
        # Where there is TLS, operators register the keys of nodes.
        self._registers_itself = self._passing or connection.plaintext
        self._most = most
        auth = flower.NodeAuthHttpInterceptor(key, key.public_key())
        self._api = client(flower.FleetHttpClient, connection, "fedgrad-node", [auth])
        self._node: Any = None
        self._heartbeat: Heartbeat | None = None

    def join(self) -> int:
        """Take the place; the node's id."""
        if self._registers_itself:
            self._register()
        place = flower.ActivateNodeRequest(public_key=self._public, heartbeat_interval=INTERVAL)
        self._node = flower.Node(node_id=call(self._api.ActivateNode, place).node_id)
        self._post = Post(self._api, self._node, self._most)
        beat = flower.SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=INTERVAL)
        self._heartbeat = Heartbeat(lambda: _alive(self._api, beat), INTERVAL / 3)
        return int(self._node.node_id)

    def serve(
        self,
        handle: Callable[[Envelope], Envelope],
        over: threading.Event,
        idle: Callable[[], None],
    ) -> None:
        """Answer messages until `over` is set or the SuperLink is lost (an `EngineError`)."""
        wait = pauses(_LONGEST_PAUSE)
        while not over.is_set():
            if self._heartbeat is not None and self._heartbeat.failure is not None:
                raise self._heartbeat.failure
            if (download := self._next()) is None:
                idle()
                over.wait(next(wait))
                continue
            wait = pauses(_LONGEST_PAUSE)
            try:
                self._answer(download, handle, over)
            except Denied:
                pass  # withdrawn, or its run is over: nobody waits for the answer

    def leave(self) -> None:
        """Give the place up."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        try:
            if self._node is not None:
                name = self._node.node_id
                call(self._api.DeactivateNode, flower.DeactivateNodeRequest(node_id=name))
                if self._passing:
                    gone = flower.UnregisterNodeFleetRequest(node_id=name)
                    call(self._api.UnregisterNode, gone)
        except EngineError:
            pass  # then the SuperLink finds out by itself
        self._api.close()

    def _register(self) -> None:
        try:
            call(self._api.RegisterNode, flower.RegisterNodeFleetRequest(public_key=self._public))
        except Denied as denied:
            if denied.code != flower.ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:  # by ourselves, before
                raise

    def _next(self) -> Download | None:
        answer = call(self._api.PullMessages, flower.PullMessagesRequest(node=self._node))
        if not answer.messages_list:
            return None
        return Download(self._post, answer.messages_list[0], answer.message_object_trees[0])

    def _answer(
        self, download: Download, handle: Callable[[Envelope], Envelope], over: threading.Event
    ) -> None:
        message, started = download.message, time.monotonic()
        try:
            if message.metadata.message_type != MESSAGE_TYPE:
                reason = f"This node serves fedgrad only, not {message.metadata.message_type}."
                self._push(flower.Message(flower.Error(0, reason), reply_to=message), 0.0)
                return
            try:
                for pause in pauses(_LONGEST_PAUSE):
                    if download.advance() is not None:
                        break
                    if over.wait(pause):
                        return
                answer = handle(envelope(message))
            except TooLarge as failure:
                answer = Envelope("refused", {"reason": str(failure)})
            self._push(reply(message, answer), time.monotonic() - started)
        finally:
            download.discard()

    def _push(self, answer: flower.Message, seconds: float) -> None:
        with flower.no_object_id_recompute():
            heads = announced([answer])
            request = flower.PushMessagesRequest(
                node=self._node, clientapp_runtime_list=[seconds], **heads
            )
            accepted = call(self._api.PushMessages, request)
            wanted = list(accepted.objects_to_push)
            if answer.metadata.group_id == DRIVEN:  # then nobody fetches more than this
                needed = payload(heads["message_object_trees"][0])
                wanted = [name for name in needed if name in wanted]
            self._post.upload(answer.metadata.run_id, accepted.session_id, [answer], wanted)


def _alive(api: Any, beat: Any) -> None:
    if not call(api.SendNodeHeartbeat, beat).success:
        raise Unreachable("The SuperLink does not know this node any more.")
