"""Flower for real: a SuperLink and nodes as processes on loopback, and what can go wrong there."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flwr", reason="real federations need the extra: fedgrad[flower]")

import fedgrad as fg
import flower_site
from fedgrad.federation.flower.connection import EngineError, secured
from fedgrad.federation.flower.control_api import traffic
from fedgrad.federation.flower.driver import connect
from fedgrad.federation.flower.fleet import Fleet
from fedgrad.federation.operate import local_federation as local
from fedgrad.federation.protocol.envelope import Envelope
from fedgrad.federation.protocol.federation_errors import CohortMismatch, NoAnswer
from where import ROOMS, TESTS

NODES = 5
HONEST = [0, 1, 2, 3]  # the work of client 4 does not end
PATIENCE = 60.0  # seconds; nothing waits as long unless the machine is very busy
DEADLINE = 4.0  # for messages that some node will not answer


@fg.program(z=fg.CLIENTS)
def loss(x, z):
    return fg.mean(jnp.sum((jnp.sin(z) * fg.broadcast(x)) ** 2)) ** 2


@fg.program(z=fg.CLIENTS)
def moments(x, z):
    v = fg.broadcast(x)
    return jnp.sum(jnp.stack([fg.mean(jnp.mean(v**k) * z.sum()) for k in (1, 2)]) ** 2)


@fg.program(z=fg.CLIENTS, steps=fg.CLIENTS)
def work(x, z, steps):
    v = fg.broadcast(x)
    return fg.mean(jax.lax.fori_loop(0, steps, lambda _, s: jnp.sin(s * v), z).sum())


X = jnp.arange(1.0, 4.0)


def clients(which, part="z"):
    """Their data, as a simulation takes it."""
    return jnp.stack([jnp.asarray(flower_site.client(i)[part]) for i in which])


def close(found, wanted):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-6)


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Nodes find the modules of the tests, and compile as fast as the tests do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(ROOMS))
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("JAX_ENABLE_X64", "1")
        patch.syspath_prepend(str(TESTS.parent))
        yield


@pytest.fixture(scope="module")
def federation(environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    with local.local_federation(folder, "flower_site:data", NODES) as found:
        yield found


@pytest.fixture(scope="module")
def transport(federation):
    with connect(federation.address) as found:
        yield found


@pytest.fixture(scope="module")
def known(transport):
    """The federation, whose nodes have described themselves once."""
    return executor(transport).federation


def executor(transport, **how):
    return fg.executors.flower(transport, **{"deadline": PATIENCE, "platforms": ("cpu",), **how})


def process(federation, index):
    found = local.read(federation.folder)
    return next(p for p in found.nodes if p.role == f"node-{index}" and p.alive)


class Wrapped:
    """A transport, with something done after each message that runs programs."""

    def __init__(self, transport, after):
        self.transport, self.after = transport, after
        self.nodes = transport.nodes

    def exchange(self, requests, deadline, *enough):
        replies = self.transport.exchange(requests, deadline, *enough)
        if any(request.kind == "run" for request in requests.values()):
            self.after()
        return replies


# --- programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["value", "forward", "reverse", "mixed"])
def test_values_and_derivatives(known, mode):
    program = loss if mode == "value" else fg.grad(loss, mode=mode)
    on_nodes = executor(known)
    found = program.on(on_nodes)(X, on_nodes.clients("z", HONEST))
    close(found, program.on(fg.executors.reference())(X, clients(HONEST)))
    assert on_nodes.report.answered == {"clients": 4}


def test_client_results_stay_and_can_be_passed_on(known):
    @fg.program(z=fg.CLIENTS)
    def start(x, z):
        return z * fg.broadcast(x)

    on_nodes = executor(known)
    first = start.on(on_nodes)(X, on_nodes.clients("z", HONEST))
    assert not isinstance(first, jax.Array) and first.shape == (4, 3)
    close(loss.on(on_nodes)(X, first), loss(X, X[None] * clients(HONEST)))


def test_bulk(known):
    @fg.program(large=fg.CLIENTS)
    def total(x, large):
        return fg.sum(large * fg.broadcast(x))

    on_nodes = executor(known)
    x = jnp.linspace(0, 1, 200_000, dtype=jnp.float32)
    large = clients(HONEST, "large")
    found = total.on(on_nodes)(x, on_nodes.clients("large", HONEST))
    np.testing.assert_allclose(found, (large * x[None]).sum(0), rtol=1e-5, atol=1e-5)


HEADER = 2048  # bytes per message, each way, of Flower's and ours


@pytest.mark.parametrize("mode, size", [("forward", 200), ("reverse", 20_000), ("mixed", 20_000)])
def test_bytes_are_those_of_the_plan(federation, transport, known, mode, size):
    """Of arrays exactly, by our account; of everything almost, by that of the SuperLink."""
    gradient, connection = fg.grad(moments, mode=mode), secured(federation.address)
    on_nodes = executor(known)
    x, handles = jnp.linspace(0, 1, size), on_nodes.clients("z", HONEST)
    gradient.on(on_nodes)(x, handles)  # which takes the programs along
    before = traffic(connection, transport.run)
    gradient.on(on_nodes)(x, handles)
    after = traffic(connection, transport.run)
    planned = fg.plan(gradient, x, clients(HONEST)).traffic
    ours = on_nodes.report.traffic[0]
    for way, (start, end) in enumerate(zip(before, after, strict=True)):
        wanted = sum((t.down_bytes, t.up_bytes)[way] for t in planned)
        assert (ours.down, ours.up)[way] == wanted
        spent = (end - start) / len(HONEST)
        assert wanted <= spent <= 1.05 * wanted + HEADER * len(planned)


def test_several_programs_at_once(federation, transport):
    """Two servers, each with its own run, and two threads of one of them."""
    with connect(federation.address) as other:
        wanted = {s: loss(s * X, clients(HONEST)) for s in (1.0, 2.0, 3.0)}
        found = {}

        def run(scale, way):
            on_nodes = executor(way)
            found[scale] = loss.on(on_nodes)(scale * X, on_nodes.clients("z", HONEST))

        jobs = [(1.0, transport), (2.0, transport), (3.0, other)]
        threads = [threading.Thread(target=run, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for scale, value in wanted.items():
        close(found[scale], value)


# --- training -----------------------------------------------------------------------------------

FIT = """
import sys
import fedgrad as fg
from test_flower import train
executor = fg.executors.flower(sys.argv[1])
train(executor.population("examples"), executor, out=fg.run_folder(sys.argv[2], every=1))
"""


def train(population, executor=None, **how):
    from examples.federation.learned_rate import train

    return train(population, executor, rounds=4, progress=False, **how)


@pytest.fixture(scope="module")
def simulated():
    return train(fg.population([flower_site.client(i)["examples"] for i in range(NODES)]))


def same_training(found, wanted):
    leaves = zip(jax.tree.leaves(found.state), jax.tree.leaves(wanted.state), strict=True)
    for a, b in leaves:
        if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_self_tuning_is_as_simulated(known, simulated):
    on_nodes = executor(known)
    same_training(train(on_nodes.population("examples"), on_nodes), simulated)


def test_a_server_that_dies_goes_on_from_its_checkpoint(federation, simulated, tmp_path):
    command = [sys.executable, "-c", FIT, federation.address, str(tmp_path)]
    server = subprocess.Popen(command)
    history = tmp_path / "history.jsonl"
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends and server.poll() is None:
        if history.exists() and history.read_text().splitlines():
            break
        time.sleep(0.01)
    server.send_signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    before = len(history.read_text().splitlines())
    with connect(federation.address) as transport:
        on_nodes = executor(transport)
        found = train(
            on_nodes.population("examples"), on_nodes, out=fg.run_folder(tmp_path, every=1)
        )
    assert 1 <= before < 4 and found.rounds == 4
    same_training(found, simulated)


# --- nodes that are slow, die, and come back ----------------------------------------------------


def test_a_slow_node_is_dropped_and_its_late_answer_is_not_used(federation, known):
    on_nodes = executor(known, deadline=DEADLINE, missing="drop")
    run, handles = loss.on(on_nodes), on_nodes.clients("z", HONEST)
    run(X, handles)  # has sent the program
    slow = process(federation, 1).pid
    os.kill(slow, signal.SIGSTOP)
    try:
        close(run(X, handles), loss(X, clients([0, 2, 3])))
        assert [d.client for d in on_nodes.report.dropped] == [1]
        with pytest.raises(NoAnswer, match="Client 1"):
            loss.on(executor(known, deadline=1.0))(X, handles)
    finally:
        os.kill(slow, signal.SIGCONT)
    patient = loss.on(executor(known))
    close(patient(2 * X, handles), loss(2 * X, clients(HONEST)))


def test_over_selection_takes_the_first(federation, known):
    @fg.program(data=fg.CLIENTS)
    def count(data):
        return fg.sum(1.0), fg.sum(data.count)

    slow = process(federation, 0).pid
    on_nodes = executor(known)
    population = on_nodes.population("examples", over_select=2.0)
    key = next(k for k in map(jax.random.key, range(99)) if 0 in population.sample(k, 2).index)
    os.kill(slow, signal.SIGSTOP)
    try:
        clients, examples = count.on(on_nodes)(population.sample(key, 2))
    finally:
        os.kill(slow, signal.SIGCONT)
    answered = set(np.asarray(population.sample(key, 2).index).tolist())
    answered -= {d.client for d in on_nodes.report.dropped}
    assert clients == 2 and 0 not in answered
    assert examples == sum(20 + 7 * i for i in answered)


class KillAtWork(Wrapped):
    """Kills a node when all others have answered."""

    def __init__(self, transport, pid):
        super().__init__(transport, lambda: None)
        self.pid = pid

    def exchange(self, requests, deadline, enough=None):
        running = {request.kind for request in requests.values()} == {"run"}

        def watch(replies):
            if running and len(requests) == NODES and len(replies) == NODES - 1:
                os.kill(self.pid, signal.SIGKILL)
            return enough is not None and enough(replies)

        return super().exchange(requests, deadline, watch)


def test_kill_while_it_works(federation, transport):
    killing = KillAtWork(transport, process(federation, 4).pid)
    on_nodes = executor(killing, deadline=DEADLINE, missing="drop")
    honest, handles = (
        [on_nodes.clients(part, which) for part in ("z", "steps")]
        for which in (HONEST, range(NODES))
    )
    work.on(executor(transport))(X, *honest)  # which sends the program
    found = work.on(on_nodes)(X, *handles)
    assert "node-4" not in {p.role for p in local.read(federation.folder).nodes if p.alive}
    close(found, work(X, clients(HONEST), clients(HONEST, "steps")))
    assert [d.client for d in on_nodes.report.dropped] == [4]
    assert on_nodes.report.asked == {"clients": 5} and on_nodes.report.answered == {"clients": 4}
    with pytest.raises(NoAnswer, match="Client 4"):
        work.on(executor(transport, deadline=1.0))(X, *handles)


@pytest.mark.parametrize("index, missing", [(3, "fail"), (2, "restart")])
def test_kill_between_forward_and_backward(federation, transport, index, missing):
    present = [i for i in HONEST if i <= index]  # without those that died before
    pid = process(federation, index).pid
    killed = []

    def kill_once():
        if not killed:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    gradient = fg.grad(loss, mode="reverse")
    on_nodes = executor(Wrapped(transport, kill_once), deadline=DEADLINE, missing=missing)
    handles = on_nodes.clients("z", present)
    if missing == "fail":
        with pytest.raises(CohortMismatch, match=f"Client {index}"):
            gradient.on(on_nodes)(X, handles)
    else:
        close(gradient.on(on_nodes)(X, handles), gradient(X, clients(present[:-1])))
        assert on_nodes.report.answered == {"clients": len(present) - 1}
        assert on_nodes.report.restarts == 1
    assert killed


def test_nodes_that_come_back_are_the_same_clients(federation, transport):
    found = local.read(federation.folder)
    for index in (2, 3):
        found = local.add_node(found, index, "flower_site:data")
    on_nodes = executor(transport, deadline=DEADLINE)
    gradient = fg.grad(loss, mode="reverse").on(on_nodes)
    ends = time.monotonic() + PATIENCE
    while True:  # a place is free when its last holder has not been heard of for a while
        try:
            result = gradient(X, on_nodes.clients("z", HONEST))
            break
        except fg.FederatedError:
            assert time.monotonic() < ends, "the nodes did not come back"
            time.sleep(0.5)
    close(result, fg.grad(loss)(X, clients(HONEST)))
    for index in (2, 3):
        log = (federation.folder / f"node-{index}.log").read_text()
        joined = re.findall(r"node (\d+) is at", log)
        assert len(joined) == 2 and len(set(joined)) == 1


# --- nodes that answer wrongly ------------------------------------------------------------------

WRONG = ["nan", "shape", "dtype", "less", "much", "broken", "half"]


def test_wrong_answers_are_no_answers(federation, transport):
    command = [sys.executable, str(TESTS / "flower_site.py"), federation.address, "9"]
    command += ["nan", *WRONG]
    rogue = subprocess.Popen(command)
    try:
        ends = time.monotonic() + PATIENCE
        while 9 not in executor(transport).federation.clients():
            assert time.monotonic() < ends and rogue.poll() is None
            time.sleep(0.1)
        which = [0, 1, 9]
        strict = executor(transport)
        lenient = executor(strict.federation, missing="drop")
        handles = strict.clients("z", which)
        with pytest.raises(NoAnswer, match="Client 9"):
            loss.on(strict)(X, handles)
        for fault in WRONG[:-1]:
            close(loss.on(lenient)(X, handles), loss(X, clients([0, 1])))
            assert [d.client for d in lenient.report.dropped] == [9], fault
        half = executor(strict.federation, missing="drop", deadline=DEADLINE)
        begun = time.monotonic()
        close(loss.on(half)(X, handles), loss(X, clients([0, 1])))
        assert time.monotonic() - begun < 60  # Flower itself would wait for three minutes
        assert rogue.wait() == -signal.SIGKILL
    finally:
        rogue.kill()
        rogue.wait()


def test_requests_that_are_too_large_are_refused(federation):
    """By the node, before it has fetched more than its policy allows."""
    fleet, over = Fleet(secured(federation.address), None, most=1000), threading.Event()
    node = fleet.join()
    handle = lambda request: Envelope("ok", {})
    server = threading.Thread(target=fleet.serve, args=(handle, over, lambda: None))
    server.start()
    try:
        with connect(federation.address) as transport:
            large = Envelope("run", {}, (np.zeros(100_000),))
            reply = transport.exchange({node: large}, PATIENCE)[node]
            assert reply.kind == "refused" and "1000 bytes" in reply.reason
            small = transport.exchange({node: Envelope("run", {})}, PATIENCE)[node]
            assert small.kind == "ok"
    finally:
        over.set()
        server.join()
        fleet.leave()


def test_engine_failures_are_typed(transport):
    reply = transport.exchange({12345: Envelope("describe", {})}, PATIENCE)
    assert reply[12345].kind == "error"


def test_a_run_that_was_stopped_is_an_error(federation):
    from flwr.proto.control_pb2 import StopRunRequest
    from flwr.supercore.control.control_http_client import ControlHttpClient

    with connect(federation.address) as transport:
        with ControlHttpClient(f"http://{federation.address}") as control:
            control.StopRun(StopRunRequest(run_id=transport.run))
        with pytest.raises(EngineError, match="Connect again"):
            transport.nodes()


def test_a_closed_run_is_an_error(federation):
    with connect(federation.address) as transport:
        nodes = transport.nodes()
    with pytest.raises(EngineError, match=r"test_flower\.py"):
        transport.exchange({nodes[0]: Envelope("describe", {})}, 5.0)
