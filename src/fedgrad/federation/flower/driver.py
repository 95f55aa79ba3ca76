"""A user's own process as the server of a Flower run: a script or a notebook, on any machine.

Flower starts server code itself, from an app that was uploaded to it. Here the process creates a
run for an app with nothing in it, claims the run's task as Flower's own launcher would, and then
sends and receives messages as the server of that run, until it closes the run or ends.
"""

import hashlib
import io
import weakref
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from fedgrad.federation.flower import internals as flower
from fedgrad.federation.flower.connection import Connection, EngineError, located, read, secured
from fedgrad.federation.flower.engine import GridTransport
from fedgrad.federation.flower.http import Denied, Heartbeat, call, client
from fedgrad.federation.flower.keys import public_key
from fedgrad.federation.flower.superlink_run import RunGrid

_ATTEMPTS = 5
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
        run, token = _claim(connection, None if secret is None else read(secret, "secret"))
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
            while (claimed := _acquired(runtime, ask)).HasField("task"):
                # It may be the run of another driver that connects now, who then gets ours. What is
                # no driver's run goes back to the queue when nobody starts it.
                if claimed.task.fab_hash == digest:
                    return claimed.task.run_id, claimed.token
    raise EngineError(
        "Flower's own launcher took every run that was created here. Start the SuperLink with "
        "--isolation process, or run the program as a Flower app (flwr run)."
    )


def _acquired(runtime: flower.RuntimeHttpClient, ask: Any) -> Any:
    try:
        return call(runtime.AcquireTask, ask)
    except Denied as denied:
        if denied.code != flower.ApiErrorCode.RUNTIME_AUTHENTICATION_FAILED:
            raise
        raise Denied(f"{denied}. Has it a secret? Then give the same: secret=FILE.") from None


def _bundle() -> bytes:
    """The app as Flower packs apps: a zip with a list of its files, always the same bytes."""
    listed = [f"{n},{hashlib.sha256(c).hexdigest()},{8 * len(c)}" for n, c in _APP.items()]
    files = {**_APP, ".info/CONTENT": "\n".join(listed).encode()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, content in files.items():
            bundle.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


class FlowerTransport(GridTransport):
    """The transport of a run that this process drives. Close it, or use it in a `with`."""

    def __init__(self, grid: RunGrid) -> None:
        super().__init__(grid, grid.message)
        self._run = grid
        self._heartbeat = Heartbeat(grid.keep_alive, _HEARTBEAT)
        self._end = weakref.finalize(self, _finish, grid, self._heartbeat)

    @property
    def run(self) -> int:
        """The id of the run, as `flwr ls` shows it."""
        return self._run.run

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
    grid.finish()
