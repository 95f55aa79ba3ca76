"""One process of a test on several devices. See test_mesh.py, which starts it and reads its report.

`python mesh_worker.py REPORT DEVICES [NUMBER PROCESSES ADDRESS]`: without the last three it is
alone; with them it is one of several processes, which all do the same.
"""

import contextlib
import functools
import pickle
import re
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

REPORT, DEVICES = sys.argv[1], int(sys.argv[2])
ALONE = len(sys.argv) == 3
jax.config.update("jax_num_cpu_devices", DEVICES)
if not ALONE:
    NUMBER, PROCESSES, ADDRESS = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(ADDRESS, PROCESSES, NUMBER, coordinator_bind_address=ADDRESS)

import where  # noqa: E402

sys.path += where.ROOMS
import conftest  # noqa: E402
from test_derivatives import IMPOSSIBLE, MODES, derived, scalar  # noqa: E402
from test_ragged import W, expected, make_clients, training  # noqa: E402

import fedgrad as fg  # noqa: E402
from fedgrad.core.graph import exchanges  # noqa: E402
from programs import TABLE, assert_same  # noqa: E402

MESH = fg.executors.mesh()
EVERYWHERE, SPLIT = (
    jax.NamedSharding(MESH.devices.mesh, jax.P(*axes)) for axes in ((), ("clients",))
)
COLLECTIVES = ["all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"]
X, Z = np.arange(1.0, 4.0), np.random.default_rng(0).normal(size=(48, 3))


def number_of_clients(case):
    """Fewer than devices, as many, more but not a multiple."""
    return (3, 8, 9)[[c.name for c in TABLE].index(case.name) % 3]


def cases(names):
    return [next(c for c in TABLE if c.name == name) for name in names.split()]


def to_host(x):
    return np.asarray(multihost_utils.process_allgather(x, tiled=True)) if not ALONE else x


def collectives(compiled):
    text = compiled.as_text()
    found = {k: len(re.findall(rf"= [^=\n]* {k}(?:-start)?\(", text)) for k in COLLECTIVES}
    return {k: n for k, n in found.items() if n}


# --- the table ----------------------------------------------------------------------------------


def run_table():
    """By program and mode: the result, how many messages the plan has, and the collectives that
    the compiled program has for them (only if this process is alone, which takes the time)."""
    found = {}
    for case in TABLE:
        args = case.args(number_of_clients(case))
        for mode in (None, "forward", "reverse", "mixed"):
            if (case.name, mode) in IMPOSSIBLE or (mode is None and not case.client_outputs):
                continue  # with its gradient comes the value
            program = derived(case, mode) if mode else case.program
            found[case.name, mode] = run_case(program.on(MESH), args)
        conftest.forget_what_was_compiled()
    return found


def run_case(program, args):
    if not ALONE:
        return jax.tree.map(to_host, program(*args)), 0, {}
    args = [
        jax.tree.map(
            functools.partial(placed, name in program.placements),
            arg,
            is_leaf=lambda x: isinstance(x, fg.Cohort),
        )
        for name, arg in zip(program.signature.parameters, args, strict=True)
    ]
    messages = sum(bool(x.up) for _, x, _ in exchanges(fg.plan(program, *args).graph))
    compiled = jax.jit(program).lower(*args).compile()
    return jax.device_get(compiled(*args)), messages, collectives(compiled)


def placed(at_clients, x):
    split = at_clients and not isinstance(x, fg.Cohort) and len(x) % MESH.devices.count == 0
    return jax.device_put(x, SPLIT if split else EVERYWHERE)


# --- checks -------------------------------------------------------------------------------------

CHECKS = {}


def check(fun=None, *, alone=True, together=True):
    """A check for a process that is alone, for several together, or for both."""
    if fun is None:
        return functools.partial(check, alone=alone, together=together)
    if alone if ALONE else together:
        CHECKS[fun.__name__] = fun
    return fun


def refused(error, words, call):
    try:
        call()
    except error as message:
        assert re.search(words, str(message)), message
        return
    raise AssertionError(f"no {error.__name__}")


