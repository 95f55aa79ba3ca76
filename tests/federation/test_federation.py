"""Programs on nodes: equal to the reference, and only sums leave them."""

import concurrent.futures
import dataclasses
import functools
import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_derivatives import IMPOSSIBLE, MODES, assert_close, centralized, derived

import fedgrad as fg
from fedgrad.federation.protocol.exported import programs
from fedgrad.federation.protocol.federation_errors import FederationError, NoAnswer
from fedgrad.federation.protocol.in_process import InProcess
from fedgrad.federation.protocol.memory import KEPT
from fedgrad.federation.protocol.node import Node
from fedgrad.federation.protocol.node_data import Context, decoded, rounded_up
from fedgrad.federation.protocol.policy import Policy
from fedgrad.federation.protocol.stage_program import PLATFORMS, read_program
from programs import (
    TABLE,
    Case,
    assert_same,
    normal,
    ragged_clients,
    ragged_sgd,
    state_in_and_out,
    stateful,
    two_rounds,
    unpadded,
    unweighted_mean,
)

N = 3
REFERENCE = fg.executors.reference()
ANYTHING = Policy(anything=True, minimum_cohort=1)
X, Z = normal(0, 3), normal(1, N, 3)


def flower(transport, **options):
    return fg.executors.flower(transport, platforms=("cpu",), **options)


def own_data(program, args):
    """What each node has: of each client argument, the client's own."""
    nodes = []
    for name, argument in zip(program.signature.parameters, args, strict=True):
        if name not in program.placements:
            continue
        if isinstance(argument, fg.Cohort):
            clients = unpadded(argument)
        else:
            count = len(jax.tree.leaves(argument)[0])
            clients = [jax.tree.map(lambda leaf, i=i: leaf[i], argument) for i in range(count)]
        for i, client in enumerate(clients):
            nodes += [{}] if i == len(nodes) else []
            nodes[i][name] = jax.tree.map(np.asarray, client)
    return nodes


def on_nodes(executor, program, args):
    """The same arguments, those of clients as handles."""
    handles = []
    for name, argument in zip(program.signature.parameters, args, strict=True):
        if name not in program.placements:
            handles.append(argument)
        elif isinstance(argument, fg.Cohort):
            handles.append(executor.population(name).everyone)
        else:
            here = len(jax.tree.leaves(argument)[0])  # other nodes may be for another placement
            handles.append(executor.clients(name, expect=here))
    return handles


@functools.cache
def federation(case: Case):
    args = case.args(N)
    return args, InProcess.of(own_data(case.program, args))


def kept(transport):
    """What nodes keep of earlier messages."""
    found = [list(node.memory.entries) for node in transport.handlers.values()]
    return [name for names in found for name in names if name.startswith(KEPT)]


def planned_bytes(plan, placements):
    """(down, up) that the plan says for a client of these placements."""
    mine = [t for t in plan.traffic if t.placement in placements]
    return sum(t.down_bytes * t.times for t in mine), sum(t.up_bytes * t.times for t in mine)


def check_traffic(plan, executor, sizes):
    """Every client was sent and has sent exactly what the plan says."""
    for client, sent in executor.report.traffic.items():
        placements = [placement for placement, n in sizes.items() if client < n]
        assert (sent.down, sent.up) == planned_bytes(plan, placements)


# --- every program, every mode ------------------------------------------------------------------


# Values of the other programs are compared along with their derivatives.
@pytest.mark.parametrize("case", [c for c in TABLE if not c.scalar], ids=lambda case: case.name)
def test_results_are_those_of_the_reference(case):
    args, transport = federation(case)
    executor = flower(transport)
    handles = on_nodes(executor, case.program, args)
    found = case.program.on(executor)(*handles)
    wanted = case.program.on(REFERENCE)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for i, (a, b) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert isinstance(a, jax.Array) == (i not in case.client_outputs)
        if isinstance(a, jax.Array):
            assert_same(a, b)
    del found, a
    executor.federation.flush()
    assert kept(transport) == []


