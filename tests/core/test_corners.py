"""Corners that were once wrong: each test is the smallest program that showed it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fedgrad as fg
from laws import every_executor

Z = jnp.arange(5.0) + 1
X = jnp.asarray(2.0)
every_mode = pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto"])


@every_executor
def test_a_constant_used_on_both_sides_stays_one_value(executor):
    @fg.program(z=fg.CLIENTS)
    def f(z):
        k = jnp.arange(3.0) * 2
        s = fg.sum(z * k)
        return s, k, k * s

    s, k, product = f.on(executor)(Z)
    np.testing.assert_allclose(k, jnp.arange(3.0) * 2)
    np.testing.assert_allclose(s, Z.sum() * k)
    np.testing.assert_allclose(product, k * s)


@every_executor
def test_a_constant_recurrence_that_clients_read(executor):
    def in_while(x, z):
        def body(c):
            return c[0] + 1, c[1] - 0.1 * fg.mean(fg.broadcast(c[1]) * z * (c[0] + 1))

        return lax.while_loop(lambda c: c[0] < 2, body, (0, x))[1]

    def in_scan(x, z):
        def body(c, _):
            return (c[0] - 0.1 * fg.mean(fg.broadcast(c[0]) * z * c[1]), c[1] * 2 + 1), None

        return lax.scan(body, (x, jnp.asarray(1.0)), None, length=2)[0][0]

    x, m = X, Z.mean()
    after_while = x - 0.1 * x * m
    after_while -= 0.1 * after_while * m * 2
    after_scan = x - 0.1 * x * m
    after_scan -= 0.1 * after_scan * m * 3
    for f, wanted in ((in_while, after_while), (in_scan, after_scan)):
        program = fg.program(z=fg.CLIENTS)(f).on(executor)
        np.testing.assert_allclose(program(X, Z), wanted)


@every_executor
def test_what_a_loop_counted_is_read_by_clients_after_it(executor):
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        def body(c, _):
            return (c[0] - 0.1 * fg.mean(fg.broadcast(c[0]) * z), c[1] + 1), None

        (x, i), _ = lax.scan(body, (x, jnp.int32(0)), None, length=2)
        return fg.sum(z * i.astype(z.dtype)) + x

    wanted = X * (1 - 0.1 * Z.mean()) ** 2 + 2 * Z.sum()
    np.testing.assert_allclose(f.on(executor)(X, Z), wanted)


def test_how_often_a_while_ran_is_the_servers_knowledge():
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        def body(c):
            return c[0] + 1, c[1] - 0.1 * fg.mean(fg.broadcast(c[1]) * z)

        i, _ = lax.while_loop(lambda c: c[1] > 0.5, body, (0, x))
        return fg.sum(z * i)

    with pytest.raises(fg.PlacementError, match="server"):
        f(X, Z)


@pytest.mark.parametrize("round_behind", [False, True])
@pytest.mark.parametrize("mode", ["auto", "mixed", "reverse"])
def test_no_derivative_by_clients_through_a_while(mode, round_behind):
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        def body(c):
            return c[0] + 1, c[1] - 0.1 * fg.mean(fg.broadcast(c[1]) * z * z)

        x = lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1] ** 2
        return fg.sum(jnp.sin(fg.broadcast(x) * z)) if round_behind else x

    with pytest.raises(fg.PlanError, match=r"a scan .*instead of a while_loop"):
        fg.grad(f, "z", mode=mode)(X, Z)


@pytest.mark.promotes("dtype")
@pytest.mark.parametrize("mode", ["mixed", "reverse"])
@pytest.mark.parametrize("argnums", [0, 1])
def test_a_branch_remembers_no_array_that_it_captured(mode, argnums):
    matrix, z = jnp.array([[0.2, -0.7], [0.9, 0.4]]), jnp.array([[1.0, 2.0], [-0.5, 0.3]])

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        def on(x, z):
            return fg.mean(jnp.cos(fg.broadcast(x)) * z), z @ matrix

        def off(x, z):
            return x * 2.0, fg.broadcast(x) * z

        y, s = lax.cond(x[0] > 0, on, off, x, z)
        return jnp.sum(y) + fg.mean(jnp.sum(s**2))

    def stacked(x, z):
        return jnp.sum(jnp.cos(x) * z.mean(0)) + jnp.mean(jnp.sum((z @ matrix) ** 2, 1))

    x = jnp.array([0.4, -0.3])
    wanted = jax.grad(stacked, argnums)(x, z)
    np.testing.assert_allclose(fg.grad(f, argnums, mode=mode)(x, z), wanted, rtol=1e-10)


@pytest.mark.promotes("dtype")
def test_complex_arguments():
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        return fg.mean(jnp.abs(fg.broadcast(x) - z) ** 2)

    x = jnp.asarray(1 + 2j)
    wanted = jax.grad(lambda x: jnp.mean(jnp.abs(x - Z) ** 2))(x)
    np.testing.assert_allclose(fg.grad(f, mode="reverse")(x, Z), wanted)
    with pytest.raises(fg.ArgumentError, match="complex"):
        fg.grad(f)(x, Z)


@every_mode
@pytest.mark.promotes("dtype")
def test_complex_values_on_the_way(mode):
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        total = fg.sum(jnp.exp(fg.broadcast(x * (1 + 0.5j)) * z * 0.1))
        return jnp.abs(total) ** 2

    def plain(x):
        return jnp.abs(jnp.sum(jnp.exp(x * (1 + 0.5j) * Z * 0.1))) ** 2

    np.testing.assert_allclose(fg.grad(f, mode=mode)(X, Z), jax.grad(plain)(X), rtol=1e-10)


@every_mode
def test_a_nested_derivative_captures_from_the_outer_program(mode):
    @fg.program(z=fg.CLIENTS)
    def outer(x, y, z):
        there = fg.broadcast(y)

        @fg.program(z=fg.CLIENTS)
        def inner(x, z):
            return fg.mean(jnp.sin(fg.broadcast(x)) * fg.broadcast(y) * z + there) + fg.sum(there)

        return fg.grad(inner, mode=mode)(x, z)

    wanted = jnp.cos(X) * 3 * Z.mean()
    np.testing.assert_allclose(outer(X, jnp.asarray(3.0), Z), wanted)


def test_auto_is_priced_without_what_is_not_returned():
    a, b = fg.Placement("a"), fg.Placement("b")

    @fg.program(za=a, zb=b)
    def chain(x, za, zb):
        u = fg.sum(fg.broadcast(x, a) * za, a)
        return fg.sum(jnp.sum(fg.broadcast(u, b) * zb), b)

    explained = fg.explain(chain, jnp.ones(4), jnp.ones((3, 4)), jnp.ones((3, 4)))
    allowed = [row.price for row in explained.rows if row.allowed]
    assert explained["auto"].price == min(allowed)


def test_auto_never_asks_a_client_more_often_than_the_program():
    @fg.program(z=fg.CLIENTS)
    def loop(x, z):
        def body(c, _):
            x, s = c
            s = s * 0.5 + jnp.sin(fg.broadcast(x) * z)
            return (x - 0.1 * fg.mean(s), s), None

        return jnp.sum(lax.scan(body, (x, jnp.zeros(())), None, length=3)[0][0] ** 2)

    program, auto = fg.plan(loop, X, Z), fg.plan(fg.grad(loop), X, Z)
    assert auto.asked("clients") <= program.asked("clients") == 3
    assert "pull" not in auto.rules


def test_the_store_of_examples_cannot_be_returned_nor_given_to_the_server():
    clients = fg.cohort([np.arange(n, dtype=np.float32) for n in (2, 5, 3)])
    with pytest.raises(fg.ArgumentError, match="store of examples"):
        fg.program(d=fg.CLIENTS)(lambda d: d)(clients)
    with pytest.raises(fg.CohortError, match="at the server"):
        fg.program(z=fg.CLIENTS)(lambda d, z: fg.sum(z))(clients, Z)


def test_weak_types_are_kept():
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        return fg.mean(fg.broadcast(x) * z)

    z = Z.astype(jnp.bfloat16)
    value, _ = fg.value_and_grad(f)(2.0, z)
    assert value.dtype == f(2.0, z).dtype == jnp.bfloat16


@every_executor
def test_very_narrow_numbers(executor):
    f = fg.program(z=fg.CLIENTS)(lambda z: fg.sum(z)).on(executor)
    assert f(jnp.full(100, 4, jnp.float8_e4m3fn)) == 400 // 32 * 32  # rounded to what float8 has
    total = f(jnp.full(20, 7, jnp.int4))
    assert total == 140 and total.dtype == jnp.sum(jnp.int32(1)).dtype


def test_a_choice_is_not_reused_for_another_program():
    rounds = [1]

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        for _ in range(rounds[0]):
            x = x - 0.1 * fg.mean(jnp.sin(fg.broadcast(x)) * z)
        return x

    assert len(fg.plan(fg.grad(f), X, Z).rules) == 1
    rounds[0] = 2
    assert len(fg.plan(fg.grad(f), X, Z).rules) == 2


@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto"])
def test_the_derivative_of_a_number_of_python_is_zero(mode):
    number = fg.program(z=fg.CLIENTS)(lambda x, z: 1.0)
    value, slope = fg.value_and_grad(number, mode=mode)(X, Z)
    assert value == 1.0 and slope.shape == X.shape and not slope.any()
    both = fg.program(z=fg.CLIENTS)(lambda x, z: (2.0, fg.sum(jnp.sin(fg.broadcast(x) * z))))
    slopes = fg.jacobian(both, mode=mode)(X, Z)
    assert not slopes[0].any() and slopes[1].any()


def test_many_rounds_are_planned_quickly_enough():
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        for _ in range(8):
            x = x - 0.1 * fg.mean(jnp.sin(fg.broadcast(x)) * z)
        return x

    plan = fg.plan(fg.grad(f), X, Z)
    assert len(plan.rules) == 8 and "pull" not in plan.rules


def test_misuse_of_nested_calls_methods_and_many_small_captures():
    inner = fg.program(z=fg.CLIENTS)(lambda x, z: fg.sum(z) + x)
    with pytest.raises(fg.ArgumentError, match=r"test_corners\.py"):
        fg.program(z=fg.CLIENTS)(lambda x, z: inner(x, z, 3))(X, Z)
    with pytest.raises(fg.ArgumentError, match="method"):

        class _Model:
            @fg.program(z=fg.CLIENTS)
            def loss(self, x, z):
                return fg.sum(z)

    many = [jnp.ones(400) * i for i in range(5)]
    hidden = fg.program(z=fg.CLIENTS)(lambda z: fg.sum(sum(jnp.sum(z * a) for a in many)))
    with pytest.raises(fg.PlacementError, match="captured"):
        hidden(Z)
    with pytest.raises(fg.PlacementError, match="captured"):
        fg.program(z=fg.CLIENTS)(
            lambda z: fg.sum(jax.jit(lambda z: jnp.sum(z * np.ones(3000)))(z))
        )(Z)


def test_vjp_and_jvp_of_odd_signatures():
    f = fg.program(z=fg.CLIENTS)(lambda x, z, **more: fg.mean(fg.broadcast(x) * z))
    y, dy = fg.jvp(f)(X, Z, tangents=jnp.asarray(1.0))
    np.testing.assert_allclose((y, dy), (X * Z.mean(), Z.mean()))
    client = fg.program(z=fg.CLIENTS)(lambda x, z: jnp.sin(fg.broadcast(x) * z))
    with pytest.raises(fg.PlacementError, match="at clients"):
        fg.vjp(client)(X, Z, Z)
