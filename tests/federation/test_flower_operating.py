"""Operating a federation: keys and TLS, commands, Flower's own nodes, and what `down` ends."""

import argparse
import ast
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="real federations need the extra: fedgrad[flower]")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import fedgrad as fg
import flower_site
from fedgrad.federation.flower.connection import EngineError, secured
from fedgrad.federation.flower.control_api import nodes_online, register
from fedgrad.federation.flower.driver import connect
from fedgrad.federation.flower.fleet import Fleet
from fedgrad.federation.flower.keys import private_key, public_key
from fedgrad.federation.operate import local_federation as local
from fedgrad.federation.operate import started_processes
from fedgrad.federation.operate.certificates import make_certificates, make_node_key
from fedgrad.federation.operate.commands import add_commands, main
from fedgrad.federation.protocol.envelope import Envelope
from where import TESTS

APP = TESTS.parent / "examples" / "flower_app"
PATIENCE = 60.0
FEDGRAD = [sys.executable, "-m", "fedgrad.federation.operate.commands"]


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Processes find the modules of the tests and of the example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(APP)]))
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.syspath_prepend(str(APP))
        yield


# --- TLS and keys -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secure(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("secure")
    with local.local_federation(folder, "flower_site:data", 2, secure=True) as federation:
        yield federation


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The keys of another federation."""
    return make_certificates(tmp_path_factory.mktemp("others") / "keys")


def test_a_secure_federation_works(secure):
    with connect(secure.address, **secure.credentials) as transport:
        nodes = transport.nodes()
        replies = transport.exchange(dict.fromkeys(nodes, Envelope("describe", {})), PATIENCE)
    assert len(nodes) == 2
    assert sorted(reply.meta["index"] for reply in replies.values()) == [0, 1]


def test_nodes_that_are_refused(secure, others):
    """Real nodes, all at once: what each is given, and what it says before it gives up."""
    root, wrong = secure.root_certificates, others / "authority.crt"
    table = {
        "plaintext": ([], "does not answer"),
        "no key": (["--root-certificates", root], "must be registered"),
        "an unregistered key": (
            ["--root-certificates", root, "--key", others / "node-0"],
            "key is not registered",
        ),
        "a key that is taken": (
            ["--root-certificates", root, "--key", secure.keys / "node-0"],
            "a node that uses it is connected",
        ),
        "another authority": (
            ["--root-certificates", wrong, "--key", secure.keys / "node-0"],
            "certificate verify failed",
        ),
    }
    common = ["node", "--superlink", secure.address, "--data", "flower_site:data"]
    common += ["--config", "partition-id=7", "--patience", "0"]
    started = {
        name: subprocess.Popen(
            [*FEDGRAD, *common, *map(str, given)], stderr=subprocess.PIPE, text=True
        )
        for name, (given, _) in table.items()
    }
    for name, (_, reason) in table.items():
        _, said = started[name].communicate(timeout=2 * PATIENCE)
        assert started[name].returncode == 1, name
        assert reason in said, name
    connection = secured(secure.address, secure.root_certificates)
    assert len(nodes_online(connection)) == 2


def test_drivers_that_are_refused(secure, others):
    root = {"root_certificates": secure.root_certificates}
    table = [
        ({}, "does not answer"),
        ({"root_certificates": others / "authority.crt"}, "certificate verify failed"),
        (root, "Authentication failed"),
        ({**root, "secret": others / "secret"}, "Authentication failed"),
    ]
    for given, reason in table:
        with pytest.raises(EngineError, match=reason):
            connect(secure.address, **given)


def test_only_known_nodes_are_seen(secure, others):
    """Flower lets whoever reaches its control API register keys; drivers have their own list."""
    connection = secured(secure.address, secure.root_certificates)
    register(connection, public_key(others / "node-0.pub"))
    stranger = Fleet(connection, private_key(others / "node-0"), 2**20)
    name = stranger.join()
    try:
        with connect(secure.address, **secure.credentials) as transport:
            assert name not in transport.nodes() and len(transport.nodes()) == 2
        trusting = {k: v for k, v in secure.credentials.items() if k != "node_keys"}
        with connect(secure.address, **trusting) as transport:
            assert name in transport.nodes()
    finally:
        stranger.leave()


@pytest.mark.parametrize(
    "address, given, plaintext",
    [
        ("127.0.0.1:1", {}, True),
        ("localhost:1", {}, True),
        ("[::1]:1", {}, True),
        ("127.0.0.1.example.org:1", {}, False),
        ("localhost.example.org:1", {}, False),
        ("10.0.0.1:1", {}, False),
        ("fl.example.org:1", {}, False),
        ("fl.example.org:1", {"insecure": True}, True),
    ],
)
def test_plaintext_is_for_loopback_or_asked_for(address, given, plaintext):
    assert secured(address, **given).plaintext == plaintext


def test_certificates_win_over_loopback_and_exclude_plaintext(others):
    authority = others / "authority.crt"
    assert not secured("127.0.0.1:1", authority).plaintext
    with pytest.raises(fg.ArgumentError, match="give one"):
        secured("127.0.0.1:1", authority, insecure=True)
    with pytest.raises(fg.ArgumentError, match="no PEM certificate"):
        secured("127.0.0.1:1", others / "superlink.key")
    for address in ("fl.example.org", "https://fl.example.org:1", ":1", "fl.example.org:x"):
        with pytest.raises(fg.ArgumentError, match="host:port"):
            secured(address)


def test_a_node_elsewhere_needs_a_key(capsys):
    given = ["--superlink", "fl.example.org:1", "--data", "flower_site:data"]
    assert main(["node", *given]) == 2
    assert "give --key" in capsys.readouterr().err


def test_certificates(tmp_path, capsys):
    folder = tmp_path / "keys"
    names = ["--host", "fl.example.org", "--host", "10.0.0.1", "--nodes", "2", "--days", "30"]
    assert main(["federation", "certificates", str(folder), *names]) == 0
    assert str(folder / "node-1.pub") in capsys.readouterr().out
    authority, server = (
        x509.load_pem_x509_certificate((folder / name).read_bytes())
        for name in ("authority.crt", "superlink.crt")
    )
    server.verify_directly_issued_by(authority)
    assert (server.not_valid_after_utc - server.not_valid_before_utc).days == 30
    hosts = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    assert [str(ip) for ip in hosts.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]
    for path in folder.iterdir():
        public = path.suffix in (".crt", ".pub")
        assert stat.S_IMODE(path.stat().st_mode) == (0o644 if public else 0o600), path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = (folder / "authority.key").read_bytes()
    assert main(["federation", "certificates", str(folder)]) == 2
    assert "authority already" in capsys.readouterr().err
    assert (folder / "authority.key").read_bytes() == before


def test_keys(tmp_path):
    make_node_key(tmp_path / "node")
    key = private_key(tmp_path / "node")
    pem = serialization.Encoding.PEM
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    assert key.public_key().public_bytes(pem, form) == public_key(tmp_path / "node.pub")
    own = ec.generate_private_key(ec.SECP384R1())  # as openssl writes it
    kind, unencrypted = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (tmp_path / "own").write_bytes(own.private_bytes(pem, kind, unencrypted))
    assert private_key(tmp_path / "own").private_numbers() == own.private_numbers()
    (tmp_path / "text").write_text("hello")
    for name in ("text", "nothing"):
        for read in (private_key, public_key):
            with pytest.raises(fg.ArgumentError):
                read(tmp_path / name)


# --- up, down, status ---------------------------------------------------------------------------


def test_stop_ends_exactly_these(tmp_path):
    ours = started_processes.start("ours", ["sh", "-c", "sleep 99; true"], {}, tmp_path / "log")
    other = subprocess.Popen(["sleep", "99"])
    try:
        while not (children := _children(ours.pid)):
            time.sleep(0.01)
        reused = started_processes.Process("reused", other.pid, "another start", "")
        assert ours.alive and not reused.alive
        started_processes.stop([ours, reused])
        assert not ours.alive and other.poll() is None
        for _ in range(500):  # they were told; on a busy machine they take their time
            if all(started_processes.started(child) is None for child in children):
                break
            time.sleep(0.01)
        assert all(started_processes.started(child) is None for child in children)
    finally:
        other.kill()
        other.wait()


def _children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def test_stop_ends_what_does_not_want_to(tmp_path):
    command = ["sh", "-c", "trap '' TERM; echo on; while true; do sleep 0.1; done"]
    stubborn = started_processes.start("stubborn", command, {}, tmp_path / "log")
    while "on" not in (tmp_path / "log").read_text():
        time.sleep(0.01)
    started_processes.stop([stubborn], patience=0.2)
    assert not stubborn.alive


def test_up_status_down(tmp_path, capsys):
    folder = ["--folder", str(tmp_path)]
    assert main(["federation", "status", *folder]) == 1
    assert main(["federation", "down", *folder]) == 0
    assert "0 processes" in capsys.readouterr().out
    up = ["federation", "up", *folder, "--nodes", "1", "--data", "flower_site:data"]
    try:
        assert main(up) == 0
        assert main(["federation", "status", *folder]) == 0
        said = capsys.readouterr().out
        assert "fg.executors.flower('127.0.0.1:" in said and said.count("runs") == 2
        assert main(up) == 2
        assert "up already" in capsys.readouterr().err
    finally:
        started = local.read(tmp_path).processes
        assert main(["federation", "down", *folder]) == 0
    assert "2 processes" in capsys.readouterr().out
    assert not any(process.alive for process in started)
    assert "is at 127.0.0.1" in (tmp_path / "node-0.log").read_text()


def test_nodes_find_a_superlink_that_comes_back(tmp_path):
    with local.local_federation(tmp_path, "flower_site:data", 1) as federation:
        describe = Envelope("describe", {})
        with connect(federation.address) as transport:
            (node,) = transport.nodes()
            assert transport.exchange({node: describe}, PATIENCE)[node].kind == "ok"
            os.kill(federation.processes[0].pid, signal.SIGKILL)
            while federation.processes[0].alive:
                time.sleep(0.01)
            with pytest.raises(EngineError, match="does not answer"):
                transport.exchange({node: describe}, PATIENCE)
        federation = local._superlink(federation, 1, stock=False)
        local._wait(federation, 1)
        with connect(federation.address) as transport:
            (node,) = transport.nodes()
            assert transport.exchange({node: describe}, PATIENCE)[node].kind == "ok"


def test_up_says_what_is_wrong_and_leaves_nothing(tmp_path):
    with pytest.raises(EngineError, match="flower_site has no 'dta'"):
        local.up(tmp_path, "flower_site:dta", 1)
    assert local.read(tmp_path) is None


def test_a_node_says_what_is_wrong_with_its_data(capsys):
    common = ["node", "--superlink", "127.0.0.1:1", "--data"]
    for name, reason in [
        ("flower_site", "module:function"),
        ("no_such_module:data", "no module 'no_such_module'"),
        ("flower_site:dat", "Did you mean 'data'?"),
    ]:
        assert main([*common, name]) == 2
        assert reason in capsys.readouterr().err


def test_the_commands_of_the_documentation_are_commands():
    page = (TESTS.parent / "docs" / "operating-a-federation.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    ours = [shlex.split(line)[1:] for line in lines if line.startswith("fedgrad ")]
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    for command in ours:
        assert callable(parser.parse_args(command).run)
    assert {command[1] for command in ours} >= {"up", "down", "status", "certificates", "register"}


# --- a site's policy ----------------------------------------------------------------------------


@fg.program(z=fg.CLIENTS)
def total(x, z):
    return fg.sum(fg.broadcast(x) * z)


@fg.program(z=fg.CLIENTS)
def squares(x, z):
    return fg.sum((fg.broadcast(x) * z) ** 2)


def test_a_policy_of_a_site_decides(environment, tmp_path):
    """Nodes that allow one program run that one, and refuse others with a reason."""
    from fedgrad.federation.protocol.federation_errors import Refused
    from fedgrad.federation.protocol.in_process import InProcess

    z = [flower_site.client(i)["z"] for i in range(2)]
    simulated = fg.executors.flower(InProcess.of([{"z": x} for x in z]), platforms=("cpu",))
    (allowed,) = simulated.programs(total, jnp.ones(3), simulated.clients("z"))
    policy = tmp_path / "policy.toml"
    policy.write_text(f'programs = ["{allowed.digest}"]\n')
    with (
        local.local_federation(tmp_path, "flower_site:data", 2, policy=policy) as federation,
        connect(federation.address) as transport,
    ):
        executor = fg.executors.flower(transport, platforms=("cpu",))
        handles = executor.clients("z")
        np.testing.assert_allclose(total.on(executor)(jnp.ones(3), handles), sum(z))
        with pytest.raises(Refused, match="not on the list of allowed programs"):
            squares.on(executor)(jnp.ones(3), handles)


# --- Flower's own nodes -------------------------------------------------------------------------


def test_stock_app(environment, tmp_path):
    """`flwr run` on SuperNodes, and the same in simulation. In reverse mode, so that nodes have to
    remember something from one message, and process, to the next."""
    from ridge.program import data, loss

    with local.local_federation(tmp_path, "ridge.program:data", 2, stock=True) as federation:
        with connect(federation.address) as transport:  # also where Flower launches server code
            assert len(transport.nodes()) == 2
        flwr, config = Path(sys.executable).with_name("flwr"), 'steps=1 mode="reverse"'
        home = {"FLWR_HOME": str(federation.folder / "flwr"), **local.QUIET}
        ran = subprocess.run(
            [flwr, "run", APP, "local", "--stream", "--run-config", config],
            env={**os.environ, **home},
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE,
        )
    context = [type("Context", (), {"config": {"partition-id": i}}) for i in range(2)]
    sites = [data(c) for c in context]
    z = {name: jnp.stack([jnp.asarray(site[name]) for site in sites]) for name in ("x", "y")}
    reverse = fg.value_and_grad(loss, mode="reverse")
    assert fg.plan(reverse, jnp.zeros(3, jnp.float32), z).client_memory[fg.CLIENTS.name] > 0
    value, gradient = reverse(jnp.zeros(3, jnp.float32), z)
    assert f"loss {float(value):.4f}"[:-1] in ran.stdout, ran.stdout + ran.stderr
    said = next(line for line in ran.stdout.splitlines() if line.startswith("w ["))
    np.testing.assert_allclose(eval(said[2:]), -0.1 * np.asarray(gradient), atol=2e-5)


# --- without Flower -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "absent, module, said",
    [
        ("flwr", "flower.engine", "pip install 'fedgrad[flower]'"),
        ("flwr", "flower.driver", "pip install 'fedgrad[flower]'"),
        ("flwr", "flower.stock", "pip install 'fedgrad[flower]'"),
        ("flwr", "flower.strategy", "pip install 'fedgrad[flower]'"),
        ("flwr", "flower.torch_client", "pip install 'fedgrad[flower]'"),
        ("torch", "flower.torch_client", "pip install 'fedgrad[torch]'"),
        ("flwr.supernode.fleet_http_client", "flower.fleet", "written against flwr 1.41"),
        ("cryptography", "operate.certificates", "pip install 'fedgrad[flower]'"),
    ],
)
def test_what_is_absent_is_named(absent, module, said):
    code = f"""
        import sys
        sys.modules[{absent!r}] = None
        from fedgrad.core.errors import MissingExtra
        try:
            import fedgrad.federation.{module}
        except MissingExtra as error:
            print(error)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert said in ran.stdout


def test_only_these_files_import_flower():
    folder = Path(local.__file__).parents[2]
    importing = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [getattr(node, "module", None) or ""]
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] == "flwr" for name in names):
                importing.add(path.relative_to(folder).as_posix())
    flower = {"engine", "internals", "stock", "derivatives", "strategy"}
    assert importing == {f"federation/flower/{name}.py" for name in flower}
