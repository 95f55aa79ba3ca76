"""JAX's control flow and transformations around, between and inside of communication."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from laws import EXECUTORS
from programs import Moved, assert_same

pytestmark = pytest.mark.promotes("rank")  # of formulas over all clients at once

X, Z = jnp.array([0.3, -0.2, 0.5]), jnp.linspace(-1, 1, 12).reshape(4, 3)


def agree(fun, wanted, *args, **placements):
    """Every executor gives what plain JAX gives."""
    program = fg.program(**(placements or {"z": fg.CLIENTS}))(fun)
    for executor in EXECUTORS.values():
        assert_same(program.on(executor)(*(args or (X, Z))), wanted)


def moved(fun, *args):
    """The messages of client 0: (scalars down, scalars up)."""
    seen = Moved()
    fg.program(z=fg.CLIENTS)(fun).on(fg.executors.reference(observe=seen))(*(args or (X, Z)))
    return [(down, up) for down, _, up, _ in seen.messages.get(("clients", 0), [])]


# --- scan ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [1, 2])
def test_scan_in_both_directions(reverse, unroll):
    rates = jnp.array([0.1, 0.5, 0.3])

    def f(x, rates, z):
        def body(x, rate):
            x = x - rate * fg.mean(fg.broadcast(x) - z)
            return x, (fg.sum(jnp.sum(fg.broadcast(x) * z)), fg.broadcast(x) * z)

        return jax.lax.scan(body, x, rates, reverse=reverse, unroll=unroll)

    x, sums, rows = X, [], []
    for rate in rates[::-1] if reverse else rates:
        x = x - rate * (x - Z).mean(0)
        sums.append((x * Z).sum())
        rows.append(x * Z)
    order = slice(None, None, -1 if reverse else None)
    wanted = x, (jnp.stack(sums[order]), jnp.stack(rows[order], 1))
    agree(f, wanted, X, rates, Z)


def test_scan_over_rows_of_each_client():
    def f(x, z):
        def body(x, entry):
            return x + fg.sum(jnp.sin(fg.broadcast(x[0]) * entry)), entry * 2

        return jax.lax.scan(body, x, z)

    x = X
    for column in Z.T:
        x = x + jnp.sin(x[0] * column).sum()
    agree(f, (x, Z * 2))


def test_a_carry_may_start_as_a_constant_and_live_at_clients():
    def f(x, z):
        def body(carry, _):
            state, total = carry
            state = state + z
            return (state, total + fg.sum(state)), None

        return jax.lax.scan(body, (jnp.zeros(3), jnp.zeros(3)), None, length=3)[0]

    agree(f, (3 * Z, 6 * Z.sum(0)))


def test_a_carry_may_become_placed_after_several_iterations():
    """Constants are passed along three carries before the client's value reaches the last."""

    def f(x, z):
        def body(carry, _):
            a, b, c = carry
            return (z * 1.0, a, b), fg.sum(c)

        return jax.lax.scan(body, (jnp.zeros(3),) * 3, None, length=4)

    rows = jnp.stack([jnp.zeros(3)] * 3 + [Z.sum(0)])
    agree(f, ((Z, Z, Z), rows))


def test_scan_of_no_iterations():
    def f(x, z):
        return jax.lax.scan(lambda c, _: (c + fg.sum(z), fg.sum(z)), x, None, length=0)

    program = fg.program(z=fg.CLIENTS)(f)
    assert_same(program(X, Z), (X, jnp.zeros((0, 3))))
    assert fg.plan(program, X, Z).rounds == 0


def test_loops_in_loops_in_branches():
    def f(x, z):
        def inner(c, _):
            return jnp.sin(c + fg.mean(fg.broadcast(c) * z)), None

        def outer(c, i):
            return jax.lax.cond(
                i % 2 == 0,
                lambda c: jax.lax.scan(inner, c, None, length=2)[0],
                lambda c: c - fg.sum(fg.broadcast(c) - z),
                c,
            ), None

        return jax.lax.scan(outer, x, jnp.arange(3))[0]

    x = X
    for i in range(3):
        if i % 2 == 0:
            for _ in range(2):
                x = jnp.sin(x + (x * Z).mean(0))
        else:
            x = x - (x - Z).sum(0)
    agree(f, x)
    assert len(moved(f)) == 2 + 1 + 2