@fg.program(z=fg.CLIENTS)
def doubled(x, z):
    here = fg.broadcast(x) * z
    return fg.sum(here), fg.mean(jnp.sin(here)), here * 2


def doubled_by_hand(x, z):
    here = x * z
    return here.sum(0), np.sin(here).mean(0), here * 2


@check
def any_number_of_clients():
    for n in (1, 3, 4, 8, 17, 48):
        for chunk in (None, 2):
            found = doubled.on(fg.executors.mesh(chunk=chunk))(X, Z[:n])
            assert_same(jax.tree.map(to_host, found), doubled_by_hand(X, Z[:n]))


@check
def values_are_where_they_belong():
    for n, at_clients in ((16, SPLIT), (17, EVERYWHERE)):
        total, mean, kept = doubled.on(MESH)(X, Z[:n])
        for x, sharding in ((total, EVERYWHERE), (mean, EVERYWHERE), (kept, at_clients)):
            assert x.sharding.is_equivalent_to(sharding, x.ndim), (n, x.sharding)


@fg.program(z=fg.CLIENTS, state=fg.CLIENTS)
def accumulate(x, z, state):
    state = state + fg.broadcast(x) * z
    return fg.mean(state), state


@check
def state_stays_at_the_clients():
    part = slice(None) if ALONE else slice(NUMBER * 8, (NUMBER + 1) * 8)
    z = MESH.shard({"z": Z[:16][part]})["z"]
    assert z.sharding.is_equivalent_to(SPLIT, 2) and z.shape == (16, 3)
    state = MESH.shard(np.zeros_like(Z[:16][part]))
    x = X
    for _ in range(3):
        x, state = accumulate.on(MESH)(x, z, state)
        assert state.sharding.is_equivalent_to(SPLIT, 2)
    wanted, kept = X, 0.0
    for _ in range(3):
        kept = kept + wanted * Z[:16]
        wanted = kept.mean(0)
    assert_same(jax.tree.map(to_host, (x, state)), (wanted, kept))
    refused(fg.CohortError, r"mesh\.population", lambda: MESH.shard(Z[:3]))
    refused(fg.CohortError, r"leaves of shapes", lambda: MESH.shard({"a": Z, "b": np.float64(1)}))


SIZES = [5, 53, 17, 1, 30, 7, 7, 22, 3, 12, 9, 40, 2, 2, 11, 6, 8]
CLIENTS = make_clients(SIZES)
CHOSEN = [[3, 1, 16, 0], [*range(8)], [12, 5, 5, 2, 9, 16, 15, 14, 1]]
train = training(10)


@fg.program(data=fg.CLIENTS)
def after_training(w, data):
    return jnp.sum(train(w, data)[0] ** 2)


def own_population(clients=None):
    """The same clients; each process brings some of them, unevenly."""
    clients = CLIENTS if clients is None else clients
    mine = clients if ALONE else (clients[:6], clients[6:])[NUMBER]
    return MESH.population(mine)


@check
def clients_of_different_sizes():
    for everyone in (fg.population(CLIENTS), own_population()):
        assert len(everyone) == 17 and everyone.counts.tolist() == SIZES
        for chunk in (None, 3):
            executor = fg.executors.mesh(chunk=chunk)
            for chosen in CHOSEN[1:] if chunk else CHOSEN[:1]:
                found = train.on(executor)(W, everyone.select(chosen))
                found = jax.tree.map(to_host, found)
                assert_same(found, expected([CLIENTS[i] for i in chosen], 10))
        found = jax.tree.map(to_host, train.on(MESH)(W, everyone.everyone))
        assert_same(found, expected(CLIENTS, 10))


@check
def derivatives_with_clients_of_different_sizes():
    plain, own = fg.population(CLIENTS), own_population()
    for mode in ("forward", "reverse"):
        gradient = fg.value_and_grad(after_training, mode=mode)
        key = jax.random.key(7)
        wanted = jax.device_get(gradient(W, plain.sample(key, 6)))
        for population in (plain, own):
            cohort = population.sample(key, 6)
            found = gradient.on(MESH)(W, cohort)
            assert_same(jax.tree.map(to_host, found), wanted, rtol=1e-8)


