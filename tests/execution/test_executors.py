"""Sums and means are right in every dtype and size, and executors keep no state."""

import concurrent.futures
import copy
import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from laws import EXECUTORS, every_executor
from programs import assert_same, class_1, mean_cosine, stateful

X, Z = jnp.arange(1.0, 4.0), jnp.arange(12.0).reshape(4, 3)


@fg.program(z=fg.CLIENTS)
def total(z):
    return fg.sum(z)


@fg.program(z=fg.CLIENTS)
def average(z):
    return fg.mean(z)


@fg.program(z=fg.CLIENTS, w=fg.CLIENTS)
def weighted(z, w):
    return fg.mean(z, weights=w)


# --- dtypes -------------------------------------------------------------------------------------

SUM_DTYPES = {
    "bool": "int64",
    "int8": "int64",
    "int16": "int64",
    "int32": "int64",
    "int64": "int64",
    "uint8": "uint64",
    "uint32": "uint64",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float32",
    "float64": "float64",
    "complex64": "complex64",
}


@every_executor
def test_dtype_of_a_sum(executor):
    values = jnp.array([[1, 0], [1, 1], [1, 0], [1, 1]])
    found = total.on(executor)({dtype: values.astype(dtype) for dtype in SUM_DTYPES})
    assert {dtype: str(x.dtype) for dtype, x in found.items()} == SUM_DTYPES
    for x in found.values():
        np.testing.assert_array_equal(np.asarray(x).astype(complex), [4, 2])


def test_integers_are_widened_to_32_bits_without_x64():
    dtypes = {"bool": "int32", "int8": "int32", "int16": "int32", "uint8": "uint32"}
    with jax.enable_x64(False):
        program = fg.program(z=fg.CLIENTS)(lambda z: fg.sum(z))
        found = program({dtype: jnp.ones((3, 2), dtype) for dtype in dtypes})
    assert {dtype: str(x.dtype) for dtype, x in found.items()} == dtypes
    for x in found.values():
        np.testing.assert_array_equal(x, [3, 3])


@every_executor
def test_small_integers_do_not_overflow(executor):
    extremes = {"int8": -128, "uint8": 255, "bool": 1, "int16": 2**15 - 1}
    found = total.on(executor)({d: jnp.full(300, v, d) for d, v in extremes.items()})
    assert {d: int(x) for d, x in found.items()} == {d: 300 * v for d, v in extremes.items()}


@every_executor
def test_low_precision_is_accumulated_in_high(executor):
    """Added up as it is, 1 + 1 + ... stops at 256 in bfloat16, 512 + 0.125 + ... in float16."""
    n = 300
    assert float(total.on(executor)(jnp.ones(n, jnp.bfloat16))) == n
    assert float(average.on(executor)(jnp.ones(n, jnp.bfloat16))) == 1
    small = jnp.concatenate([jnp.array([512.0]), jnp.full(256, 0.125)]).astype(jnp.float16)
    assert float(total.on(executor)(small)) == 512 + 32


# Executors for more clients than the largest float16.
MANY = {
    "local": EXECUTORS["local"],
    "chunked": fg.executors.local(chunk=7000),
    "mesh": EXECUTORS["mesh"],
}


@pytest.mark.parametrize("executor", MANY.values(), ids=MANY)
def test_a_mean_does_not_overflow_though_its_sum_would(executor):
    n = 70_000  # more than the largest float16
    found = average.on(executor)(jnp.full(n, 2.0, jnp.float16))
    assert (found.dtype, float(found)) == (jnp.float16, 2.0)
    found = weighted.on(executor)(jnp.full(20, 2.0, jnp.float16), jnp.full(20, 10_000))
    assert (found.dtype, float(found)) == (jnp.float16, 2.0)


@fg.program(z=fg.CLIENTS)
def narrow_constants(x, z):
    """Constants of one client, and their slopes, of which no client computes anything."""
    zero, quarter = jnp.zeros((), x.dtype), jnp.asarray(0.25, x.dtype)
    return x * fg.sum(quarter) + fg.sum(zero) + fg.sum(fg.broadcast(x) * quarter)


