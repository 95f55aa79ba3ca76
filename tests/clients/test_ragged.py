"""Clients of different sizes: equal to running each client alone on its own examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from programs import assert_same, unpadded

SIZES = [5, 53, 17, 1, 30]


def make_clients(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {"x": rng.normal(size=(k, 2)), "y": np.arange(k) + 100 * i} for i, k in enumerate(sizes)
    ]


CLIENTS = make_clients(SIZES)
POPULATION = fg.population(CLIENTS)
EXECUTORS = {
    "reference": fg.executors.reference(),
    "local": fg.executors.local(),
    "chunk1": fg.executors.local(chunk=1),
    "chunk3": fg.executors.local(chunk=3),
    "chunk9": fg.executors.local(chunk=9),
}
every_executor = pytest.mark.parametrize("executor", EXECUTORS.values(), ids=EXECUTORS)


def batches(client, size):
    """A client's batches in plain numpy; the last one is as short as it is."""
    for start in range(0, len(client["y"]), size):
        yield {name: leaf[start : start + size] for name, leaf in client.items()}


def gradient(w, batch):
    """Of the mean squared error, in plain numpy."""
    error = batch["x"] @ w - batch["y"] / 100
    return 2 * error @ batch["x"] / len(error)


def masked_gradient(w, batch, mask):
    error = jnp.where(mask, batch["x"] @ w - batch["y"] / 100, 0)
    return 2 * error @ batch["x"] / jnp.sum(mask).astype(error.dtype)


def alone(client, w, size, epochs=1, lr=0.1):
    for _ in range(epochs):
        for batch in batches(client, size):
            w = w - lr * gradient(w, batch)
    return w


def training(size, epochs=1):
    @fg.program(data=fg.CLIENTS)
    def train(w, data):
        def step(local, batch, mask):
            return local - 0.1 * masked_gradient(local, batch, mask)

        local = data.fold(step, fg.broadcast(w), size, epochs=epochs)
        return fg.mean(local, weights=data.count), local, data.count

    return train


W = jnp.array([0.5, -1.0])


def expected(clients, size, epochs=1):
    local = np.stack([alone(c, np.asarray(W), size, epochs) for c in clients])
    counts = np.array([len(c["y"]) for c in clients])
    return counts @ local / counts.sum(), local, counts.astype(np.int32)


# --- local training -----------------------------------------------------------------------------


@every_executor
def test_ragged_equals_one_by_one(executor):
    found = training(10).on(executor)(W, POPULATION.everyone)
    assert_same(found, expected(CLIENTS, 10))


@pytest.mark.parametrize("size, epochs", [(1, 1), (4, 3), (53, 1), (100, 2)])
def test_every_batch_size_and_number_of_epochs(size, epochs):
    found = training(size, epochs)(W, POPULATION.everyone)
    assert_same(found, expected(CLIENTS, size, epochs))


def test_order_of_clients_is_kept():
    order = [3, 1, 4, 0]
    found = training(10)(W, POPULATION.select(order))
    assert_same(found, expected([CLIENTS[i] for i in order], 10))


def test_a_client_may_be_chosen_twice_and_alone():
    for order in ([1, 1, 3], [2]):
        found = training(10)(W, POPULATION.select(order))
        assert_same(found, expected([CLIENTS[i] for i in order], 10))


def test_a_cohort_from_a_list():
    some = [CLIENTS[1], CLIENTS[3]]
    assert_same(training(10)(W, fg.cohort(some)), expected(some, 10))


@every_executor
def test_53_examples_in_batches_of_10_are_6_steps_and_the_last_has_3(executor):
    @fg.program(data=fg.CLIENTS)
    def f(data):
        def step(state, batch, mask):
            steps, last, seen = state
            return steps + 1, jnp.sum(mask), seen + jnp.sum(jnp.where(mask, batch["y"], 0))

        return data.fold(step, (0, 0, 0), 10), data.fold(step, (0, 0, 0), 10, epochs=2)

    once, twice = f.on(executor)(POPULATION.everyone)
    totals = np.array([c["y"].sum() for c in CLIENTS])
    np.testing.assert_array_equal(once[0], [1, 6, 2, 1, 3])
    np.testing.assert_array_equal(once[1], [5, 3, 7, 1, 10])
    np.testing.assert_array_equal(once[2], totals)
    np.testing.assert_array_equal(twice[0], [2, 12, 4, 2, 6])
    np.testing.assert_array_equal(twice[1], once[1])
    np.testing.assert_array_equal(twice[2], 2 * totals)