def test_client_values_from_before_inside_and_after_a_loop():
    def f(x, z):
        before = fg.broadcast(jnp.sin(x)) * z

        def body(carry, _):
            w, state = carry
            state = state + before * fg.broadcast(w)
            return (w + fg.mean(state), state), None

        (w, state), _ = jax.lax.scan(body, (x, before), None, length=2)
        return fg.sum(state * before * fg.broadcast(w)), state - before

    before = jnp.sin(X) * Z
    w, state = X, before
    for _ in range(2):
        state = state + before * w
        w = w + state.mean(0)
    agree(f, ((state * before * w).sum(0), state - before))


def test_fori_loop_and_map():
    def f(x, z):
        looped = jax.lax.fori_loop(0, 3, lambda i, c: c + i * fg.mean(fg.broadcast(c) * z), x)
        return looped, jax.lax.map(lambda row: fg.sum(fg.broadcast(row) * z), jnp.stack([x, x * 2]))

    x = X
    for i in range(3):
        x = x + i * (x * Z).mean(0)
    agree(f, (x, jnp.stack([X * Z.sum(0), 2 * X * Z.sum(0)])))


# --- while --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit, trips", [(0.0, 0), (5.0, 2), (20.0, 5)])
def test_while_decided_by_a_sum(limit, trips):
    def f(x, z):
        def body(state):
            total, i = state
            return total + fg.sum(z[0] ** 0 + 0 * fg.broadcast(total)), i + 1  # adds 4

        return jax.lax.while_loop(lambda state: state[0] < limit, body, (0 * x[0], 0))

    agree(f, (jnp.float64(4 * trips), jnp.asarray(trips)))
    assert moved(f) == [(1, 1)] * trips


def test_while_whose_predicate_communicates():
    def f(x, z):
        def more(state):
            return fg.sum(jnp.sum(fg.broadcast(state[0]) * z**2)) > 0.05

        return jax.lax.while_loop(more, lambda state: (state[0] / 2, state[1] + 1), (x**2, 0))

    x, i = X**2, 0
    while (x * Z**2).sum() > 0.05:
        x, i = x / 2, i + 1
    assert i > 1
    agree(f, (x, jnp.asarray(i)))
    assert moved(f) == [(3, 1)] * (i + 1)


def test_while_with_state_at_clients():
    def f(x, z):
        def body(state):
            i, mine, w = state
            mine = mine + fg.broadcast(w) * z
            return i + 1, mine, w + fg.sum(mine)

        return jax.lax.while_loop(lambda state: state[0] < 2, body, (0, jnp.zeros(3), x))[1:]

    mine, w = jnp.zeros((4, 3)), X
    for _ in range(2):
        mine = mine + w * Z
        w = w + mine.sum(0)
    agree(f, (mine, w))


def test_each_client_may_loop_as_long_as_it_likes():
    def f(x, z):
        limit = fg.broadcast(x[0])
        halved, steps = jax.lax.while_loop(
            lambda s: jnp.sum(s[0] ** 2) > limit, lambda s: (s[0] / 2, s[1] + 1), (z, 0)
        )
        return fg.sum(halved), steps

    steps = []
    total = 0.0
    for row in Z:
        i = 0
        while (row**2).sum() > X[0]:
            row, i = row / 2, i + 1
        steps.append(i)
        total = total + row
    assert len(set(steps)) > 1
    agree(f, (total, jnp.array(steps)))


# --- cond and switch ----------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_both_branches_communicate_differently(sign):
    def f(x, z):
        def one(x):
            return fg.sum(fg.broadcast(x) * z), jnp.sin(z)

        def two(x):
            return fg.mean(fg.broadcast(fg.sum(z)) * z), fg.broadcast(x[0]) + z

        return jax.lax.cond(x[0] > 0, one, two, x)

    x = sign * X
    if sign > 0:
        wanted = (x * Z).sum(0), jnp.sin(Z)
    else:
        wanted = (Z.sum(0) * Z).mean(0), x[0] + Z
    agree(f, wanted, x, Z)
    assert len(moved(f, x, Z)) == (1 if sign > 0 else 2)


@pytest.mark.parametrize("index, branch", [(-3, 0), (0, 0), (1, 1), (2, 2), (9, 2)])
def test_switch_clamps_its_index(index, branch):
    def f(i, z):
        branches = [lambda: fg.sum(z), lambda: fg.mean(z), lambda: jnp.zeros(3)]
        return jax.lax.switch(i, branches)

    agree(f, [Z.sum(0), Z.mean(0), jnp.zeros(3)][branch], jnp.asarray(index), Z)
    assert len(moved(f, jnp.asarray(index), Z)) == (0 if branch == 2 else 1)


def test_each_client_may_branch_for_itself():
    def f(x, z):
        return fg.sum(jax.lax.cond(z[0] > fg.broadcast(x[0]), jnp.sin, lambda v: -v, z))

    agree(f, sum(jnp.sin(row) if row[0] > X[0] else -row for row in Z))


