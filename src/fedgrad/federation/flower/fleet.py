"""A node at a SuperLink: it registers, sends heartbeats, and answers one message at a time.

A site runs one long-lived process per node, with JAX warm and the data loaded.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from fedgrad.federation.flower import internals as flower
from fedgrad.federation.flower.connection import Connection, EngineError
from fedgrad.federation.flower.engine import DRIVEN, MESSAGE_TYPE, envelope, pauses, reply
from fedgrad.federation.flower.http import Denied, Heartbeat, Unreachable, call, client
from fedgrad.federation.flower.keys import new_key, private_key
from fedgrad.federation.flower.objects import Download, Post, TooLarge, announced, payload
from fedgrad.federation.protocol.envelope import Envelope
from fedgrad.federation.protocol.node import Node

log = logging.getLogger("fedgrad.node")

INTERVAL = 10.0
"""Flower's shortest: a node that dies is known to be gone after twice this many seconds."""
_LONGEST_PAUSE = 0.25
_PATIENCE = 60.0
"""Seconds for which a SuperLink may be out of reach, or a place taken, before the first success."""


def serve(
    node: Node,
    connection: Connection,
    key: str | Path | None,
    over: threading.Event,
    patience: float = _PATIENCE,
) -> None:
    """Answer requests until `over` is set. Reconnect if the SuperLink goes away.

    Args:
        node: The node that answers.
        connection: The connection to the SuperLink.
        key: The node's private key, which identifies it across restarts and whose public half the
            operator registered. Without one, the node creates and registers a key itself, which
            a SuperLink with node keys refuses.
        over: The event that ends the node.
        patience: Seconds to wait for the first connection.
    """
    secret = None if key is None else private_key(key)
    first, begun, trouble = True, time.monotonic(), ""
    while not over.is_set():
        fleet = Fleet(connection, secret, node.policy.maximum_bytes)
        try:
            name = fleet.join()
            log.info("node %d is at %s", name, connection.address)
            first, trouble = False, ""
            fleet.serve(node.handle, over, node.memory.expire)
        except EngineError as failure:
            denied = isinstance(failure, Denied) and not failure.temporary
            if first and (denied or time.monotonic() - begun > patience):
                raise
            if str(failure) != trouble:
                trouble = str(failure)
                log.warning("%s Trying again.", trouble)
            over.wait(1.0)
        finally:
            fleet.leave()


def warm(node: Node) -> None:
    """Load the data and start JAX before the first request, so that mistakes fail fast."""
    parts = node.data.parts
    jnp.zeros(1).block_until_ready()
    log.info("data loaded%s, on %s", f": {', '.join(parts)}" if parts else "", node.platform)


class Fleet:
    """The place of one node at a SuperLink, from `join` to `leave`."""

    def __init__(self, connection: Connection, key: Any | None, most: int) -> None:
        """`key` is the node's private key; None creates one for the duration of the stay. Requests
        with more than `most` bytes are refused."""
        self._passing = key is None
        key = new_key() if key is None else key
        self._public = flower.public_key_to_bytes(key.public_key())
        # With TLS, operators register the keys of nodes.
        self._registers_itself = self._passing or connection.plaintext
        self._most = most
        auth = flower.NodeAuthHttpInterceptor(key, key.public_key())
        self._api = client(flower.FleetHttpClient, connection, "fedgrad-node", [auth])
        self._node: Any = None
        self._heartbeat: Heartbeat | None = None

    def join(self) -> int:
        """Take the place; return the node's id."""
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
        """Give up the place."""
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
            pass  # the SuperLink will notice by itself
        self._api.close()

    def _register(self) -> None:
        try:
            call(self._api.RegisterNode, flower.RegisterNodeFleetRequest(public_key=self._public))
        except Denied as denied:
            if denied.code != flower.ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:  # by us, earlier
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
            if answer.metadata.group_id == DRIVEN:  # the driver fetches nothing else
                needed = payload(heads["message_object_trees"][0])
                wanted = [name for name in needed if name in wanted]
            self._post.upload(answer.metadata.run_id, accepted.session_id, [answer], wanted)


def _alive(api: Any, beat: Any) -> None:
    if not call(api.SendNodeHeartbeat, beat).success:
        raise Unreachable("The SuperLink does not know this node any more.")