@pytest.mark.parametrize("executor", MANY.values(), ids=MANY)
@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_number_of_clients_may_be_more_than_a_narrow_dtype_holds(dtype, mode, executor):
    found = fg.value_and_grad(narrow_constants, mode=mode).on(executor)(
        jnp.ones((), dtype), jnp.zeros(70_000, dtype)
    )
    assert {x.dtype for x in found} == {jnp.dtype(dtype)}
    assert [float(x) for x in found] == [float(jnp.asarray(35_000, dtype))] * 2


@fg.program(z=fg.CLIENTS)
def narrow_means(x, z):
    """Below, the sums of the clients' Jacobians are 80,000 and 560,000 in each entry."""
    here = jnp.sum(fg.broadcast(x) * z)
    return fg.mean(here) + fg.mean(here, weights=jnp.int32(7)) ** 2


@every_executor
@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_derivatives_do_not_overflow_though_a_sum_of_jacobians_would(dtype, mode, executor):
    x, z = jnp.array([0.0, 0.0, 0.0, 0.001], dtype), jnp.full((20, 4), 4000.0, dtype)
    value, slope = fg.value_and_grad(narrow_means, mode=mode).on(executor)(x, z)
    mean = 4000 * float(x[3])
    assert (value.dtype, slope.dtype) == (dtype, dtype)
    np.testing.assert_allclose(float(value), mean + mean**2, rtol=0.02)
    np.testing.assert_allclose(slope.astype(float), [4000 * (1 + 2 * mean)] * 4, rtol=0.02)


@every_executor
@pytest.mark.parametrize("mode", ["mixed", "auto"])
def test_the_server_multiplies_before_it_casts(mode, executor):
    """The sum of the clients' Jacobians is 80,000, which is infinite in float16."""

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        return jnp.sum(fg.sum(jnp.sum(fg.broadcast(x) * z)) * jnp.asarray(1e-3, x.dtype))

    x, z = jnp.full(3, 1e-3, jnp.float16), jnp.full((40, 3), 2000.0, jnp.float16)
    wanted = jnp.full(3, 80.0, jnp.float16)
    assert_same(fg.grad(f, mode=mode).on(executor)(x, z), wanted, rtol=0.01)


@every_executor
def test_mean_of_integers_is_a_float(executor):
    dtypes = ["int8", "int32", "uint8", "bool"]
    found = average.on(executor)(tuple(jnp.array([1, 1, 0, 0, 1]).astype(d) for d in dtypes))
    assert [x.dtype for x in found] == [jnp.float64] * 4
    np.testing.assert_allclose(found, [0.6] * 4)


@every_executor
@pytest.mark.parametrize("weight", [jnp.int32, jnp.uint8, jnp.bool_, jnp.float32])
def test_weights_of_every_dtype(weight, executor):
    z, w = jnp.array([1.0, 2.0, 4.0]), jnp.array([1, 0, 1]).astype(weight)
    np.testing.assert_allclose(weighted.on(executor)(z, w), 2.5)


def test_sum_of_complex_numbers():
    z = jnp.array([1 + 2j, 3 - 1j, 0.5j])
    np.testing.assert_allclose(total(z), z.sum())
    np.testing.assert_allclose(average(z), z.mean())
    np.testing.assert_allclose(weighted(z, jnp.array([1.0, 0.0, 3.0])), (z[0] + 3 * z[2]) / 4)


@every_executor
def test_keys_can_be_broadcast(executor):
    @fg.program(z=fg.CLIENTS)
    def f(key, z):
        here = fg.broadcast({"key": key, "many": jax.random.split(key, 2)})
        drawn = jax.random.normal(here["key"]) + jax.random.normal(here["many"][1])
        return fg.sum(drawn * z), here["key"]

    key = jax.random.key(3)
    drawn = jax.random.normal(key) + jax.random.normal(jax.random.split(key, 2)[1])
    result, keys = f.on(executor)(key, Z)
    np.testing.assert_allclose(result, drawn * Z.sum(0))
    assert keys.shape == (4,)
    np.testing.assert_array_equal(jax.random.key_data(keys[2]), jax.random.key_data(key))


@every_executor
def test_clients_may_hold_keys(executor):
    keys = jax.random.split(jax.random.key(0), 5)
    f = fg.program(keys=fg.CLIENTS)(lambda keys: fg.sum(jax.random.normal(keys)))
    np.testing.assert_allclose(f.on(executor)(keys), jax.vmap(jax.random.normal)(keys).sum())