def test_branch_decided_by_clients_together():
    def f(x, z):
        positive = fg.sum(z[0] > 0)
        return jax.lax.cond(positive > 1, lambda: fg.sum(z), lambda: x)

    agree(f, Z.sum(0))
    agree(f, X, X, -jnp.abs(Z))


def test_python_branches_on_static_values():
    def f(x, z, *, twice):
        total = fg.sum(z)
        return fg.sum(fg.broadcast(total) * z) if twice else total

    for twice, wanted in ((True, Z.sum(0) ** 2), (False, Z.sum(0))):
        program = fg.program(z=fg.CLIENTS)(functools.partial(f, twice=twice))
        assert_same(program(X, Z), wanted)
        assert fg.plan(program, X, Z).rounds == 1 + twice


# --- calls --------------------------------------------------------------------------------------


def test_jit_with_static_arguments_and_nested_jit():
    @jax.jit
    def inner(x, z):
        return fg.sum(jax.jit(jnp.sin)(fg.broadcast(x) * z))

    def power(x, z, k):
        return inner(x, z) ** k

    def f(x, z):
        return jax.jit(power, static_argnums=2)(x, z, 2) + jax.jit(power, static_argnums=2)(x, z, 3)

    s = jnp.sin(X * Z).sum(0)
    agree(f, s**2 + s**3)


def test_vmap_with_unmapped_arguments_and_other_axes():
    def f(x, z):
        def one(scale, vector, fixed):
            return fg.sum(fg.broadcast(vector) * z * fg.broadcast(scale)) + fixed

        rows = jnp.stack([x, 2 * x, 3 * x], axis=1)
        return jax.vmap(one, in_axes=(0, 1, None), out_axes=1)(jnp.arange(3.0), rows, x)

    wanted = jnp.stack([i * (i + 1) * X * Z.sum(0) + X for i in range(3)], axis=1)
    agree(f, wanted)


def test_vmap_of_a_loop_of_rounds():
    def f(x, z):
        def train(rate):
            def body(w, _):
                return w - rate * fg.mean(fg.broadcast(w) - z), None

            return jax.lax.scan(body, x, None, length=2)[0]

        return jax.vmap(train)(jnp.array([0.1, 0.5]))

    rows = []
    for rate in (0.1, 0.5):
        x = X
        for _ in range(2):
            x = x - rate * (x - Z).mean(0)
        rows.append(x)
    agree(f, jnp.stack(rows))


def test_derivatives_inside_of_a_program():
    """jax.grad and jax.jvp through communication, by the rules of the two primitives."""

    def f(x, z):
        def loss(x):
            return fg.mean(jnp.sum(jnp.sin(fg.broadcast(x) * z)))

        ones = jnp.ones(3)
        slope, curvature = jax.jvp(jax.grad(loss), (x,), (ones,))
        return slope, curvature, jax.jvp(loss, (x,), (ones,))[1]

    def loss(x):
        return jnp.sin(x * Z).sum(1).mean()

    agree(f, (jax.grad(loss)(X), jax.hessian(loss)(X).sum(1), jax.grad(loss)(X).sum()))


def test_derivative_by_a_client_value():
    def f(x, z):
        def loss(z):
            return jnp.sum(fg.sum(fg.broadcast(x) * z**2) ** 2)

        return jax.grad(loss)(z)

    agree(f, jax.grad(lambda z: jnp.sum((X * z**2).sum(0) ** 2))(Z))


# --- custom derivatives around communication ----------------------------------------------------


@jax.custom_jvp
def tenfold_jvp(x, z):
    return fg.sum(fg.broadcast(x) * z)


@tenfold_jvp.defjvp
def _(primals, tangents):
    return tenfold_jvp(*primals), 10 * fg.sum(fg.broadcast(tangents[0]) * primals[1])


@jax.custom_vjp
def tenfold_vjp(x, z):
    return fg.sum(fg.broadcast(x) * z)


tenfold_vjp.defvjp(
    lambda x, z: (tenfold_vjp(x, z), z),
    lambda z, ct: (10 * fg.sum(fg.broadcast(ct) * z), jnp.zeros_like(z)),
)


@pytest.mark.parametrize("rule", [tenfold_jvp, tenfold_vjp], ids=["custom_jvp", "custom_vjp"])
def test_a_custom_rule_around_communication_is_used_inside_of_the_program(rule):
    def f(x, z):
        return jax.grad(lambda x: jnp.sum(rule(x, z)))(x)

    agree(f, 10 * Z.sum(0))