# Where auto takes different rules for different rounds; else its plan is that of a pure mode.
MIXED = {("train_then_eval", "auto_again"), ("scan_client_state", "auto_again")}
MIXED |= {("scan_client_state", "auto")}


def combinations():
    for case in TABLE:
        for mode in MODES:
            chosen = not mode.startswith("auto") or (case.name, mode) in MIXED
            if chosen and (case.name, mode) not in IMPOSSIBLE:
                yield pytest.param(case, mode, id=f"{case.name}-{mode}")


@pytest.mark.parametrize("case, mode", list(combinations()))
def test_derivatives_traffic_and_memory(case, mode):
    args, transport = federation(case)
    executor, gradient = flower(transport), derived(case, mode)
    handles = on_nodes(executor, case.program, args)
    plan = fg.plan(gradient, *args)
    assert (len(set(plan.rules)) > 1) == mode.startswith("auto")
    assert_close(gradient.on(executor)(*handles), centralized(case))
    if not case.decided:
        check_traffic(plan, executor, plan.clients)
    if any(plan.graph.loops):
        executor.federation.flush()  # what a loop leaves, nodes forget with their next message
    assert kept(transport) == []


# --- one client's values ------------------------------------------------------------------------


def test_client_placed_results_stay_on_the_nodes():
    transport = InProcess.of([{"z": z, "state": np.zeros(3)} for z in np.asarray(Z)])
    executor = flower(transport)
    z, state = executor.clients("z"), executor.clients("state")
    local = jnp.zeros((N, 3))
    program = state_in_and_out.on(executor)
    for _ in range(3):
        found, state = program(X, z, state)
        wanted, local = state_in_and_out.on(REFERENCE)(X, Z, local)
        assert_same(found, wanted)
    assert (state.shape, state.dtype) == (local.shape, local.dtype)
    assert len(kept(transport)) == 2 * N  # this one, and the last one, whose handle is just gone
    executor.federation.flush()
    assert len(kept(transport)) == N
    for read in (lambda x: x.gather(), np.asarray):
        with pytest.raises(FederationError, match=r"test_federation\.py.*stays on the nodes"):
            read(state)
    del state
    executor.federation.flush()
    assert kept(transport) == []


def test_a_result_may_be_the_argument_or_need_no_message():
    @fg.program(z=fg.CLIENTS)
    def f(z):
        return z, z * 2, jnp.ones(2)

    transport = InProcess.of(list(np.asarray(Z)))
    executor = flower(transport)
    same, double, ones = f.on(executor)(executor.clients())
    assert_same(ones, jnp.ones(2))
    check = fg.program(a=fg.CLIENTS, b=fg.CLIENTS)(lambda a, b: (fg.sum(a), fg.sum(b)))
    assert_same(check.on(executor)(same, double), (Z.sum(0), 2 * Z.sum(0)))


def test_a_loop_over_nothing_gives_nothing():
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        def body(x, _):
            y = fg.broadcast(x) * z
            return fg.mean(y), y

        return jax.lax.scan(body, x, None, length=0)

    executor = flower(InProcess.of(list(np.asarray(Z))))
    x, rows = f.on(executor)(X, executor.clients())
    assert_same(x, X)
    assert rows.shape == (N, 0, 3)
    count = fg.program(y=fg.CLIENTS)(lambda y: fg.sum(jnp.sum(y) + 1.0))
    assert float(count.on(executor)(rows)) == N