@pytest.mark.parametrize("executor", ["reference", "local", "chunk3"])
def test_shuffled_epochs_see_every_example_once(executor):
    size, epochs = 4, 2

    @fg.program(data=fg.CLIENTS)
    def f(key, data):
        def step(state, batch, mask):
            i, seen = state
            row = jnp.where(mask, batch["y"], -1)
            return i + 1, jax.lax.dynamic_update_slice(seen, row, (i * size,))

        start = (0, jnp.full(2 * 60, -1))
        return data.fold(step, start, size, epochs=epochs, key=fg.client_key(key))

    steps, seen = f.on(EXECUTORS[executor])(jax.random.key(0), POPULATION.everyone)
    for client, n, row in zip(CLIENTS, steps, np.asarray(seen), strict=True):
        k = len(client["y"])
        assert n == epochs * -(-k // size)
        first, second = row[: n * size].reshape(epochs, -1)
        for epoch in (first, second):  # padding only at the end, every example once
            assert sorted(epoch[:k]) == list(client["y"]) and (epoch[k:] == -1).all()
        if k > 4:
            assert (first != second).any() and list(first[:k]) != list(client["y"])


def test_shuffling_does_not_depend_on_the_cohort_or_the_executor():
    f = fg.program(data=fg.CLIENTS)(
        lambda key, data: data.fold(
            lambda c, batch, mask: c * 0.9 + jnp.sum(jnp.where(mask, batch["x"][:, 0], 0)),
            jnp.float64(0),
            4,
            key=fg.client_key(key),
        )
    )
    key = jax.random.key(7)
    full = f(key, POPULATION.everyone)
    np.testing.assert_allclose(f(key, POPULATION.select([4, 1])), full[jnp.array([4, 1])])
    np.testing.assert_allclose(f.on(EXECUTORS["reference"])(key, POPULATION.everyone), full)
    other = f(jax.random.key(8), POPULATION.everyone)
    np.testing.assert_array_equal(other != full, [True, True, True, False, True])


# --- one client's view --------------------------------------------------------------------------


@every_executor
def test_count_take_and_batch(executor):
    @fg.program(data=fg.CLIENTS)
    def f(data):
        first, last = data.take(jnp.array([0, 10**6]))["y"]
        rows, mask = data.batch(2, 3)
        one = data.take(data.count // 2)
        return data.count, first, last, jnp.where(mask, rows["y"], -1), mask, one

    count, first, last, rows, mask, one = f.on(executor)(POPULATION.everyone)
    np.testing.assert_array_equal(count, SIZES)
    np.testing.assert_array_equal(first, [c["y"][0] for c in CLIENTS])
    np.testing.assert_array_equal(last, [c["y"][-1] for c in CLIENTS])
    wanted = [np.pad(c["y"][2:5], (0, 3), constant_values=-1)[:3] for c in CLIENTS]
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_array_equal(mask, [[2 + j < k for j in range(3)] for k in SIZES])
    np.testing.assert_array_equal(one["x"], [c["x"][len(c["x"]) // 2] for c in CLIENTS])


def test_the_last_client_of_the_store_is_not_shifted():
    """A slice past the end of an array is moved back by XLA; here it must not be."""

    @fg.program(data=fg.CLIENTS)
    def f(data):
        rows, mask = data.batch(25, 10)
        return jnp.where(mask, rows["y"], -1)

    found = f(POPULATION.select([4]))
    np.testing.assert_array_equal(found, [[425, 426, 427, 428, 429, -1, -1, -1, -1, -1]])


def test_a_batch_larger_than_everything():
    @fg.program(data=fg.CLIENTS)
    def f(data):
        rows, mask = data.batch(0, 64)
        return jnp.sum(jnp.where(mask, rows["y"], 0)), jnp.sum(mask)

    total, count = f(POPULATION.everyone)
    np.testing.assert_array_equal(total, [c["y"].sum() for c in CLIENTS])
    np.testing.assert_array_equal(count, SIZES)


def test_shuffled_indices():
    f = fg.program(data=fg.CLIENTS)(lambda key, data: data.shuffled(fg.client_key(key)))
    orders = np.asarray(f(jax.random.key(0), POPULATION.everyone))
    assert orders.shape == (5, 53)
    for order, k in zip(orders, SIZES, strict=True):
        assert sorted(order[:k]) == list(range(k))
        assert sorted(order) == list(range(53))
    assert list(orders[1]) != sorted(orders[1])


@pytest.mark.promotes("dtype")
def test_examples_of_every_structure_and_dtype():
    clients = [(np.arange(k, dtype=np.int8), [np.full((k, 2, 2), k, np.float32)]) for k in (2, 3)]

    @fg.program(data=fg.CLIENTS)
    def f(data):
        a, (b,) = data.take(jnp.arange(3))
        mask = jnp.arange(3) < data.count
        return fg.sum(jnp.sum(a * mask)), fg.sum(jnp.sum(b * mask[:, None, None])), b

    total, square, b = f(fg.cohort(clients))
    assert (int(total), float(square), b.dtype) == (1 + 3, 2 * 8 + 3 * 12, jnp.float32)


def test_ragged_and_stacked_arguments_together():
    @fg.program(data=fg.CLIENTS, scale=fg.CLIENTS)
    def f(x, data, scale):
        mine = data.fold(lambda c, b, m: c + jnp.sum(b["x"], where=m[:, None]), 0.0, 8)
        scaled = mine * scale * fg.broadcast(x)
        return fg.sum(scaled), scaled

    scale = jnp.array([1.0, 10.0, 100.0, 1e3, 1e4])
    wanted = 2 * scale * np.array([c["x"].sum() for c in CLIENTS])
    for name in ("reference", "local", "chunk3"):
        assert_same(f.on(EXECUTORS[name])(2.0, POPULATION.everyone, scale), (wanted.sum(), wanted))


def test_two_ragged_placements():
    a, b = fg.Placement("a"), fg.Placement("b")

    @fg.program(left=a, right=b)
    def f(left, right):
        def total(data):
            return data.fold(lambda c, rows, m: c + jnp.sum(jnp.where(m, rows["y"], 0)), 0, 7)

        return fg.sum(total(left), a), fg.sum(total(right), b), total(right)

    left, right = POPULATION.select([3, 1]), fg.cohort(CLIENTS[:3])
    sums = [int(c["y"].sum()) for c in CLIENTS]
    for executor in (EXECUTORS["reference"], EXECUTORS["local"]):
        found = f.on(executor)(left, right)
        assert (int(found[0]), int(found[1])) == (sums[3] + sums[1], sum(sums[:3]))
        np.testing.assert_array_equal(found[2], sums[:3])


def test_several_rounds_and_client_state():
    @fg.program(data=fg.CLIENTS)
    def f(w, data):
        def local(w):
            return data.fold(lambda c, b, m: c - 0.1 * masked_gradient(c, b, m), w, 10)

        def body(carry, _):
            w, state = carry
            state = 0.5 * state + local(fg.broadcast(w))
            return (fg.mean(state, weights=data.count), state), None

        return jax.lax.scan(body, (w, jnp.zeros(2)), None, length=2)[0]

    w, states, counts = np.asarray(W), np.zeros((5, 2)), np.array(SIZES)
    for _ in range(2):
        states = 0.5 * states + np.stack([alone(c, w, 10) for c in CLIENTS])
        w = counts @ states / counts.sum()
    for name in ("reference", "local", "chunk3"):
        assert_same(f.on(EXECUTORS[name])(W, POPULATION.everyone), (w, states))


# --- populations --------------------------------------------------------------------------------


def test_sampling():
    cohort = POPULATION.sample(jax.random.key(0), 3)
    assert (len(cohort), len(POPULATION)) == (3, 5)
    assert len(set(cohort.index.tolist())) == 3
    for i, client in zip(cohort.index, unpadded(cohort), strict=True):
        assert_same(client, jax.tree.map(jnp.asarray, CLIENTS[int(i)]))
    draws = {tuple(POPULATION.sample(jax.random.key(i), 2).index.tolist()) for i in range(20)}
    assert len(draws) > 5


def test_a_cohort_shares_the_store():
    cohort = POPULATION.sample(jax.random.key(0), 2)
    assert cohort.store["x"] is POPULATION.everyone.store["x"]
    assert cohort.capacity == 53
    assert repr(POPULATION) == "Population(5 clients, 106 examples)"
    assert repr(cohort) == "Cohort(2 clients of at most 53 examples)"


@pytest.mark.parametrize("executor", ["local", "chunk3"])
def test_random_cohorts_never_recompile(executor):
    traces = []

    @fg.program(data=fg.CLIENTS)
    def f(w, data):
        traces.append(None)
        step = lambda c, b, m: c - 0.1 * masked_gradient(c, b, m)
        return fg.mean(data.fold(step, fg.broadcast(w), 10), weights=data.count)

    run = f.on(EXECUTORS[executor])
    w = W
    for i in range(6):
        cohort = POPULATION.sample(jax.random.key(i), 3)
        wanted = expected([CLIENTS[j] for j in cohort.index.tolist()], 10)[0]
        np.testing.assert_allclose(run(W, cohort), wanted, rtol=1e-9)
        w = run(w, cohort)
    assert len(traces) == 1
    run(W, POPULATION.sample(jax.random.key(0), 2))
    assert len(traces) == 2


def test_sampling_compiles_nothing(caplog):
    keys = [jax.random.key(seed) for seed in range(2)]
    jax.random.key_data(keys[0])

    def compiled(call):
        caplog.clear()
        with jax.log_compiles():
            call()
        return [r for r in caplog.records if "Compiling" in r.getMessage()]

    assert compiled(lambda: jax.jit(lambda x: x + 1)(1.0))
    for key in keys:
        assert not compiled(lambda key=key: POPULATION.sample(key, 4))
    assert not compiled(lambda: POPULATION.select([0, 1, 2, 3]))


def test_a_cohort_goes_through_jit():
    train = training(10)
    run = jax.jit(lambda w, cohort: train(w * 2, cohort)[0])
    found = run(W / 2, POPULATION.select([1, 3]))
    np.testing.assert_allclose(found, expected([CLIENTS[1], CLIENTS[3]], 10)[0])


def test_the_store_is_not_traffic():
    (record,) = fg.plan(training(10), W, POPULATION.everyone).traffic
    assert (record.down, record.up) == (2, 2 + 1)


# --- derivatives of folds -----------------------------------------------------------------------


def local_loss(lr, w, data):
    """The end of local training, inside of client code."""

    def step(local, batch, mask):
        return local - lr * masked_gradient(local, batch, mask)

    return jnp.sum(data.fold(step, w, 10) ** 2)


def alone_loss(lr, client):
    return jnp.sum(alone(jax.tree.map(jnp.asarray, client), W, 10, lr=lr) ** 2)


@pytest.mark.parametrize(
    "mode, executor",
    [
        ("jvp", "local"),
        ("grad", "reference"),
        ("grad", "local"),
        ("grad", "chunk3"),
        ("grad_of_grad", "local"),
    ],
)
def test_client_code_differentiates_a_fold(mode, executor):
    def derivative(f, lr):
        if mode == "jvp":
            return jax.jvp(f, (lr,), (jnp.ones(()),))[1]
        return jax.grad(jax.grad(f) if mode == "grad_of_grad" else f)(lr)

    @fg.program(data=fg.CLIENTS)
    def f(lr, w, data):
        lr, w = fg.broadcast((lr, w))
        return derivative(lambda lr: local_loss(lr, w, data), lr)

    small = [0, 2, 3]
    found = f.on(EXECUTORS[executor])(jnp.float64(0.1), W, POPULATION.select(small))
    wanted = [derivative(lambda lr, i=i: alone_loss(lr, CLIENTS[i]), 0.1) for i in small]
    np.testing.assert_allclose(found, wanted, rtol=1e-8)
    assert np.abs(found).min() > 0


@pytest.mark.parametrize("executor", ["local", "chunk3"])
@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd], ids=["reverse", "forward"])
def test_jax_differentiates_a_ragged_program(mode, executor):
    @fg.program(data=fg.CLIENTS)
    def f(lr, w, data):
        lr, w = fg.broadcast((lr, w))
        return fg.mean(local_loss(lr, w, data))

    small = [0, 2, 3]
    found = mode(f.on(EXECUTORS[executor]))(jnp.float64(0.1), W, POPULATION.select(small))
    wanted = np.mean([jax.grad(alone_loss)(0.1, CLIENTS[i]) for i in small])
    np.testing.assert_allclose(found, wanted, rtol=1e-8)


# --- loops that end early -----------------------------------------------------------------------


def primitives(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn.primitive.name)
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += primitives(inner)
    return found


@pytest.mark.parametrize("executor", ["local", "chunk1", "chunk3"])
def test_a_fold_ends_when_its_client_is_done(executor):
    run = training(10).on(EXECUTORS[executor])
    names = primitives(jax.make_jaxpr(run)(W, POPULATION.everyone).jaxpr)
    assert names.count("while") == 1
    assert "cond" not in names  # no masked step is left
    assert_same(run(W, POPULATION.everyone), expected(CLIENTS, 10))


def test_a_shuffled_fold_ends_early_too():
    @fg.program(data=fg.CLIENTS)
    def f(key, data):
        return data.fold(lambda c, b, m: c + 1, 0, 10, epochs=2, key=fg.client_key(key))

    names = primitives(jax.make_jaxpr(f)(jax.random.key(0), POPULATION.everyone).jaxpr)
    assert "while" in names
    np.testing.assert_array_equal(f(jax.random.key(0), POPULATION.everyone), [2, 12, 4, 2, 6])


def test_a_fold_inside_of_a_loop_of_the_client_ends_early_too():
    @fg.program(data=fg.CLIENTS)
    def f(data):
        def again(_, c):
            return data.fold(lambda c, b, m: c + jnp.sum(m), c, 10)

        return jax.lax.fori_loop(0, 3, again, 0)

    names = primitives(jax.make_jaxpr(f)(POPULATION.everyone).jaxpr)
    assert "while" in names and "cond" not in names
    np.testing.assert_array_equal(f(POPULATION.everyone), 3 * np.array(SIZES))


def test_a_fold_that_is_pulled_back_keeps_its_rows():
    """Reverse mode inside of client code needs every step's values: no early exit there."""

    @fg.program(data=fg.CLIENTS)
    def f(lr, data):
        return fg.mean(jax.grad(local_loss)(fg.broadcast(lr), W, data))

    names = primitives(jax.make_jaxpr(f)(jnp.float64(0.1), POPULATION.everyone).jaxpr)
    assert "scan" in names


def masked_scan(**changes):
    """The form that the executor knows, and others that only look like it."""

    def run(z, times):
        def body(state, _):
            i, c = state
            if changes.get("else"):
                c = jax.lax.cond(i < times, lambda c: c * z, lambda c: c + 1.0, c)
            elif changes.get("greater"):
                c = jax.lax.cond(i > times, lambda c: c * z, lambda c: c, c)
            else:
                c = jax.lax.cond(i < times, lambda c: c * z, lambda c: c, c)
            i = i + changes.get("stride", 1)
            return (i, c), (c if changes.get("rows") else None)

        start = (jnp.int32(changes.get("start", 0)), jnp.float64(1.0))
        return jax.lax.scan(body, start, None, length=6, reverse=bool(changes.get("reverse")))

    return run


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"start": 2},
        {"start": -3},
        {"stride": 2},
        {"stride": -1},
        {"else": True},
        {"greater": True},
        {"rows": True},
        {"reverse": True},
    ],
    ids=str,
)
def test_only_loops_of_exactly_this_form_end_early(changes):
    run = masked_scan(**changes)
    f = fg.program(z=fg.CLIENTS, times=fg.CLIENTS)(run)
    z, times = jnp.array([2.0, 3.0, 0.5]), jnp.array([4, 0, 9], jnp.int32)
    wanted = [run(a, b) for a, b in zip(z, times, strict=True)]
    wanted = jax.tree.map(lambda *rows: jnp.stack(rows), *wanted)
    assert_same(f(z, times), wanted)
    early = "while" in primitives(jax.make_jaxpr(f)(z, times).jaxpr)
    assert early == (set(changes) <= {"start", "reverse"} and "reverse" not in changes)