@every_executor
def test_client_keys_differ_and_do_not_depend_on_the_executor(executor):
    f = fg.program(z=fg.CLIENTS)(lambda key, z: jax.random.bits(fg.client_key(key)) + 0 * z)
    bits = f.on(executor)(jax.random.key(1), jnp.zeros(7, jnp.uint64))
    expected = [jax.random.bits(jax.random.fold_in(jax.random.key(1), i)) for i in range(7)]
    np.testing.assert_array_equal(bits, expected)
    assert len(set(bits.tolist())) == 7


def test_client_keys_in_loops_and_several_placements():
    a, b = fg.Placement("a"), fg.Placement("b")

    @fg.program(y=a, z=b)
    def f(key, y, z):
        def body(c, k):
            return c + fg.sum(jax.random.normal(fg.client_key(k, a)) + y, a), None

        looped = jax.lax.scan(body, 0.0, jax.random.split(key, 2))[0]

        def local(i, s):
            return s + jax.random.normal(jax.random.fold_in(fg.client_key(key, b), i))

        return looped, fg.sum(jax.lax.fori_loop(0, 2, local, z), b)

    key = jax.random.key(0)
    fold, normal = jax.random.fold_in, jax.random.normal
    looped = sum(normal(fold(k, i)) for k in jax.random.split(key, 2) for i in range(3))
    local = sum(normal(fold(fold(key, i), j)) for i in range(4) for j in range(2))
    for executor in EXECUTORS.values():
        found = f.on(executor)(key, jnp.zeros(3), jnp.zeros(4))
        np.testing.assert_allclose(found, (looped, local))


# --- means of nobody ----------------------------------------------------------------------------


@every_executor
def test_a_dropped_client_may_be_nan(executor):
    z = jnp.array([[1.0, 2.0], [jnp.nan, jnp.inf], [3.0, -jnp.inf], [5.0, 6.0]])
    w = jnp.array([1.0, 0.0, 0.0, 3.0])
    np.testing.assert_allclose(weighted.on(executor)(z, w), [4.0, 5.0])


@every_executor
def test_nan_of_a_client_that_counts_is_not_hidden(executor):
    found = weighted.on(executor)(jnp.array([1.0, jnp.nan]), jnp.array([1.0, 0.5]))
    assert jnp.isnan(found)


@every_executor
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_all_weights_zero_gives_empty(dtype, executor):
    @fg.program(z=fg.CLIENTS, w=fg.CLIENTS)
    def f(z, w):
        return fg.mean(z, weights=w), fg.mean(z, weights=w, empty=-1.5)

    zero, empty = f.on(executor)(jnp.full((3, 2), jnp.nan), jnp.zeros(3, dtype))
    np.testing.assert_array_equal(zero, [0.0, 0.0])
    np.testing.assert_array_equal(empty, [-1.5, -1.5])


@pytest.mark.parametrize("w", [[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]])
def test_derivative_of_a_weighted_mean(w):
    z, w = jnp.array([1.0, -2.0, 5.0]), jnp.array(w)
    found = jax.grad(weighted, argnums=(0, 1))(z, w)
    assert_same(found, (w / w.sum(), (z - (w * z).sum() / w.sum()) / w.sum()))
    pushed = jax.jacfwd(weighted, argnums=(0, 1))(z, w)
    assert_same(pushed, found)


def test_derivative_where_all_weights_are_zero_is_zero():
    z, w = jnp.array([1.0, -2.0, 5.0]), jnp.zeros(3)
    for derivative in (jax.grad, jax.jacfwd):
        assert_same(derivative(weighted, argnums=(0, 1))(z, w), (jnp.zeros(3), jnp.zeros(3)))


def test_derivative_ignores_the_nan_of_a_dropped_client():
    def loss(x):
        return weighted(jnp.array([1.0, jnp.nan, 3.0]) * x, jnp.array([1.0, 0.0, 1.0]))

    np.testing.assert_allclose(loss(2.0), 4.0)
    np.testing.assert_allclose(jax.jvp(loss, (2.0,), (1.0,))[1], 2.0)