def test_a_client_keeps_what_a_cond_hands_on():
    """`w` is read for the last time before `v`, which is the same value on the nodes."""

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        w = z * fg.broadcast(x)
        y = fg.sum(w)
        y, v = jax.lax.cond(
            jnp.all(x == x), lambda y, w: (fg.sum(w) * y, w), lambda y, w: (y, w * 2), y, w
        )
        return fg.sum(v * fg.broadcast(fg.sum(w * fg.broadcast(y))))

    transport = InProcess.of(list(np.asarray(Z)))
    executor = flower(transport)
    assert_same(f.on(executor)(X, executor.clients()), f.on(REFERENCE)(X, Z))
    executor.federation.flush()
    assert kept(transport) == []


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_sums_that_are_not_finite(dtype):
    most = float(jnp.finfo(dtype).max)
    rows = [[np.inf, np.inf, np.nan, most], [1, -np.inf, np.inf, most], [2, 1, 1, 0]]
    executor = flower(InProcess.of(list(np.array(rows, dtype))), non_finite="allow")
    program = fg.program(z=fg.CLIENTS)(lambda z: fg.sum(z))
    found = program.on(executor)(executor.clients())
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(float), [np.inf, np.nan, np.nan, np.inf])


def test_a_replaced_program_is_the_one_that_runs():
    executor = flower(InProcess.of(list(np.asarray(Z))))
    program = fg.program(z=fg.CLIENTS)(lambda z: fg.sum(z)).on(executor)
    assert_same(program(executor.clients()), Z.sum(0))
    other = dataclasses.replace(program, fun=lambda z: fg.sum(z) * 2)
    assert_same(other(executor.clients()), Z.sum(0) * 2)

    def look(places):
        raise fg.PlanError(f"The result is at {places}.")

    with pytest.raises(fg.PlanError, match="at server"):
        dataclasses.replace(program, look=look)(executor.clients())
    elsewhere = dataclasses.replace(program, placements={"z": fg.Placement("other")})
    with pytest.raises(fg.PlacementError, match="clients"):
        elsewhere(executor.clients())


