"""The user's own process as the server of a Flower run: a script or a notebook, on any machine.

Flower normally starts server code itself, from an app that was uploaded to it. Here the process
creates a run for an empty app, claims the run's task as Flower's own launcher would, and then sends
and receives messages as the server of that run, until it closes the run or exits.
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
_HEARTBEAT = 5.0  # Flower gives up a run after 60 s without one

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

    Args:
        superlink: The address of the SuperLink, as host:port.
        root_certificates: The PEM file of the authorities to trust.
        secret: The file given to the SuperLink as --superexec-auth-secret-file, if it has one.
        node_keys: The public keys of the nodes to work with; other nodes are ignored.
        maximum_bytes: The largest reply that is accepted; a larger one is an error.
        insecure: Whether to use plaintext even to another machine.

    Returns:
        The transport of the new run.

    See docs/operating-a-federation.md for `secret` and `node_keys`.
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
    """Create a run and claim its task. Return the run's id and the token of its server."""
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
                # This may be the run of another driver that is connecting now, which then gets
                # ours. A run that is not a driver's returns to the queue when nobody starts it.
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
    """Return the app as Flower packs it: a zip with a list of its files, always the same bytes."""
    listed = [f"{n},{hashlib.sha256(c).hexdigest()},{8 * len(c)}" for n, c in _APP.items()]
    files = {**_APP, ".info/CONTENT": "\n".join(listed).encode()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, content in files.items():
            bundle.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


class FlowerTransport(GridTransport):
    """The transport of a run that this process drives. Close it, or use it as a context manager."""

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
        """End the run. Values that nodes keep for it expire there."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finish(grid: RunGrid, heartbeat: Heartbeat) -> None:
    heartbeat.stop()
    grid.finish()