# --- accuracy and size --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 1000, 333])
@pytest.mark.parametrize("kind", ["same_sign", "large_offset"])
def test_sums_over_many_clients_are_accurate(chunk, kind):
    rng = np.random.default_rng(0)
    z = rng.uniform(0.1, 1, 100_000) + (1000 if kind == "large_offset" else 0)
    z = z.astype(np.float32)
    program = fg.program(z=fg.CLIENTS)(lambda z: (fg.sum(z * 1), fg.mean(z)))
    found, mean = program.on(fg.executors.local(chunk=chunk))(jnp.asarray(z))
    assert found.dtype == mean.dtype == jnp.float32
    exact = z.astype(np.float64).sum()
    assert abs(float(found) - exact) <= 1e-6 * exact
    assert abs(float(mean) - exact / len(z)) <= 1e-6 * exact / len(z)


# Executors with many parts of a sum each, whose roundings are made up for.
IN_PARTS = EXECUTORS | {
    "one_by_one": fg.executors.local(chunk=1),
    "mesh_chunked": fg.executors.mesh(chunk=1),
}
NOT_FINITE = {  # two clients' numbers among 200 others, and the sum of all
    "inf": (np.inf, 1.0, np.inf),
    "minus_inf": (1.0, -np.inf, -np.inf),
    "both": (np.inf, -np.inf, np.nan),
    "nan": (1.0, np.nan, np.nan),
    "nan_and_inf": (np.nan, np.inf, np.nan),
    "overflow": ("most", "most", np.inf),
}


@pytest.mark.parametrize("executor", IN_PARTS.values(), ids=IN_PARTS)
@pytest.mark.parametrize("kind", NOT_FINITE)
def test_sums_that_are_not_finite(kind, executor):
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    *two, wanted = NOT_FINITE[kind]

    def numbers(dtype):
        most = float(jnp.finfo(dtype).max)
        some = [most if x == "most" else x for x in two]
        return jnp.ones(202, dtype).at[jnp.array([70, 130])].set(jnp.array(some, dtype))

    z = {dtype: numbers(dtype) for dtype in dtypes}
    found, slope = jax.vjp(total.on(executor), z)
    assert {dtype: float(x) for dtype, x in found.items()} == pytest.approx(
        dict.fromkeys(dtypes, wanted), nan_ok=True
    )
    assert_same(slope(jax.tree.map(jnp.ones_like, found))[0], jax.tree.map(jnp.ones_like, z))
    if kind != "overflow":
        reals = total.on(executor)(jax.lax.complex(z["float64"], jnp.ones(202)))
        np.testing.assert_array_equal([reals.real, reals.imag], [wanted, 202.0])


def test_an_infinite_term_of_ragged_clients():
    clients = [np.ones(1 + i % 3, np.float32) for i in range(500)]
    clients[77] = np.array([np.inf, 1.0], np.float32)
    program = fg.program(z=fg.CLIENTS)(
        lambda z: fg.sum(z.fold(lambda s, b, mask: s + jnp.sum(b, where=mask), jnp.float32(0), 2))
    )
    for executor in IN_PARTS.values():
        assert program.on(executor)(fg.cohort(clients)) == np.inf


@pytest.mark.parametrize("n, chunk", [(1, 1), (1, 4), (2, 4), (7, 3), (8, 4), (17, 8), (65, 64)])
def test_every_number_of_clients_fits_every_chunk(n, chunk):
    z = jnp.arange(n * 3.0).reshape(n, 3)
    program = fg.program(z=fg.CLIENTS)(lambda z: (fg.sum(z), z * 2))
    assert_same(program.on(fg.executors.local(chunk=chunk))(z), (z.sum(0), z * 2))


def test_a_chunked_sum_keeps_little_in_memory():
    def temporary(n):
        program = fg.program(z=fg.CLIENTS)(
            lambda x, z: fg.sum(jnp.sum(jnp.sin(fg.broadcast(x)[:, None] * z[None])))
        )
        run = jax.jit(program.on(fg.executors.local(chunk=8)))
        x, z = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1000,), (n, 3)))
        return run.lower(x, z).compile().memory_analysis().temp_size_in_bytes

    assert temporary(4096) < 2 * temporary(64)