@pytest.mark.parametrize("mode", ["reverse", "mixed"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_derivatives_are_added_up_wide(dtype, mode):
    program = fg.program(z=fg.CLIENTS)(lambda x, z: fg.mean(jnp.sum(fg.broadcast(x) * z)))
    executor = flower(InProcess.of(list(np.full((3, 2), 30_000.0, dtype))))
    slope = fg.grad(program, mode=mode).on(executor)(jnp.ones(2, dtype), executor.clients())
    assert_same(slope, jnp.full(2, 30_000.0, dtype), rtol=0.01)


def test_keys_and_narrow_dtypes_travel_and_stay():
    @fg.program(z=fg.CLIENTS)
    def begin(key, scale, z):
        own = fg.client_key(key)
        small = (fg.broadcast(scale).astype(z.dtype) * z).astype(jnp.bfloat16)
        return own, small, fg.sum(small), fg.sum(jnp.exp(jax.lax.complex(0 * z, z))), fg.sum(z > 0)

    @fg.program(keys=fg.CLIENTS, small=fg.CLIENTS)
    def go_on(keys, small):
        return fg.sum(jax.random.normal(keys)), fg.sum(small)

    key, scale = jax.random.key(3), jnp.bfloat16(1.5)
    executor = flower(InProcess.of(list(np.asarray(Z))))
    keys, small, *sums = begin.on(executor)(key, scale, executor.clients())
    local_keys, local_small, *wanted = begin.on(REFERENCE)(key, scale, Z)
    assert_same(sums, wanted)
    assert (keys.dtype, small.dtype) == (key.dtype, jnp.bfloat16)
    assert_same(go_on.on(executor)(keys, small), go_on.on(REFERENCE)(local_keys, local_small))


def test_nodes_with_64_bits_serve_a_server_with_32():
    executor = flower(InProcess.of(list(np.asarray(Z))))
    with jax.enable_x64(False):
        program = fg.program(z=fg.CLIENTS)(lambda x, z: fg.mean(fg.broadcast(x) * z))
        handle = executor.clients()
        assert handle.dtype == jnp.float32
        found = program.on(executor)(jnp.float32(2), handle)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 2 * np.asarray(Z).mean(0), rtol=1e-6)
    executor = flower(InProcess.of([np.array([2**40]), np.array([1])]))
    with jax.enable_x64(False), pytest.raises(NoAnswer, match="do not fit into int32"):
        fg.program(z=fg.CLIENTS)(lambda z: fg.sum(z)).on(executor)(executor.clients())


def test_recompute_keeps_nothing_between_messages():
    seen = []

    class Watched(Node):
        def handle(self, request):
            reply = super().handle(request)
            seen.extend(name for name in self.memory.entries if name.startswith(KEPT))
            return reply

    nodes = {i: Watched(lambda _, i=i: Z[i], ANYTHING) for i in range(N)}
    gradient = fg.grad(stateful, mode="reverse")
    for recompute, keeps in ((False, True), (True, False)):
        executor = flower(InProcess(nodes), recompute=recompute)
        found = gradient.on(executor)(X, executor.clients())
        assert_close(found, fg.grad(stateful, mode="mixed").on(REFERENCE)(X, Z))
        assert bool(seen) == keeps
        seen.clear()


# --- who takes part -----------------------------------------------------------------------------

RAGGED = ragged_clients(5)


def test_a_population_draws_the_same_clients_as_a_local_one():
    executor = flower(InProcess.of(RAGGED))
    there, here = executor.population(), fg.population(RAGGED)
    assert len(there) == len(here) == 5
    for seed in range(4):
        key = jax.random.key(seed)
        remote, local = there.sample(key, 3), here.sample(key, 3)
        np.testing.assert_array_equal(remote.index, local.index)
        found = ragged_sgd.on(executor)(jnp.float64(0.3), jnp.ones(2), remote)
        assert_same(found, ragged_sgd.on(REFERENCE)(jnp.float64(0.3), jnp.ones(2), local))
        assert executor.report.answered == {"clients": 3}


def test_shuffled_examples_are_the_same_though_the_capacity_is_rounded():
    def loss(w, batch, mask):
        return jnp.sum((batch["x"] @ w - batch["y"]) ** 2, where=mask)

    @fg.program(data=fg.CLIENTS)
    def train(w, key, data):
        def step(local, batch, mask):
            return local - 0.1 * jax.grad(loss)(local, batch, mask)

        local = data.fold(step, fg.broadcast(w), 2, epochs=2, key=fg.client_key(key))
        return fg.mean(local, weights=data.count), data.count

    executor = flower(InProcess.of(RAGGED))
    there, here = executor.population().everyone, fg.population(RAGGED).everyone
    assert (there.capacity, here.capacity) == (12, 9)
    args = (jnp.ones(2), jax.random.key(1))
    found, counts = train.on(executor)(*args, there)
    assert_same(found, train.on(REFERENCE)(*args, here)[0])
    assert counts.shape == (5,)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 9, 100, 1000])
def test_rounded_up(count):
    found = rounded_up(count)
    assert count <= found <= 1.5 * count + 1
    assert bin(found).count("1") <= 2 and "1" not in bin(found)[4:]


def test_the_server_is_told_shapes_but_not_how_many_examples():
    transport = InProcess.of([{"x": np.zeros((k, 2))} for k in (5, 11)])
    heard = []
    exchange = transport.exchange

    def listen(*args):
        replies = exchange(*args)
        heard.extend(str(reply) for reply in replies.values())
        return replies

    transport.exchange = listen
    assert flower(transport).population().everyone.capacity == 12
    assert heard and not any("11" in text or "[5" in text for text in heard)


def test_placements_may_be_on_different_nodes():
    data = [{"train": np.ones(3) * i} for i in range(3)] + [
        {"test": np.ones(2) * i} for i in (3, 4)
    ]
    executor = flower(InProcess.of(data))

    @fg.program(a=fg.Placement("train"), b=fg.Placement("eval"))
    def f(a, b):
        return fg.sum(a, at=fg.Placement("train")), fg.mean(b, at=fg.Placement("eval"))

    found = f.on(executor)(executor.clients("train", expect=3), executor.clients("test", expect=2))
    assert_same(found, (jnp.full(3, 3.0), jnp.full(2, 3.5)))
    assert executor.report.answered == {"train": 3, "eval": 2}
    assert executor.report.messages == 1  # one round for both


