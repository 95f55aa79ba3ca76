"""A user's own process as the server of a Flower run: a script or a notebook, on any machine.

Flower starts server code itself, from an app that was uploaded to it. Here the process creates a
run for an app with nothing in it, claims the run's task as Flower's own launcher would, and then
sends and receives messages as the server of that run, until it closes the run or ends.
"""

import hashlib
import io
import time
import weakref
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from fedgrad.federation import flower_internals as flower
from fedgrad.federation.certificates import public_key
from fedgrad.federation.connection import Connection, EngineError, secured
from fedgrad.federation.flower_engine import DRIVEN, MESSAGE_TYPE, GridTransport
from fedgrad.federation.flower_http import Denied, Heartbeat, call, client, located
from fedgrad.federation.flower_objects import Download, TooLarge, discard, upload

_ATTEMPTS = 5
_LATE = 3600.0  # seconds after which a late reply is not looked for any more
_HEARTBEAT = 5.0  # Flower gives a run up after 60 s without one

_APP = {
    "pyproject.toml": b"""
[project]
name = "fedgrad-driver"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedgrad"
[tool.flwr.app.components]
serverapp = "driver:server"
clientapp = "driver:client"
[tool.flwr.app.config]
""",
    "driver.py": b'''"""An app with nothing in it: the run it stands for is driven from outside."""
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client, server = ClientApp(), ServerApp()


@server.main()
def main(grid, context):
    pass
''',
}


def connect(
    superlink: str,
    root_certificates: str | Path | None = None,
    *,
    secret: str | Path | None = None,
    node_keys: Sequence[str | Path] | None = None,
    maximum_bytes: int = 2**32,
    insecure: bool = False,
) -> "FlowerTransport":
    """Become the server of a new run at a SuperLink.

    `secret` is the file given to the SuperLink as --superexec-auth-secret-file, if it has one.
    `node_keys` are the public keys of the nodes to work with; the others are as if they were not
    there. See docs/operating-a-federation.md for both. A reply with more than `maximum_bytes` is an
    error.
    """
    connection = secured(superlink, root_certificates, insecure=insecure)
    known = None if node_keys is None else {public_key(path) for path in node_keys}
    with located():
        run, token = _claim(connection, None if secret is None else Path(secret).read_bytes())
        identity = flower.RuntimeTokenHttpInterceptor(token=token)
        api = client(flower.RuntimeHttpClient, connection, "fedgrad", [identity])
        call(api.PullTaskInput, flower.PullTaskInputRequest())
    return FlowerTransport(RunGrid(api, run, known, maximum_bytes))


def _claim(connection: Connection, secret: bytes | None) -> tuple[int, str]:
    """Create a run and take its task: the run's id, and the token that makes us its server."""
    bundle = _bundle()
    digest = hashlib.sha256(bundle).hexdigest()
    signed = []
    if secret is not None:
        methods = {"/flwr.proto.Runtime/AcquireTask"}
        signed.append(
            flower.SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)
        )
    ask = flower.AcquireTaskRequest(supported_task_types=[flower.TaskType.SERVER_APP])
    with (
        client(flower.ControlHttpClient, connection, "fedgrad") as control,
        client(flower.RuntimeHttpClient, connection, "fedgrad", signed) as runtime,
    ):
        for _ in range(_ATTEMPTS):
            call(control.StartRun, flower.StartRunRequest(fab=flower.Fab(content=bundle)))
            while (claimed := call(runtime.AcquireTask, ask)).HasField("task"):
                # It may be the run of another driver that connects now, who then gets ours. What is
                # no driver's run goes back to the queue when nobody starts it.
                if claimed.task.fab_hash == digest:
                    return claimed.task.run_id, claimed.token
    raise EngineError(
        "Flower's own launcher took every run that was created here. Start the SuperLink with "
        "--isolation process, or run the program as a Flower app (flwr run)."
    )