def test_local_is_one_compiled_function():
    traces = []

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        traces.append(None)
        return fg.sum(fg.broadcast(x) * z)

    for i in range(3):
        f(X + i, Z)
    assert len(traces) == 1
    f(X, Z[:2])
    assert len(traces) == 2


# --- the executor is explicit -------------------------------------------------------------------


def test_on_gives_a_new_program():
    chunked = class_1.on(fg.executors.local(chunk=2))
    assert isinstance(chunked, fg.Program) and chunked is not class_1
    assert (class_1.executor, chunked.executor) == (None, fg.executors.local(chunk=2))
    assert chunked.name == class_1.name == "class_1"


def test_the_default_executor_can_be_replaced():
    seen = []
    spy = fg.executors.reference(observe=lambda *message: seen.append(message))
    before = fg.executors.default_executor()
    assert before == fg.executors.local()
    with fg.executors.default(spy):
        assert fg.executors.default_executor() is spy
        class_1(X, Z)
        assert len(seen) == 4
        class_1.on(fg.executors.local())(X, Z)  # an explicit one wins
        assert len(seen) == 4
    assert fg.executors.default_executor() is before
    class_1(X, Z)
    assert len(seen) == 4


def test_the_default_executor_is_restored_after_an_error():
    with pytest.raises(KeyError), fg.executors.default(fg.executors.reference()):
        raise KeyError
    assert fg.executors.default_executor() == fg.executors.local()


def test_the_default_executor_is_per_thread():
    pool = concurrent.futures.ThreadPoolExecutor(1)
    with fg.executors.default(fg.executors.reference()), pool:
        assert pool.submit(fg.executors.default_executor).result() == fg.executors.local()


def test_an_executor_of_ones_own():
    @dataclasses.dataclass(frozen=True)
    class Recording:
        names: tuple = ()

        def compile(self, program):
            return lambda arguments: (program.name, sorted(arguments))

    assert class_1.on(Recording())(X, Z) == ("class_1", ["x", "z"])


def test_a_program_looks_like_its_function():
    assert mean_cosine.__name__ == "mean_cosine"
    assert mean_cosine.__doc__ == "A program that others call."
    assert mean_cosine.__wrapped__ is mean_cosine.fun
    assert list(mean_cosine.placements) == ["z"]


def remembering(executor):
    """A program of `x + sum(z)` that has run, and its derivatives."""

    @fg.program(z=fg.CLIENTS)
    def plus(x, z):
        return jnp.sum(x) + jnp.sum(fg.sum(z * fg.broadcast(x)))

    program = plus.on(executor)
    assert float(program(X, Z)) != 0 and fg.grad(program)(X, Z).shape == X.shape
    return program


@every_executor
def test_a_replaced_function_is_the_one_that_runs(executor):
    def other(z, k=2.0):
        return k * jnp.sum(fg.sum(z))

    replaced = dataclasses.replace(remembering(executor), fun=other)
    assert_same(replaced(Z), 2 * Z.sum())
    assert_same(fg.grad(replaced, "k")(Z, 3.0), Z.sum())
    assert replaced.name == replaced.__name__ == "other"
    assert list(replaced.signature.parameters) == ["z", "k"]


@every_executor
def test_a_replaced_function_of_a_derivative_is_the_one_that_runs(executor):
    gradient = fg.grad(remembering(executor))
    gradient(X, Z)
    replaced = dataclasses.replace(gradient, fun=lambda x, z: fg.sum(z) - x)
    assert_same(replaced(X, Z), Z.sum(0) - X)
    direction = dataclasses.replace(fg.jvp(remembering(executor)), fun=lambda x, z: fg.sum(z))
    assert_same(direction(X, Z), Z.sum(0))


@every_executor
def test_replaced_placements_are_the_ones_that_hold(executor):
    program = fg.program(z=fg.CLIENTS)(lambda y, z: jnp.sum(fg.sum(z)) + jnp.sum(y))
    program = program.on(executor)
    program(X, Z)
    with pytest.raises(fg.PlacementError, match="y"):
        dataclasses.replace(program, placements={"y": fg.CLIENTS, "z": fg.CLIENTS})(Z, Z)
    other = fg.Placement("other")
    with pytest.raises(fg.PlacementError, match="no argument of this program is at clients"):
        dataclasses.replace(program, placements={"z": other})(X, Z)
    assert_same(copy.copy(program)(X, Z), Z.sum() + X.sum())