@fg.program(z=fg.CLIENTS)
def sum_with_index(key, z):
    return fg.sum(z * jax.random.uniform(fg.client_key(key)))


def test_a_client_is_its_index_not_its_node():
    key = jax.random.key(0)
    wanted = sum_with_index.on(REFERENCE)(key, Z)

    def with_ids(ids, config):
        nodes = {
            n: Node(lambda _, i=i: Z[i], ANYTHING, context=Context(config(i)))
            for i, n in enumerate(ids)
        }
        return flower(InProcess(nodes))

    bits = set()
    for ids in ((7, 3, 9), (11, 12, 2)):
        executor = with_ids(ids, lambda i: {"partition-id": i})
        found = sum_with_index.on(executor)(key, executor.clients())
        assert_same(found, wanted)
        bits.add(np.asarray(found).tobytes())
    assert len(bits) == 1  # summed in the order of clients, whatever the ids of their nodes
    executor = with_ids((3, 7, 9), lambda i: {})  # nobody says, so it is the rank of the id
    assert_same(sum_with_index.on(executor)(key, executor.clients()), wanted)
    executor = with_ids((3, 7, 9), lambda i: {"partition-id": 5})
    with pytest.raises(FederationError, match="both say that they are client 5"):
        executor.clients()


def test_two_threads_meet_the_same_nodes():
    both = threading.Barrier(2)

    class Slow(Node):
        def handle(self, request):
            if "part" not in request.meta:
                both.wait(60)
            return super().handle(request)

    executor = flower(InProcess({n: Slow(lambda _: np.ones(2), ANYTHING) for n in (5, 8)}))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: executor.clients().clients, range(2)))
    assert found == [(0, 1), (0, 1)]


def test_a_choice_of_clients_is_summed_and_counted():
    executor = flower(InProcess.of(list(np.asarray(normal(2, 5, 3)))))
    some = executor.clients(which=[4, 0, 2])
    found = unweighted_mean.on(executor)(X, some)
    assert_same(found, unweighted_mean.on(REFERENCE)(X, normal(2, 5, 3)[jnp.array([4, 0, 2])]))
    assert executor.report.asked == executor.report.answered == {"clients": 3}


def test_training_and_tuning_run_unchanged():
    def loss(params, batch):
        return (batch["x"] @ params - batch["y"]) ** 2

    algorithm = fg.fed_avgm(loss, fg.local_training(0.05, batch_size=2))
    algorithm = fg.self_tuning(algorithm, learn=["server.learning_rate"])
    executor = flower(InProcess.of(RAGGED))

    def train(clients, on):
        evaluate = fg.Evaluation({"loss": loss}, clients)
        return fg.fit(
            algorithm if on is None else algorithm.on(on),
            clients,
            params=jnp.zeros(2),
            rounds=3,
            cohort_size=5,
            key=jax.random.key(2),
            evaluate=evaluate,
            progress=False,
        )

    here, there = train(fg.population(RAGGED), None), train(executor.population(), executor)
    np.testing.assert_allclose(there.params, here.params, rtol=1e-9)
    for name in ("loss", "eval.loss", "hyper.server.learning_rate"):
        np.testing.assert_allclose(there.history[name], here.history[name], rtol=1e-9)
    assert len(set(there.history["hyper.server.learning_rate"])) > 1


def _squares(x):
    return jnp.sum(x**2, -1)


