"""A trial federation on this machine: a SuperLink and nodes, each started and ended by its pid."""

import dataclasses
import json
import os
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgrad.core.errors import ArgumentError
from fedgrad.federation.flower.connection import EngineError, secured
from fedgrad.federation.flower.keys import public_key
from fedgrad.federation.operate.certificates import make_certificates, make_node_key
from fedgrad.federation.operate.started_processes import Process, start, stop

_STATE = "federation.json"
_SCRIPTS = sysconfig.get_path("scripts")  # Flower's commands, which also look for each other here
_PATIENCE = 90.0
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
"""Flower's commands neither call home nor look for updates."""


@dataclass(frozen=True)
class LocalFederation:
    """A SuperLink and nodes on this machine, and the folder with their logs and keys."""

    folder: Path
    address: str
    secure: bool
    processes: tuple[Process, ...] = ()

    @property
    def keys(self) -> Path:
        """The folder of certificates and keys, if secure."""
        return self.folder / "keys"

    @property
    def root_certificates(self) -> Path | None:
        """The certificates to trust; None with plaintext."""
        return self.keys / "authority.crt" if self.secure else None

    @property
    def credentials(self) -> dict[str, Any]:
        """Arguments of `connect` and `fg.executors.flower` besides the address."""
        if not self.secure:
            return {}
        return {
            "root_certificates": str(self.root_certificates),
            "secret": str(self.keys / "secret"),
            "node_keys": [str(path) for path in sorted(self.keys.glob("node-*.pub"))],
        }

    @property
    def nodes(self) -> list[Process]:
        """The processes of the nodes."""
        return [process for process in self.processes if process.role.startswith("node")]


def up(
    folder: str | Path,
    data: str,
    nodes: int = 3,
    *,
    policy: str | Path | None = None,
    secure: bool = False,
    stock: bool = False,
    port: int | None = None,
    config: Sequence[str] = (),
) -> LocalFederation:
    """Start a SuperLink and nodes, and wait until all are connected.

    Args:
        folder: The folder for logs, keys and state.
        data: The data function, as module:function. The context of each node has `partition-id`
            and `num-partitions`, and the entries of `config`.
        nodes: The number of nodes.
        policy: The policy file of the nodes; without one they run every program.
        secure: Whether to create keys and use TLS.
        stock: Whether to start Flower's own nodes (for `flwr run`).
        port: The port of the SuperLink; a free one by default.
        config: Further entries of the contexts, as key=value.

    Returns:
        The running federation.

    Raises:
        ArgumentError: If a federation of this folder is up, or both `secure` and `stock` are set.
        EngineError: If a process ends, or not all nodes connect in time.
    """
    folder = Path(folder).absolute()
    if (known := read(folder)) is not None and any(p.alive for p in known.processes):
        raise ArgumentError.here(f"A federation of {folder} is up already. End it first: down.")
    if secure and stock:
        raise ArgumentError.here("A local federation is secure or stock, not both.")
    folder.mkdir(parents=True, exist_ok=True)
    federation = LocalFederation(folder, f"127.0.0.1:{port or free_port()}", secure)
    if policy is None:
        policy = folder / "policy.toml"
        policy.write_text("# For trying out, on data that are nobody's.\nanything = true\n")
    _introduce(federation)
    try:
        federation = _superlink(federation, nodes, stock)
        for i in range(nodes):
            settings = [f"partition-id={i}", f"num-partitions={nodes}", *config]
            federation = _node(federation, i, data, Path(policy).absolute(), settings, stock)
        _wait(federation, nodes)
    except BaseException:
        down(folder)
        raise
    return federation


def down(folder: str | Path) -> int:
    """End exactly the processes that `up` started for this folder; return how many were running.

    Logs and keys stay.
    """
    folder = Path(folder).absolute()
    federation = read(folder)
    if federation is None:
        return 0
    running = [process for process in federation.processes if process.alive]
    stop([process for process in running if process.role != "superlink"])  # let nodes sign off
    stop(running)
    (folder / _STATE).unlink()
    return len(running)