# --- no state -----------------------------------------------------------------------------------


def test_threads_with_different_numbers_of_clients():
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        s = fg.broadcast(x) * z
        return fg.sum((s - fg.broadcast(fg.mean(s))) ** 2) + fg.sum(1.0)

    start = threading.Barrier(8)

    def call(i):
        n = 2 + i % 4
        z = jnp.arange(n * 2.0).reshape(n, 2) + i
        if i < 8:
            start.wait()
        s = z * (i + 1.0)
        np.testing.assert_allclose(
            f(jnp.full(2, i + 1.0), z), ((s - s.mean(0, keepdims=True)) ** 2).sum(0) + n
        )
        return n

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sorted(set(pool.map(call, range(40)))) == [2, 3, 4, 5]


def test_threads_trace_different_programs_at_once():
    a, b = fg.Placement("a"), fg.Placement("b")
    meet = threading.Barrier(2)

    def traced_together(at, factor):
        @fg.program(z=at)
        def f(z):
            meet.wait(timeout=60)  # both programs are being traced now
            result = fg.sum(z * factor, at=at)
            other = b if at is a else a
            with pytest.raises(fg.PlacementError, match="no argument of this program"):
                fg.sum(z, at=other)
            meet.wait(timeout=60)
            return result

        return f(jnp.arange(4.0))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(traced_together, (a, b), (2.0, 3.0)))
    np.testing.assert_allclose(results, [12.0, 18.0])


def test_outside_in_another_thread_while_a_program_is_traced():
    def outside():
        with pytest.raises(fg.PlacementError, match="outside of a program"):
            fg.sum(X)
        return True

    @fg.program(z=fg.CLIENTS)
    def f(z):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(outside).result()
        return fg.sum(z)

    np.testing.assert_allclose(f(Z), Z.sum(0))


def test_a_jitted_helper_in_programs_of_different_sizes_and_outside():
    """JAX caches the helper's trace; what it finds there must never be another program's."""

    @jax.jit
    def scale(x):
        return x * 2 + 1

    @jax.jit
    def average_of(x):
        return fg.mean(x)

    f = fg.program(z=fg.CLIENTS)(lambda z: fg.sum(scale(z)) + average_of(z))
    for n in (3, 7, 3, 1):
        z = jnp.arange(n * 2.0).reshape(n, 2)
        np.testing.assert_allclose(f(z), (z * 2 + 1).sum(0) + z.mean(0))
        np.testing.assert_allclose(scale(z), z * 2 + 1)
        with pytest.raises(fg.PlacementError):
            average_of(z)
        with pytest.raises(fg.PlacementError):
            average_of(z[0])


def test_a_jitted_helper_in_programs_of_different_placements():
    a, b = fg.Placement("a"), fg.Placement("b")
    helper = jax.jit(functools.partial(fg.sum, at=a))
    f = fg.program(y=a, z=b)(lambda y, z: helper(y) + fg.sum(z, at=b))
    np.testing.assert_allclose(f(jnp.ones(3), jnp.ones(5)), 8.0)
    with pytest.raises(fg.PlacementError, match="no argument of this program is at a"):
        fg.program(z=b)(lambda z: helper(z))(jnp.ones(3))


def test_a_program_inside_jit_is_compiled_with_its_surroundings():
    @jax.jit
    def step(x, z):
        return stateful(x * 2, z) + class_1(x, z[:2])

    wanted = stateful(X * 2, Z) + class_1(X, Z[:2])
    np.testing.assert_allclose(step(X, Z), wanted)
    np.testing.assert_allclose(step(X + 1, Z), stateful(X * 2 + 2, Z) + class_1(X + 1, Z[:2]))


def test_programs_may_not_be_mixed_up_by_their_names():
    programs = [fg.program(z=fg.CLIENTS)(lambda z, k=k: fg.sum(z) * k) for k in range(3)]
    assert [float(p(jnp.ones(2), k)) for k, p in enumerate(programs)] == [0.0, 2.0, 4.0]