# Losses that are infinite, or no number, on an example that does not exist.
ILL = {
    "singular at zero": lambda w, batch: (batch["x"] @ w) ** 2 / _squares(batch["x"]),
    "logarithm": lambda w, batch: jnp.log(_squares(batch["x"])) * jnp.sum(w**2),
    "root": lambda w, batch: jnp.sqrt(_squares(batch["x"] * w[None])),
}
ALGORITHMS = {
    "fed_sgd": lambda loss: fg.fed_sgd(loss, 0.1, batch_size=4),
    "fed_avg": lambda loss: fg.fed_avg(loss, fg.local_training(0.1, batch_size=4)),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("loss", ILL)
def test_spare_rows_are_examples_on_every_executor(loss, algorithm):
    rng = np.random.default_rng(0)
    clients = [{"x": rng.normal(size=(n, 2))} for n in (5, 2, 9)]
    made, nodes = ALGORITHMS[algorithm](ILL[loss]), flower(InProcess.of(clients))
    found = []
    for population, executor in (
        (fg.population(clients), REFERENCE),
        (fg.population(clients), None),
        (nodes.population(), nodes),
    ):
        result = fg.fit(
            made if executor is None else made.on(executor),
            population,
            params=jnp.ones(2),
            rounds=2,
            cohort_size=3,
            key=jax.random.key(0),
            progress=False,
        )
        assert np.isfinite(result.params).all()
        found.append(result.params)
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


# --- sent once, traced once ---------------------------------------------------------------------


def test_programs_are_traced_and_sent_once():
    traces = []

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        traces.append(x)
        return jnp.sum(fg.mean(jnp.tanh(fg.broadcast(x) * z)) ** 2)

    transport = InProcess.of(list(np.asarray(Z)))
    executor = flower(transport)
    gradient, handle = fg.grad(f, mode="reverse").on(executor), executor.clients()
    first = gradient(X, handle)
    assert all(b.setup > 0 for b in executor.report.traffic.values())
    count = len(traces)
    assert_same(gradient(X, handle), first)
    assert len(traces) == count
    assert all(b.setup == 0 for b in executor.report.traffic.values())
    assert executor.report.messages == 2  # forward and back
    gradient(X, executor.clients(which=[1]))  # another number of clients, the same program
    assert all(b.setup == 0 for b in executor.report.traffic.values())
    again = flower(executor.federation)  # another executor on the same federation
    fg.grad(f, mode="reverse").on(again)(X, handle)
    assert all(b.setup == 0 for b in again.report.traffic.values())


SCRIPT = """
import jax.numpy as jnp, numpy as np
import fedgrad as fg
from fedgrad.federation.protocol.exported import programs
{pad}
@fg.program(z=fg.CLIENTS)
def f(x, z):
    {pad}
    return jnp.sum(fg.mean(jnp.tanh(fg.broadcast(x) @ z)) ** 2)

plan = fg.plan(fg.grad(f, mode="reverse"), np.ones((2, 3), "f"), np.ones((4, 3, 2), "f"))
for program in programs(plan, [["data", "", 0]]):
    assert b"/" + b"tmp" not in program.content and b".py" not in program.content
    print(program.digest)
"""


def test_digests_depend_on_what_is_computed_and_not_on_where_it_is_written(tmp_path):
    outputs = []
    for i, pad in enumerate(["", "# moved", "# moved again"]):
        path = tmp_path / f"script{i}.py"
        path.write_text("\n" * i + SCRIPT.format(pad=pad))
        env = {**os.environ, "PYTHONHASHSEED": str(i)}
        run = subprocess.run([sys.executable, path], capture_output=True, text=True, env=env)
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout.split())
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(set(outputs[0])) == len(outputs[0]) >= 2


def test_stages_are_exported_for_every_platform():
    plan = fg.plan(two_rounds, X, jax.ShapeDtypeStruct((5, 3), jnp.float64))
    for program in programs(plan, [["data", "", 0]]):
        again = read_program(program.content)
        assert tuple(again.exported.platforms) == PLATFORMS
        assert again.digest == program.digest in str(program)
        assert "stablehlo" in again.text


def test_a_plan_of_handles_is_the_plan_of_what_they_stand_for():
    executor = flower(InProcess.of(RAGGED))
    program, args = fg.grad(ragged_sgd, (0, 1)), (jnp.float64(0.3), jnp.ones(2))
    there = fg.plan(program, *args, executor.population().everyone)
    here = fg.plan(program, *args, fg.population(RAGGED).everyone)
    assert (there.traffic, there.clients, there.rules) == (here.traffic, here.clients, here.rules)