def _bundle() -> bytes:
    """The app as Flower packs apps: a zip with a list of its files, always the same bytes."""
    listed = [f"{n},{hashlib.sha256(c).hexdigest()},{8 * len(c)}" for n, c in _APP.items()]
    files = {**_APP, ".info/CONTENT": "\n".join(listed).encode()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, content in files.items():
            bundle.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


class RunGrid:
    """The grid of a run that this process drives; unlike Flower's own, it never waits long."""

    def __init__(self, api: Any, run: int, known: set[bytes] | None, most: int) -> None:
        self.run = run
        self._api = api
        self._known, self._most = known, most
        self._node = flower.Node(node_id=flower.SUPERLINK_NODE_ID)
        self._arriving: dict[str, Download] = {}
        self._received: list[Download] = []
        self._abandoned: dict[str, float] = {}

    def get_node_ids(self) -> list[int]:
        """The nodes that are connected, and known if only known ones will do."""
        nodes = call(self._api.GetNodes, flower.GetNodesRequest()).nodes
        return [n.node_id for n in nodes if self._known is None or n.public_key in self._known]

    def message(self, to: int, data: flower.RecordDict, seconds: float) -> flower.Message:
        """A message of this run. (Flower's constructor knows one run per process.)"""
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
        """Send messages; their ids, empty for a node that there is not."""
        messages = list(messages)
        with flower.no_object_id_recompute():
            for message in messages:
                message.metadata.__dict__["_message_id"] = message.object_id
            bare = [flower.remove_content_from_message(message) for message in messages]
            request = flower.PushAppMessagesRequest(
                messages_list=[flower.message_to_proto(message) for message in bare],
                message_object_trees=[flower.get_object_tree(message) for message in messages],
            )
            answer = call(self._api.PushMessages, request)
            # Nodes can begin with what holds the envelope; it leads the list of each message.
            wanted = list(answer.objects_to_push)
            upload(self._api, self._node, self.run, answer.session_id, messages, wanted)
        return list(answer.message_ids)

    def pull_messages(self, message_ids: Iterable[str]) -> list[flower.Message]:
        """The replies that are here in full; what is on its way is fetched as far as it is."""
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
        """Let the SuperLink forget what has been received, and withdraw requests: a node that has
        not begun with one will not get it any more."""
        while self._received:
            self._received.pop().discard()
        for name in unanswered:
            if reply := self._arriving.pop(name, None):
                reply.discard()
            discard(self._api, self._node, self.run, name)
            self._abandoned[name] = time.monotonic() + _LATE

    def keep_alive(self) -> None:
        """Tell the SuperLink that the run goes on, and throw away what came too late."""
        call(self._api.SendTaskHeartbeat, flower.SendTaskHeartbeatRequest())
        for reply in self._announced(list(self._abandoned)):
            self._abandoned.pop(reply.answers, None)
            reply.discard()
        for name in [n for n, until in list(self._abandoned.items()) if until < time.monotonic()]:
            self._abandoned.pop(name, None)

    def _announced(self, ids: list[str]) -> list[Download]:
        if not ids:
            return []
        answer = call(self._api.PullMessages, flower.PullAppMessagesRequest(message_ids=ids))
        pairs = zip(answer.messages_list, answer.message_object_trees, strict=True)
        return [Download(self._api, self._node, self.run, m, tree, self._most) for m, tree in pairs]


def _advanced(reply: Download) -> flower.Message | None:
    """The reply if it is complete; one that says what is wrong with it if it never will be."""
    try:
        return reply.advance()
    except (Denied, TooLarge) as failure:
        error = flower.Error(0, str(failure))
        return flower.make_message(reply.message.metadata, error=error)


class FlowerTransport(GridTransport):
    """The transport of a run that this process drives. Close it, or use it in a `with`."""

    def __init__(self, grid: RunGrid) -> None:
        super().__init__(grid, grid.message)
        self._run = grid
        self._heartbeat = Heartbeat(grid.keep_alive, _HEARTBEAT)
        self._end = weakref.finalize(self, _finish, grid, self._heartbeat)

    def nodes(self) -> list[int]:
        """The ids of the nodes that are connected now."""
        with located():
            return super().nodes()

    def _tidy(self, unanswered: Iterable[str]) -> None:
        self._run.tidy(unanswered)

    def close(self) -> None:
        """End the run. What the nodes remember of it expires there."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finish(grid: RunGrid, heartbeat: Heartbeat) -> None:
    heartbeat.stop()
    request = flower.PushTaskOutputRequest(sub_status=flower.SubStatus.COMPLETED, details="")
    try:
        call(grid._api.PushTaskOutput, request)
    except EngineError:
        pass  # the SuperLink is gone, and the run with it
    grid._api.close()