def read(folder: str | Path) -> LocalFederation | None:
    """Return the federation that was started for a folder, running or not; None without one."""
    try:
        state = json.loads((Path(folder) / _STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    processes = tuple(Process(**process) for process in state.pop("processes"))
    return LocalFederation(Path(state.pop("folder")), processes=processes, **state)


@contextmanager
def local_federation(folder: str | Path, data: str, nodes: int = 3, **how: Any) -> Iterator[Any]:
    """Context manager: call `up`, and `down` at the end of the block."""
    federation = up(folder, data, nodes, **how)
    try:
        yield federation
    finally:
        down(folder)


def add_node(federation: LocalFederation, index: int, data: str) -> LocalFederation:
    """Start an additional node, or restart one that ended."""
    policy = federation.folder / "policy.toml"
    return _node(federation, index, data, policy, [f"partition-id={index}"], False)


def free_port() -> int:
    """Return a loopback port on which nothing is listening now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _introduce(federation: LocalFederation) -> None:
    """Register the SuperLink as "local" for the `flwr` command with FLWR_HOME at <folder>/flwr."""
    home = federation.folder / "flwr"
    home.mkdir(exist_ok=True)
    certificates = f'root-certificates = "{federation.root_certificates}"'
    security = certificates if federation.secure else "insecure = true"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "{federation.address}"\n'
        f"{security}\n",
        encoding="utf-8",
    )


def _superlink(federation: LocalFederation, nodes: int, stock: bool) -> LocalFederation:
    host, _, port = federation.address.rpartition(":")
    command = [_command("flower-superlink"), "--host", host, "--port", port]
    command += ["--disable-runtime-dependency-installation"]
    if not stock:
        command += ["--isolation", "process"]  # server code runs in the user's own process
    if not federation.secure:
        return _started(federation, "superlink", [*command, "--insecure"])
    from fedgrad.federation.flower.control_api import register

    keys = federation.keys
    if not (keys / "authority.key").exists():
        make_certificates(keys, nodes=nodes)
    command += ["--ssl-ca-certfile", str(keys / "authority.crt")]
    command += ["--ssl-certfile", str(keys / "superlink.crt")]
    command += ["--ssl-keyfile", str(keys / "superlink.key")]
    command += ["--enable-supernode-auth", "--superexec-auth-secret-file", str(keys / "secret")]
    federation = _started(federation, "superlink", command)
    _wait(federation, 0)
    connection = secured(federation.address, federation.root_certificates)
    for i in range(nodes):
        register(connection, public_key(keys / f"node-{i}.pub"), f"node-{i}")
    return federation


def _node(
    federation: LocalFederation, i: int, data: str, policy: Path, config: list[str], stock: bool
) -> LocalFederation:
    if stock:
        settings = [*config, f'data="{data}"', f'policy="{policy}"']
        command = [_command("flower-supernode"), "--insecure", "--superlink", federation.address]
        command += ["--host", "127.0.0.1", "--port", str(free_port())]
        command += ["--node-config", " ".join(settings)]
        return _started(federation, f"node-{i}", command)
    command = [sys.executable, "-m", "fedgrad.federation.operate.commands", "node"]
    command += ["--superlink", federation.address, "--data", data, "--policy", str(policy)]
    command += [f"--config={item}" for item in config]
    if federation.secure:
        command += ["--root-certificates", str(federation.root_certificates)]
    key = federation.keys / f"node-{i}"
    if not key.exists():
        key.parent.mkdir(exist_ok=True, mode=0o700)
        make_node_key(key)
    command += ["--key", str(key)]  # also without TLS, to keep its identity after a restart
    return _started(federation, f"node-{i}", command)


def _started(federation: LocalFederation, role: str, command: list[str]) -> LocalFederation:
    env = {**QUIET, "FLWR_HOME": str(federation.folder / "flwr")}
    env["PATH"] = os.pathsep.join([_SCRIPTS, os.environ.get("PATH", os.defpath)])
    process = start(role, command, env, federation.folder / f"{role}.log")
    others = [p for p in federation.processes if p.role != role or p.alive]
    federation = dataclasses.replace(federation, processes=(*others, process))
    # Written at once, so that `down` knows of the process whatever happens next.
    state = {**dataclasses.asdict(federation), "folder": str(federation.folder)}
    (federation.folder / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    return federation


def _wait(federation: LocalFederation, nodes: int) -> None:
    from fedgrad.federation.flower.control_api import nodes_online
    from fedgrad.federation.flower.http import Unreachable

    connection = secured(federation.address, federation.root_certificates)
    ends = time.monotonic() + _PATIENCE
    while time.monotonic() < ends:
        for process in federation.processes:
            if not process.alive:
                raise EngineError.here(f"{process.role} ended:\n{_tail(process)}")
        try:
            if len(nodes_online(connection)) >= nodes:
                return
        except Unreachable:
            pass
        time.sleep(0.1)
    logs = "\n".join(f"{p.role}:\n{_tail(p)}" for p in federation.processes)
    raise EngineError.here(f"After {_PATIENCE:.0f} s not all nodes are connected.\n{logs}")


def _tail(process: Process) -> str:
    lines = Path(process.log).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-15:])


def _command(name: str) -> str:
    beside = Path(_SCRIPTS) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise EngineError.here(f"There is no command {name}: pip install 'fedgrad[flower]'")
    return found