@pytest.mark.parametrize("rule", [tenfold_jvp, tenfold_vjp], ids=["custom_jvp", "custom_vjp"])
def test_a_custom_rule_around_communication_is_never_silently_left_behind(rule):
    program = fg.program(z=fg.CLIENTS)(lambda x, z: jnp.sum(rule(x, z)))
    np.testing.assert_allclose(program(X, Z), (X * Z).sum())
    with pytest.raises(fg.PlanError, match=r"test_control_flow.py.*custom derivative.*fg\.grad"):
        jax.grad(program)(X, Z)
    found = fg.grad(program, mode="reverse")(X, Z)
    np.testing.assert_allclose(found, 10 * Z.sum(0), atol=1e-12)


# --- programs in programs -----------------------------------------------------------------------


@fg.program(data=fg.CLIENTS)
def one_step(w, data, *, rate=0.5):
    return w - rate * fg.mean(fg.broadcast(w) - data)


def test_a_program_inside_of_loops_vmap_and_programs():
    @fg.program(z=fg.CLIENTS)
    def twice(w, z):
        return one_step(one_step(w, z), data=z, rate=0.25)

    def f(x, z):
        looped = jax.lax.fori_loop(0, 2, lambda i, w: twice(w, z), x)
        return looped, jax.vmap(lambda w: one_step(w, z))(jnp.stack([x, -x]))

    def step(w, rate):
        return w - rate * (w - Z).mean(0)

    looped = X
    for _ in range(2):
        looped = step(step(looped, 0.5), 0.25)
    agree(f, (looped, jnp.stack([step(X, 0.5), step(-X, 0.5)])))


def test_a_nested_program_uses_the_outer_executor():
    inner = one_step.on(fg.executors.reference(observe=lambda *_: pytest.fail("ran by itself")))
    agree(lambda x, z: inner(x, z), X - 0.5 * (X - Z).mean(0))


def test_a_program_calls_itself():
    def recursive(x, z, depth):
        program = fg.program(z=fg.CLIENTS)(lambda x, z: recursive(x, z, depth - 1))
        return x if depth == 0 else fg.mean(fg.broadcast(program(x, z)) * z)

    agree(lambda x, z: recursive(x, z, 3), X * Z.mean(0) ** 3)


# --- effects ------------------------------------------------------------------------------------


def test_debug_callbacks_of_clients_and_server_run():
    seen = []

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        here = fg.broadcast(x)
        jax.debug.callback(lambda v: seen.append(("client", float(v))), z[0])
        total = fg.sum(here * z)
        jax.debug.callback(lambda v: seen.append(("server", float(v))), total[0])
        return total

    for executor in list(EXECUTORS.values())[:2]:
        seen.clear()
        f.on(executor)(X, Z)
        jax.effects_barrier()
        assert sorted(v for who, v in seen if who == "client") == sorted(Z[:, 0].tolist())
        np.testing.assert_allclose([v for who, v in seen if who == "server"], [(X * Z).sum(0)[0]])


def test_debug_callbacks_in_loops_of_rounds_run():
    seen = []

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        def body(c, _):
            jax.debug.callback(lambda v: seen.append(float(v)), c[0])
            return c + fg.sum(z), None

        return jax.lax.scan(body, x, None, length=2)[0]

    for executor in list(EXECUTORS.values())[:2]:
        seen.clear()
        np.testing.assert_allclose(f.on(executor)(X, Z), X + 2 * Z.sum(0))
        jax.effects_barrier()
        np.testing.assert_allclose(seen, [X[0], X[0] + Z[:, 0].sum()])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto"])
def test_a_gradient_inside_of_a_program_captures_what_a_cond_in_a_scan_reads(mode, sign):
    """`s` and `y` are of the outer program; the inner one is differentiated by `x`."""

    def loss(average, send, x, y, s, z):
        def step(c):
            return jax.lax.cond(
                s > 0, lambda c: average(jnp.tanh(send(c * y)) * z), lambda c: x * y * s, c
            )

        return jnp.sum(jax.lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0] ** 2)

    @fg.program(z=fg.CLIENTS)
    def outer(x, s, z):
        y = jnp.sin(x)
        inner = fg.program(z=fg.CLIENTS)(lambda x, z: loss(fg.mean, fg.broadcast, x, y, s, z))
        return fg.grad(inner, mode=mode)(x, z)

    def plain(x):
        return loss(lambda v: v.mean(0), lambda c: c[None], x, jnp.sin(X), jnp.float64(sign), Z)

    with jax.numpy_rank_promotion("allow"):
        wanted = jax.grad(plain)(X)
    assert_same(outer(X, jnp.float64(sign), Z), wanted)