@check
def nobody_reads_bad_data_of_clients_who_take_no_part():
    """In empty seats neither, whose rows are whatever is there on the device."""
    chosen, found = [2, 11], []
    for bad in (1.0, np.nan):
        factor = [1.0 if i in chosen else bad for i in range(len(CLIENTS))]
        clients = [{**c, "x": c["x"] * f} for c, f in zip(CLIENTS, factor, strict=True)]
        cohort = own_population(clients).select(chosen)
        slopes = fg.grad(after_training).on(MESH), jax.grad(after_training.on(MESH))
        found.append([to_host(f(W, cohort)) for f in (after_training.on(MESH), *slopes)])
    assert_same(found[1], found[0])


@check(alone=False)
def training_runs_unchanged():
    """`fit` of a self-tuning algorithm, with each example on one device."""

    def loss(w, batch):
        return (batch["x"] @ w - batch["y"] / 100) ** 2

    algorithm = fg.self_tuning(
        fg.fed_avg(loss, fg.local_training(0.02, batch_size=10)), learn="server.learning_rate"
    )
    train = functools.partial(
        fg.fit, algorithm, params=W, rounds=3, cohort_size=6, key=jax.random.key(0), progress=False
    )
    wanted = train(fg.population(CLIENTS))
    found = train(own_population())  # which says that it runs on the mesh
    assert_same(to_host(found.params), wanted.params)
    assert_same(found.history["loss"], wanted.history["loss"])
    rates = [np.asarray(r.hyper["server"]["learning_rate"]) for r in (found, wanted)]
    assert_same(*rates)
    assert rates[0] != 1  # it has learned


@check(alone=False)
def a_run_goes_on_from_one_folder():
    """Which the first process writes, and all of them read: docs/mesh.md."""

    def loss(w, batch):
        return (batch["x"] @ w - batch["y"] / 100) ** 2

    def train(rounds, **out):
        found = fg.fit(
            fg.fed_avgm(loss, client_learning_rate=0.02), own_population(), params=W, rounds=rounds,
            cohort_size=6, key=jax.random.key(0), progress=False, **out,
        )  # fmt: skip
        multihost_utils.sync_global_devices("trained")  # and saved
        return found

    out = {"out": Path(REPORT).parent / "run"}
    train(2, **out)
    found, wanted = train(4, **out), train(4)
    assert_same(to_host(found.params), to_host(wanted.params))
    assert_same(found.history["loss"], wanted.history["loss"])


@check
def what_clients_keep_is_kept_wherever_they_are():
    """`fit` of SCAFFOLD: the state of all clients, of whom a round has a few."""

    def loss(w, batch):
        return (batch["x"] @ w - batch["y"] / 100) ** 2

    algorithm = fg.scaffold(loss, fg.local_training(0.02, batch_size=10))
    train = functools.partial(
        fg.fit, algorithm, params=W, rounds=3, cohort_size=3, key=jax.random.key(0), progress=False
    )
    wanted, found = train(fg.population(CLIENTS)), train(own_population())
    assert_same(jax.tree.map(to_host, found.state), wanted.state)


@check
def sampling_does_not_depend_on_where_the_examples_are():
    plain, own = fg.population(CLIENTS), own_population()
    for seed in range(5):
        wanted, found = (p.sample(jax.random.key(seed), 7) for p in (plain, own))
        np.testing.assert_array_equal(wanted.index, found.index)
        np.testing.assert_array_equal(wanted.count, found.count)
        seats = found.client.reshape(MESH.devices.count, -1)
        for device, clients in enumerate(seats):
            chosen = found.index[clients[clients >= 0]]
            assert (own.device[chosen] == device).all()
        assert sorted(seats[seats >= 0]) == list(range(7))


@check
def the_digest_does_not_depend_on_where_the_examples_are():
    known = own_population().digest
    assert known == fg.population(CLIENTS).digest, known
    other = [*CLIENTS[:-1], {**CLIENTS[-1], "y": CLIENTS[-1]["y"] + 1}]  # of one process
    assert own_population(other).digest not in (known, None)


