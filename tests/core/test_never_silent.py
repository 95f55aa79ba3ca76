"""Numbers that were silently wrong once, and claims that were too large: each kind as a law.

Programs that fit into the table of programs.py are there ("what once went wrong"), where every
mode and executor meets them. Here is what the table cannot say.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.core.graph import exchanges
from fedgrad.core.primitives import client_index
from fedgrad.federation import InProcess
from fedgrad.training.means import means
from programs import TABLE, _some_dropped, dropped_clients, normal

C, N = fg.CLIENTS, 3
X, Z = normal(0, 2), normal(1, N, 2)
MODES = ["forward", "reverse", "mixed", "auto"]
EXECUTORS = {
    "local": fg.executors.local(),
    "chunked": fg.executors.local(chunk=2),
    "reference": fg.executors.reference(),
}
every_mode = pytest.mark.parametrize("mode", MODES)
every_executor = pytest.mark.parametrize("executor", EXECUTORS.values(), ids=EXECUTORS)


# --- a client that does not count ---------------------------------------------------------------


@every_executor
def test_jax_grad_of_a_running_program_leaves_dropped_clients_out(executor):
    x, z, w = _some_dropped(4)
    found = jax.grad(dropped_clients.on(executor))(x, z, w)
    np.testing.assert_allclose(found, fg.grad(dropped_clients, mode="forward")(x, z, w), rtol=1e-12)


@every_mode
def test_a_dropped_client_has_no_part_in_second_derivatives(mode):
    x, z, w = _some_dropped(4)
    found = fg.jacobian(fg.grad(dropped_clients, mode=mode), mode=mode)(x, z, w)
    kept = np.flatnonzero(np.asarray(w))

    def plain(x):
        return jnp.average(jax.vmap(lambda row: jnp.linalg.norm(x - row))(z[kept]), weights=w[kept])

    np.testing.assert_allclose(found, jax.hessian(plain)(x), rtol=1e-9, atol=1e-12)


def _mean_tanh(x, z, w):
    return fg.mean(jnp.sum(jnp.tanh(fg.broadcast(x) * z)), weights=w)


def _plain_mean_tanh(x, z, w):
    return jnp.average(jnp.tanh(x[None] * z).sum(1), weights=w)


@every_mode
def test_second_derivatives_by_a_weight_of_zero(mode):
    """What a client of weight 0 has that is finite stays: it matters to the weight."""
    program = fg.program(_mean_tanh, z=C, w=C)
    w = jnp.array([0.0, 1.0, 2.0])
    inner = "mixed" if mode == "mixed" else "reverse"

    def squared(x, z, w):
        return jnp.sum(fg.grad(program, mode=mode)(x, z, w) ** 2)

    found = fg.grad(fg.program(squared, z=C, w=C), "w", mode="reverse")(X, Z, w)
    wanted = jax.grad(lambda w: jnp.sum(jax.grad(_plain_mean_tanh)(X, Z, w) ** 2))(w)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    found = fg.jvp(fg.grad(program, "w", mode=inner))(X, Z, w, X)[1]
    wanted = jax.jvp(lambda x: jax.grad(_plain_mean_tanh, 2)(x, Z, w), (X,), (X,))[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


WITH_WEIGHTS = {  # of the model, and not: a weight may depend on what it weighs
    "given": lambda loss, w: w,
    "of the model": lambda loss, w: jnp.where(loss > 0, jnp.exp(-loss), 0.0),
}


@every_mode
@pytest.mark.parametrize("weights", WITH_WEIGHTS.values(), ids=WITH_WEIGHTS)
def test_a_dropped_client_with_an_infinite_slope(weights, mode):
    x, w = jnp.array([0.3, -0.4]), jnp.array([0.0, 1.0, 2.0])
    z = Z.at[0].set(x)

    def program(x, z, w):
        loss = jnp.linalg.norm(fg.broadcast(x) - z)
        return fg.mean(loss, weights=weights(loss, w))

    def plain(x):
        losses = jnp.stack([jnp.linalg.norm(x - row) for row in z[1:]])
        return jnp.average(losses, weights=weights(losses, w[1:]))

    placed = fg.program(program, z=C, w=C)
    np.testing.assert_allclose(fg.grad(placed, mode=mode)(x, z, w), jax.grad(plain)(x), rtol=1e-9)
    _, pulled = fg.vjp(placed)(x, z, w, jnp.ones(()))
    np.testing.assert_allclose(pulled, jax.grad(plain)(x), rtol=1e-9)


@pytest.mark.parametrize("name", ["dropped_and_counted", "cond_in_scan", "singular_at_zero"])
def test_vjp_goes_the_way_of_reverse_mode(name):
    (case,) = [case for case in TABLE if case.name == name]
    args = case.args(N)
    value, pulled = fg.vjp(case.program, case.server_argnums)(*args, jnp.ones(()))
    wanted = fg.value_and_grad(case.program, case.server_argnums, mode="reverse")(*args)
    jax.tree.map(np.testing.assert_allclose, (value, pulled), wanted)


def test_a_nan_of_a_client_that_counts_somewhere_is_not_hidden():
    def program(x, z, w):
        loss = jnp.sum(jnp.sqrt(fg.broadcast(x) * 0.0) * z)  # an infinite slope
        return fg.mean(loss, weights=w) + fg.sum(loss)

    w = jnp.array([0.0, 1.0, 2.0])
    found = fg.grad(fg.program(program, z=C, w=C), mode="reverse")(X, Z, w)
    assert not np.isfinite(found).any()


def test_a_checkpoint_around_a_mean_stays():
    """A client remembers what goes into the function, and not what happens there."""

    def memory(steps):
        def program(x, z, w):
            @jax.checkpoint
            def step(x):
                end, _ = jax.lax.scan(
                    lambda c, _: (jnp.tanh(c * z), None), fg.broadcast(x), None, length=steps
                )
                return x - 0.1 * fg.mean(end, weights=w)

            return jnp.sum(jax.lax.scan(lambda x, _: (step(x), None), x, None, length=3)[0] ** 2)

        gradient = fg.grad(fg.program(program, z=C, w=C), mode="reverse")
        return fg.plan(gradient, X, Z, jnp.ones(N)).client_memory["clients"]

    assert memory(3) == memory(30) < 100


def test_a_part_of_a_mean_that_is_not_used_is_not_sent():
    def program(x, z, w):
        return fg.mean((jnp.sum(z * fg.broadcast(x)), jnp.ones(1000) * z[0]), weights=w)[0]

    assert fg.plan(fg.program(program, z=C, w=C), X, Z, jnp.ones(N)).scalars == (2, 2)


@pytest.mark.parametrize("mode", [None, "forward", "reverse", "mixed"])
def test_local_training_is_done_once_for_several_means(mode):
    """However many means there are, with the same weights, others, or none."""

    def training(x, z):
        return jax.lax.scan(lambda c, _: (jnp.sin(c * z), jnp.sum(c)), x, None, length=4)

    def loops(second):
        def program(x, z, w):
            end, losses = training(fg.broadcast(x), z)
            return jnp.sum(fg.mean(end, weights=w)) + second(jnp.sum(losses), w)

        placed = fg.program(program, z=C, w=C)
        run = placed if mode is None else fg.value_and_grad(placed, mode=mode)
        return jax.jit(run).lower(X, Z, jnp.ones(N)).compile().as_text().count(" while(")

    alone = loops(lambda loss, w: 0.0)
    assert loops(lambda loss, w: fg.mean(loss, weights=w)) == alone
    assert loops(lambda loss, w: fg.mean(loss, weights=w**2)) == alone
    assert loops(lambda loss, w: fg.mean(loss)) == alone


@pytest.mark.parametrize("mode", ["reverse", "mixed"])
def test_derivatives_by_what_a_dropped_client_has_are_zero(mode):
    x, z, w = _some_dropped(4)
    found = fg.grad(dropped_clients, "z", mode=mode)(x, z, w)
    assert (found[:2] == 0).all() and (found[2:] != 0).any()


def _counted_and_not(x, z, w, each=lambda value: None):
    def step(carry, _):
        each(carry)
        return jnp.sin(carry * z), None

    end, _ = jax.lax.scan(step, fg.broadcast(x), None, length=2)
    return fg.mean(end, weights=w), fg.sum(end)


@pytest.mark.parametrize("chunk", [None, 2])
def test_work_for_a_mean_and_a_sum_is_done_once(chunk):
    program = fg.program(lambda x, z, w: _counted_and_not(x, z, w), z=C, w=C)
    lowered = jax.jit(program.on(fg.executors.local(chunk=chunk))).lower(X, Z, jnp.ones(N))
    assert lowered.compile().as_text().count(" sine(") == 1


@every_executor
def test_effects_of_a_dropped_client_happen_once(executor):
    calls = []

    def each(value):
        jax.debug.callback(lambda _: calls.append(1), value)

    program = fg.program(lambda x, z, w: _counted_and_not(x, z, w, each), z=C, w=C)
    program.on(executor)(X, Z, jnp.array([0.0, 1.0, 2.0]))
    jax.effects_barrier()
    assert len(calls) in (2 * N, 2 * (N + 1))  # the last chunk repeats a client


# --- weights ------------------------------------------------------------------------------------

WEIGHTS = {  # x, weights, mean
    "complex": ([1.0, 2.0], [1 + 1j, 1 - 1j], 1.5 - 0.5j),
    "complex of complex": ([1j, 2.0], [1 + 1j, 1 - 1j], (1j * (1 + 1j) + 2 * (1 - 1j)) / 2),
    "cancelling": ([1.0, 2.0], [1.0, -1.0], -np.inf),
    "cancelling integers": ([1.0, 2.0], [1, -1], -np.inf),
    "negative": ([1.0, 2.0], [3.0, -1.0], 0.5),
    "nobody's": ([1.0, 2.0], [0.0, 0.0], 7.0),
}


@every_executor
@pytest.mark.parametrize("x, w, wanted", WEIGHTS.values(), ids=WEIGHTS)
def test_weights(x, w, wanted, executor):
    mean = fg.program(x=C, w=C)(lambda x, w: fg.mean(x, weights=w, empty=7.0))
    found = mean.on(executor)(jnp.array(x), jnp.array(w))
    assert jnp.iscomplexobj(found) == np.iscomplexobj(wanted)
    np.testing.assert_allclose(found, wanted)


CONSTANT = {"a number": 2.0, "an integer": 2, "a flag": True, "an array": np.array(2.0)}


@every_mode
@pytest.mark.parametrize("weight", CONSTANT.values(), ids=CONSTANT)
def test_constant_weights(weight, mode):
    program = fg.program(lambda x, z: fg.mean(jnp.sum(fg.broadcast(x) * z), weights=weight), z=C)
    np.testing.assert_allclose(fg.grad(program, mode=mode)(X, Z), Z.mean(0))


# --- complex results ----------------------------------------------------------------------------


def _turned(x):
    return 1j * x.astype(complex)


COMPLEX = {
    "round": (
        lambda x, z: fg.sum(jnp.exp(_turned(fg.broadcast(x) * z))),
        lambda x, z: jnp.exp(_turned(x[None] * z)).sum(0),
    ),
    "no active round": (
        lambda x, z: jnp.exp(_turned(x)) * fg.sum(z).astype(complex),
        lambda x, z: jnp.exp(_turned(x)) * z.sum(0).astype(complex),
    ),
    "conjugated on the way": (
        lambda x, z: jnp.conj(fg.sum(jnp.exp(_turned(fg.broadcast(x) * z)))) ** 2,
        lambda x, z: jnp.conj(jnp.exp(_turned(x[None] * z)).sum(0)) ** 2,
    ),
    "two rounds": (
        lambda x, z: fg.sum(
            jnp.conj(fg.broadcast(_turned(fg.sum(fg.broadcast(x) * z)))) * z.astype(complex)
        ),
        lambda x, z: (jnp.conj(_turned((x[None] * z).sum(0)))[None] * z.astype(complex)).sum(0),
    ),
    "beside a real one": (
        lambda x, z: (fg.sum(jnp.sin(fg.broadcast(x) * z)), _turned(fg.sum(fg.broadcast(x) * z))),
        lambda x, z: (jnp.sin(x[None] * z).sum(0), _turned((x[None] * z).sum(0))),
    ),
}


@every_mode
@pytest.mark.parametrize("program, plain", COMPLEX.values(), ids=COMPLEX)
def test_a_complex_result_keeps_its_imaginary_part(program, plain, mode):
    found = fg.jacobian(fg.program(program, z=C), mode=mode)(X, Z)
    wanted = jax.jacfwd(plain)(X, Z)
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, wanted)


# --- the client axis ----------------------------------------------------------------------------

OF_EACH = {  # what a client returns: it is each client's, also if it is a constant
    "zeros like its own": lambda z: jnp.zeros_like(z),
    "in a tree": lambda z: {"state": jnp.zeros_like(z), "step": jnp.zeros((), int)},
}


@every_executor
@pytest.mark.parametrize("fun", OF_EACH.values(), ids=OF_EACH)
def test_constants_of_clients_have_the_client_axis(fun, executor):
    found = fg.program(fun, z=C).on(executor)(Z)
    jax.tree.map(np.testing.assert_array_equal, found, jax.vmap(fun)(Z))


@every_executor
@pytest.mark.parametrize("other", [fg.sum, lambda z: z * 2], ids=["a sum", "a client's value"])
def test_constants_beside_something_else_are_the_servers(other, executor):
    program = fg.program(lambda z: (other(z), jnp.zeros(2), fg.broadcast(jnp.zeros(2))), z=C)
    _, ours, theirs = program.on(executor)(Z)
    assert ours.shape == (2,) and theirs.shape == (N, 2)  # it was sent to them


WITHOUT_SLOPE = {
    "through a comparison": lambda x, z: fg.sum(jnp.sum(jnp.where(z > 0, fg.broadcast(x), 0.0))),
    "not at all": lambda x, z: jnp.sum(x),
    "through a sign": lambda x, z: fg.sum(jnp.sum(jnp.sign(z) * fg.broadcast(x))),
    "stopped": lambda x, z: fg.sum(jnp.sum(jax.lax.stop_gradient(z) * fg.broadcast(x))),
    "linear": lambda x, z: fg.sum(jnp.sum(z)),
}


@every_executor
@pytest.mark.parametrize("mode", ["reverse", "mixed", "auto", "vjp"])
@pytest.mark.parametrize("fun", WITHOUT_SLOPE.values(), ids=WITHOUT_SLOPE)
def test_a_derivative_by_a_clients_argument_is_at_that_client(fun, mode, executor):
    program = fg.program(fun, z=C)
    if mode == "vjp":
        _, found = fg.vjp(program, "z").on(executor)(X, Z, jnp.ones(()))
    else:
        found = fg.grad(program, "z", mode=mode).on(executor)(X, Z)
    assert found.shape == Z.shape
    assert np.unique(found).size == 1  # a constant: 0, or 1 where it is linear


@every_mode
@every_executor
def test_aux_of_a_broadcast_constant_is_at_clients(mode, executor):
    def fun(x, z):
        return fg.sum(jnp.sum(fg.broadcast(x) * z)), fg.broadcast(jnp.ones(2)) * 2

    _, aux = fg.grad(fg.program(fun, z=C), mode=mode, has_aux=True).on(executor)(X, Z)
    np.testing.assert_array_equal(aux, np.full((N, 2), 2.0))


@every_executor
def test_a_tangent_of_a_clients_result_is_at_that_client(executor):
    program = fg.program(lambda x, z: (jnp.sum(x), z * 2), z=C)
    _, (_, dy) = fg.jvp(program).on(executor)(X, Z, jnp.ones_like(X))
    np.testing.assert_array_equal(dy, np.zeros_like(Z))


# --- the cost model -----------------------------------------------------------------------------


def _remembers(x, y, z):
    own = jnp.tanh(fg.broadcast(x) * z)
    return jnp.sum(y) * fg.sum(jnp.sum((own - fg.broadcast(fg.mean(own))) ** 2))


def test_a_limit_of_client_memory_holds_where_no_round_is_active():
    program = fg.program(_remembers, z=C)
    assert fg.plan(fg.grad(program, "y"), X, X, Z).client_memory["clients"] > 0
    limited = fg.grad(program, "y", mode=fg.CostModel(client_memory=0))
    assert fg.plan(limited, X, X, Z).client_memory["clients"] == 0
    np.testing.assert_allclose(limited(X, X, Z), fg.grad(program, "y")(X, X, Z))


def _hyper_round(rate, x, z):
    return x - rate * fg.mean(jnp.tanh(fg.broadcast(x) * z * fg.broadcast(rate)))


@pytest.mark.parametrize("mode", ["forward", "mixed", "auto"])
def test_a_few_hyperparameters_never_cost_the_model_squared(mode):
    """The derivative of a model of d numbers by one: at the server, too, d numbers at a time."""
    d = 100_000
    model, rate = jax.ShapeDtypeStruct((d,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    clients = jax.ShapeDtypeStruct((N, d), jnp.float32)
    derived = fg.jacobian(fg.program(_hyper_round, z=C), "rate", mode=mode)
    assert fg.plan(derived, rate, model, clients).server_memory < 60 * 4 * d
    compiled = jax.jit(derived).lower(rate, model, clients).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 60 * 4 * d


@jax.custom_vjp
def _scaled(x, scale):
    return x * scale


_scaled.defvjp(lambda x, s: (x * s, (x, s)), lambda kept, ct: (ct * kept[1], jnp.sum(ct * kept[0])))


@pytest.mark.parametrize("mode", ["mixed", "auto", "reverse"])
def test_the_server_does_not_go_forward_through_a_custom_vjp(mode):
    """There are fewer inputs than results, but JAX knows only the way back."""

    def program(scale, x, z):
        return _scaled(x + fg.mean(jnp.sin(fg.broadcast(x) * z)), scale)

    found = fg.jacobian(fg.program(program, z=C), "scale", mode=mode)(jnp.float64(2.0), X, Z)
    np.testing.assert_allclose(found, X + jnp.sin(X[None] * Z).mean(0))


def test_what_the_server_needs_can_be_priced():
    """Forward, the server keeps a tangent of the model for each input; backward, it does not."""

    def program(x, z):
        return jnp.sum(jnp.outer(x, x)) * fg.sum(jnp.sum(fg.broadcast(x) * z))

    explained = fg.explain(fg.program(program, z=C), X, Z)
    plans = {row.mode: row.plan for row in explained.rows}
    forward, mixed = plans["forward"], plans["mixed"]
    assert forward.server_memory > mixed.server_memory > 0
    assert forward.server_work > mixed.server_work > 0
    cost = fg.CostModel(server_memory=2.0, server_work=0.5)
    more = 2.0 * forward.server_memory + 0.5 * forward.server_work
    assert cost.price(forward) == pytest.approx(fg.CostModel().price(forward) + more)
    assert explained.server in str(explained)


# --- the audit ----------------------------------------------------------------------------------

RAW, PICKED, DOMINATED = (True, False, False), (False, True, False), (False, False, True)


def _one_hot(x, z):
    return fg.sum(jax.nn.one_hot(client_index("clients"), N)[:, None] * z[None])


def _noisy(x, z):
    noise = jax.random.normal(fg.client_key(jax.random.key(0)), (2,))
    return fg.sum(jnp.tanh(fg.broadcast(x) * z) + noise)


AUDITED = {  # the sum that matters: (raw, picked, dominated)
    "an argument": (lambda x, z: fg.sum(z), (True, False, True)),
    "a scaled argument": (lambda x, z: fg.sum(2 * z + 1), (True, False, True)),
    "every row, by one-hot sums": (_one_hot, (True, True, True)),
    "something computed": (lambda x, z: fg.sum(jnp.exp(z * fg.broadcast(x))), DOMINATED),
    "bounded": (lambda x, z: fg.sum(jnp.tanh(z * fg.broadcast(x))), (False, False, False)),
    "clipped": (lambda x, z: fg.sum(jnp.clip(z * fg.broadcast(x), -1, 1)), (False,) * 3),
    "a vote": (lambda x, z: fg.sum(z > fg.broadcast(x)), (False, False, False)),
    "noise of one's own": (_noisy, (False, False, False)),
}


@pytest.mark.parametrize("fun, marks", AUDITED.values(), ids=AUDITED)
def test_marks_of_an_audit(fun, marks):
    audit = fg.plan(fg.program(fun, z=C), X, Z).audit()
    (release,) = audit.releases
    assert (release.raw, release.picked, release.dominated) == marks
    assert audit.only_sums and not hasattr(audit, "ok")
    for mark in release.marks:
        assert mark in str(audit)


# --- sums of whole numbers ----------------------------------------------------------------------

LARGE = {  # values, weights and their mean, of which the sums do not fit 32 bits
    "int32": ([1, 2, 3], np.full(3, 10**9, np.int32), 2.0),
    "uint32": ([1, 2, 3], np.full(3, 4 * 10**9, np.uint32), 2.0),
    "negative": ([1.0, 2.0, 3.0], np.full(3, -(10**9), np.int32), 2.0),
    "int32 of large": (np.full(3, 2 * 10**9, np.int32), np.full(3, 2 * 10**9, np.int32), 2e9),
    "float weights": (np.full(3, 2 * 10**9, np.int32), np.ones(3, np.float32), 2e9),
    "bool": (np.full(3, 2 * 10**9, np.int32), np.array([True, False, True]), 2e9),
    "no weights": (np.full(3, 2 * 10**9, np.int32), None, 2e9),
    "float16": (np.ones(3, np.float16), np.full(3, 10**9, np.int32), 1.0),
    "complex": (np.full(3, 1j, np.complex64), np.full(3, 10**9, np.int32), 1j),
}
of_large_numbers = pytest.mark.parametrize("values, weights, wanted", LARGE.values(), ids=LARGE)


def _on_nodes(values, weights):
    parts = {"x": np.asarray(values), "w": weights}
    clients = [{k: v[i : i + 1] for k, v in parts.items() if v is not None} for i in range(N)]
    executor = fg.executors.flower(InProcess.of(clients))

    def mean(c):
        row = c.take(0)
        return fg.mean(row["x"], weights=row.get("w"))

    return fg.program(mean, c=C).on(executor)(executor.population().everyone)


@every_executor
@of_large_numbers
def test_a_mean_of_whole_numbers_does_not_wrap(executor, values, weights, wanted):
    """Without x64, as users have it."""
    with jax.enable_x64(False):
        if weights is None:
            found = fg.program(lambda z: fg.mean(z), z=C).on(executor)(np.asarray(values))
        else:
            mean = fg.program(lambda z, w: fg.mean(z, weights=w), z=C, w=C)
            found = mean.on(executor)(np.asarray(values), weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-3 if found.dtype == np.float16 else 1e-6)


@of_large_numbers
def test_nor_on_nodes(values, weights, wanted):
    with jax.enable_x64(False):
        found = _on_nodes(values, weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-3 if found.dtype == np.float16 else 1e-6)


@every_executor
@every_mode
def test_derivatives_of_a_mean_with_large_whole_weights(executor, mode):
    with jax.enable_x64(False):
        x, z = jnp.float32(0.5), jnp.array([1.0, 2.0, 3.0], jnp.float32)
        w = jnp.full(3, 10**9, jnp.int32)
        program = fg.program(
            lambda x, z, w: fg.mean((fg.broadcast(x) - z) ** 2, weights=w), z=C, w=C
        )
        found = fg.grad(program, mode=mode).on(executor)(x, z, w)
        outside = jax.grad(program.on(executor))(x, z, w)
    np.testing.assert_allclose([found, outside], -3.0, rtol=1e-6)


def test_an_evaluation_counts_more_examples_than_32_bits():
    """Of nodes, say: each has fewer, all together more. So no sum is one of whole numbers."""
    with jax.enable_x64(False):
        clients = fg.population([np.ones(2, np.float32)] * N).everyone
        program = means({"one": lambda params, batch: batch}, 1, None, per_client=False)
        plan = fg.plan(program, np.float32(0), clients)
    sent = [v.aval.dtype for _, x, _ in exchanges(plan.graph) for v, _ in x.up]
    assert sent == [np.float32, np.float32]


@every_executor
def test_a_sum_of_whole_numbers_is_that_of_jax(executor):
    """It stays exact, and wraps where `jnp.sum` does: as sums modulo 2**32 need it."""
    z = np.full(3, 10**9, np.int32)
    with jax.enable_x64(False):
        found = fg.program(lambda z: fg.sum(z), z=C).on(executor)(z)
        np.testing.assert_array_equal(found, jnp.sum(z))
        as_floats = fg.program(lambda z: fg.sum(z.astype(float)), z=C).on(executor)(z)
    assert found.dtype == np.int32 and as_floats == 3e9