def test_what_can_be_allowed_beforehand_is_what_is_run():
    wanted = fg.grad(two_rounds, mode="reverse")
    data = list(np.asarray(Z))
    asking = flower(InProcess.of(data))
    digests = [program.digest for program in asking.programs(wanted, X, asking.clients())]
    allowed = Policy(programs=frozenset(digests))
    executor = flower(InProcess.of(data, allowed))
    assert_same(wanted.on(executor)(X, executor.clients()), wanted.on(REFERENCE)(X, Z))


# --- several at once ----------------------------------------------------------------------------


def test_several_programs_at_once():
    executor = flower(InProcess.of(list(np.asarray(Z))))
    handle = executor.clients()
    cases = [fg.grad(two_rounds, mode=m) for m in ("forward", "reverse", "mixed")]
    cases += [unweighted_mean, fg.grad(stateful, mode="reverse")]
    wanted = [program.on(REFERENCE)(X, Z) for program in cases]

    def run(i):
        found = cases[i % 5].on(executor)(X * 1.0, handle)
        return i, found, executor.report.program

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i, found, name in pool.map(run, range(20)):
            assert_same(found, wanted[i % 5])
            assert name == cases[i % 5].name
    executor.federation.flush()
    assert kept(executor.federation.transport) == []


# --- misuse says what to do ---------------------------------------------------------------------


def _error(call, kind, words):
    with pytest.raises(kind, match=words) as caught:
        call()
    assert "test_federation.py:" in str(caught.value)


def test_misuse():
    transport = InProcess.of(
        [{"z": z, "other": np.ones(i + 1)} for i, z in enumerate(np.asarray(Z))]
    )
    executor = flower(transport)
    z = executor.clients("z")
    f = unweighted_mean.on(executor)
    _error(lambda: f(X, Z), fg.CohortError, "it is on the nodes; got .*executor.clients")
    _error(lambda: f(X, executor.population("z")), fg.CohortError, "got NodePopulation")
    _error(lambda: jax.jit(lambda x: f(x, z))(X), fg.PlanError, r"fg\.grad\(unweighted_mean\)")
    _error(lambda: executor.clients("zz"), fg.ArgumentError, "Did you mean 'z'")
    _error(lambda: executor.clients("other"), fg.CohortError, "Clients 0 and 1 have different data")
    _error(lambda: executor.clients("z", [0, 0]), fg.CohortError, "different clients among")
    _error(lambda: executor.clients("z", [7]), fg.CohortError, "different clients among")
    _error(lambda: executor.population("z").sample(jax.random.key(0), 4), fg.CohortError, "1 to 3")
    _error(lambda: executor.population("z").select([1, 1]), fg.CohortError, "different")
    _error(lambda: executor.population("z").select([9]), fg.CohortError, "no client 9")
    _error(
        lambda: flower(transport, missing="skip"), fg.ArgumentError, "Known: drop, fail, restart"
    )
    _error(lambda: flower(transport, deadline=0), fg.ArgumentError, "deadline is positive")
    _error(lambda: flower(object()), fg.ArgumentError, "address of a SuperLink")
    _error(lambda: flower(transport, insecure=True), fg.ArgumentError, "address of a SuperLink")


def test_client_code_that_calls_back_cannot_be_sent():
    @fg.program(z=fg.CLIENTS)
    def f(z):
        jax.debug.print("{}", z)
        return fg.sum(z)

    executor = flower(InProcess.of(list(np.asarray(Z))))
    _error(lambda: f.on(executor)(executor.clients()), fg.PlanError, "no callbacks")


@pytest.mark.parametrize(
    "data",
    [np.ones(2), {"a": [np.ones(1), (np.ones(2), np.ones(3))], "b": {}}, (np.ones(1), None), []],
    ids=str,
)
def test_the_structure_of_data_travels(data):
    node = Node(lambda _: data, Policy())
    described = node.data.describe("", examples=False)
    leaves = jax.tree.leaves(data)
    assert jax.tree.structure(decoded(json.loads(described["structure"]), leaves)) == (
        jax.tree.structure(data)
    )