@check
def examples_stay_on_their_device():
    own = own_population()
    for leaf in jax.tree.leaves(own.everyone.store):
        assert leaf.sharding.is_equivalent_to(SPLIT, leaf.ndim)
        held = sum(shard.data.shape[0] for shard in leaf.addressable_shards)
        assert held == leaf.shape[0] // (1 if ALONE else 2)
    rows = leaf.shape[0] // MESH.devices.count
    assert rows < sum(SIZES)  # not everybody's
    np.testing.assert_array_equal(own.everyone.offset // rows, own.device)
    refused(fg.CohortError, "at least one for every", lambda: MESH.population(CLIENTS[:1]))


@check
def every_dtype_in_one_message():
    n = 2 * MESH.devices.count + 1
    rng = np.random.default_rng(1)
    z = {
        "bool": rng.integers(0, 2, n).astype(bool),
        "int8": rng.integers(-128, 128, n).astype(np.int8),
        "int32": rng.integers(-(2**31), 2**31, n).astype(np.int32),
        "int64": rng.integers(-(2**62), 2**62, (n, 2)),
        "uint64": rng.integers(0, 2**63, n).astype(np.uint64) * 2 + 1,
        "float16": np.where(np.arange(n) == 0, 512, 0.125).astype(np.float16),
        "float32": rng.normal(size=(n, 3)).astype(np.float32),
        "float64": rng.normal(size=n),
        "complex64": (rng.normal(size=n) + 1j * rng.normal(size=n)).astype(np.complex64),
    }
    total = fg.program(z=fg.CLIENTS)(lambda z: fg.sum(z))
    for names in (list(z), ["int32", "float32"], ["bool", "uint64"], ["float16"], ["complex64"]):
        given = {name: z[name] for name in names}
        found = jax.tree.map(to_host, total.on(MESH)(given))
        for name in names:
            wide = {"float16": np.float32}.get(name, z[name].dtype)
            wanted = z[name].astype(wide).sum(0) if name != "int32" else z[name].sum(0)
            if np.issubdtype(z[name].dtype, np.inexact):
                tight = 2e-6 if z[name].dtype.itemsize < 8 or name == "complex64" else 1e-14
                np.testing.assert_allclose(found[name], wanted.astype(z[name].dtype), rtol=tight)
            else:
                np.testing.assert_array_equal(found[name], wanted)  # wraps around, as in numpy
        if ALONE:
            compiled = jax.jit(total.on(MESH)).lower(given).compile()
            assert collectives(compiled) == {"all-reduce": 1}, names


@check(alone=False)
def what_differs_between_processes_is_refused():
    z = Z[:8]
    refused(
        fg.ArgumentError,
        r"doubled: argument 'x' is not the same in every process",
        lambda: doubled.on(MESH)(X + NUMBER, z),
    )
    refused(
        fg.ArgumentError,
        r"argument 'z' is not the same.*mesh\.shard.*mesh\.population",
        lambda: doubled.on(MESH)(X, z + NUMBER),
    )
    refused(
        fg.ArgumentError,
        r"argument 'data' is not the same",
        lambda: train.on(MESH)(W, fg.cohort(make_clients(SIZES, seed=NUMBER))),
    )
    refused(
        fg.CohortError,
        r"have \[4, 6\] clients and \[2, 2\] devices",
        lambda: MESH.shard(Z[: 4 + 2 * NUMBER]),
    )
    refused(
        fg.CohortError,
        "not the same structure",
        lambda: MESH.population([{"x": np.ones((3, 2 + NUMBER))}] * 4),
    )


@check(together=False)
def no_client_changes_its_device():
    """Nothing is communicated but the sums, with state at clients of different sizes too."""

    @fg.program(data=fg.CLIENTS, state=fg.CLIENTS)
    def f(w, data, state):
        trained, local, _ = train(w, data)
        return trained, state + local

    cohort = jax.device_put(fg.population(CLIENTS).select(range(16)), EVERYWHERE)
    args = jax.device_put(W, EVERYWHERE), cohort, jax.device_put(Z[:16, :2], SPLIT)
    compiled = jax.jit(f.on(MESH)).lower(*args).compile()
    assert collectives(compiled) == {"all-reduce": 1}
    found = compiled(*args)
    assert found[1].sharding.is_equivalent_to(SPLIT, 2)
    wanted, local, _ = expected(CLIENTS[:16], 10)
    assert_same(jax.device_get(found), (wanted, local + Z[:16, :2]))
    for everyone in (cohort, own_population().select(range(16))):
        compiled = jax.jit(after_training.on(MESH)).lower(args[0], everyone).compile()
        assert collectives(compiled) == {"all-reduce": 1}


@check(together=False)
def jax_from_outside():
    """As with `local`; a custom_vjp of the server sees whole cotangents, not parts of them."""
    for case in cases("custom_vjp_inside stateful"):
        args = case.args(9)
        found = jax.grad(case.program.on(MESH), (0, 1))(*args)
        assert_same(jax.device_get(found), jax.grad(case.centralized, (0, 1))(*args))
    program = case.program.on(MESH)
    x, z = case.args(9)
    many = jnp.stack([x, x + 1])
    wanted = jnp.stack([case.centralized(row, z) for row in many])
    assert_same(jax.device_get(jax.vmap(program, (0, None))(many, z)), wanted)
    found = jax.jit(lambda x: program(x * 2, z) + case.program(x, z))(x)
    assert_same(jax.device_get(found), case.centralized(x * 2, z) + case.centralized(x, z))


@check(together=False)
def every_kind_of_mesh_and_argument():
    devices = jax.devices()
    explicit = (jax.sharding.AxisType.Explicit,)
    meshes = {
        "explicit": (jax.make_mesh((8,), ("clients",), explicit), "clients"),
        "two axes": (jax.sharding.Mesh(np.reshape(devices, (2, 4)), ("model", "people")), "people"),
        "some devices": (jax.sharding.Mesh(devices[2:5], ("clients",)), "clients"),
        "one device": (jax.sharding.Mesh(devices[3:4], ("clients",)), "clients"),
        "other order": (jax.sharding.Mesh(devices[::-1], ("clients",)), "clients"),
    }
    for mesh, axis in meshes.values():
        executor = fg.executors.mesh(mesh, axis)
        split = jax.NamedSharding(mesh, jax.P(axis))
        for n in (5, 8):
            places = [
                None,
                devices[0] if n == 5 else EVERYWHERE,
                *([split] if n % mesh.shape[axis] == 0 else []),
            ]
            for place in places:
                z = Z[:n] if place is None else jax.device_put(Z[:n], place)
                found = doubled.on(executor)(X, z)
                assert_same(jax.device_get(found), doubled_by_hand(X, Z[:n]))
                # What one program gives, the next one takes.
                again = doubled.on(executor)(found[0], found[2])
                wanted = doubled_by_hand(*(np.asarray(found[i]) for i in (0, 2)))
                assert_same(jax.device_get(again), wanted)
        assert_same(
            jax.device_get(train.on(executor)(W, executor.population(CLIENTS).everyone)),
            expected(CLIENTS, 10),
        )
        gradient = jax.grad(lambda x: doubled.on(executor)(x, Z[:5])[1].sum())(X)
        np.testing.assert_allclose(gradient, (np.cos(X * Z[:5]) * Z[:5]).mean(0))


@check(together=False)
def keys_numbers_and_constants_are_arguments_too():
    @fg.program(z=fg.CLIENTS, keys=fg.CLIENTS)
    def f(key, scale, z, keys):
        drawn = jax.random.normal(fg.client_key(key)) + jax.random.normal(keys)
        return fg.sum(fg.broadcast(scale) * drawn * z), keys, 3.0 * jnp.ones_like(z)

    for n in (5, 8):
        args = jax.random.key(0), 2.0, Z[:n, 0], jax.random.split(jax.random.key(1), n)
        found, wanted = (f.on(e)(*args) for e in (MESH, fg.executors.reference()))
        assert_same(jax.device_get((found[0], found[2])), jax.device_get((wanted[0], wanted[2])))
        np.testing.assert_array_equal(*(jax.random.key_data(x[1]) for x in (found, wanted)))
    refused(fg.CohortError, "got a list of 3", lambda: doubled.on(MESH)(X, [1.0, 2.0, 3.0]))
    refused(fg.ArgumentError, "not an array", lambda: doubled.on(MESH)("x", Z))
    refused(fg.CohortError, "population", lambda: train.on(MESH)(W, fg.population(CLIENTS)))
    refused(fg.CohortError, "no clients", lambda: doubled.on(MESH)(X, Z[:0]))


@check(together=False)
def a_cohort_belongs_to_its_mesh():
    own = own_population()
    half = fg.executors.mesh(jax.sharding.Mesh(jax.devices()[:4], ("clients",)))
    refused(
        fg.CohortError, "with the mesh that the program", lambda: train.on(half)(W, own.everyone)
    )
    both = fg.program(a=fg.CLIENTS, b=fg.CLIENTS)(lambda a, b: fg.sum(a.count + b.count))
    refused(fg.CohortError, "2 cohorts", lambda: both.on(MESH)(own.everyone, own.everyone))
    sampled = jax.jit(lambda key: after_training.on(MESH)(W, own.sample(key, 3)))
    refused(fg.CohortError, "outside of jit", lambda: sampled(jax.random.key(0)))
    for executor in (
        fg.executors.local(),
        fg.executors.reference(),
    ):  # on one machine, it is a cohort
        found = train.on(executor)(W, own.select(CHOSEN[2]))
        assert_same(jax.device_get(found), expected([CLIENTS[i] for i in CHOSEN[2]], 10))


@check(together=False)
def few_compilations():
    traces = []

    @fg.program(data=fg.CLIENTS)
    def f(w, data):
        traces.append(None)
        return fg.mean(fg.broadcast(w) * data.count.astype(w.dtype))

    plain, own = fg.population(CLIENTS), own_population()
    for population, most in ((plain, 1), (own, 4)):
        traces.clear()
        for seed in range(12):
            f.on(MESH)(W, population.sample(jax.random.key(seed), 8))
        assert len(traces) <= most, len(traces)


@check(together=False)
def local_deals_over_its_devices():
    for devices in (None, 3, 1):
        executor = fg.executors.local(devices=devices)
        some = cases("client_outputs train_then_eval scan_client_state")
        for n, case in zip((1, 5, 9), some, strict=True):
            args = case.args(n)
            found = jax.device_get(case.program.on(executor)(*args))
            assert_same(found, jax.device_get(case.centralized(*args)))
        found = train.on(executor)(W, fg.population(CLIENTS).select(CHOSEN[2]))
        assert_same(jax.device_get(found), expected([CLIENTS[i] for i in CHOSEN[2]], 10))
        # Placements of different sizes, and results that go on to a program with more clients.
        few = doubled.on(executor)(X, Z[:3])
        many = doubled.on(executor)(few[0], Z[:12])
        assert_same(jax.device_get(many[0]), np.asarray(few[0]) * Z[:12].sum(0))


@check(together=False)
def one_all_reduce_a_message_in_optimized_programs():
    with fully_optimized():
        for case in cases("pytrees_and_aux fedavgm"):
            for mode in ("forward", "reverse", "mixed"):
                args = case.args(16)
                program = fg.value_and_grad(scalar(case), case.server_argnums, **MODES[mode])
                _, messages, found = run_case(program.on(MESH), args)
                assert found == {"all-reduce": messages}, (case.name, mode, found)


@contextlib.contextmanager
def fully_optimized():
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)


def main():
    report = {"table": run_table(), "checks": {}}
    for name, fun in CHECKS.items():
        try:
            fun()
            report["checks"][name] = ""
        except Exception:
            report["checks"][name] = traceback.format_exc()
    with open(REPORT, "wb") as file:
        pickle.dump(report, file)


if __name__ == "__main__":
    main()
