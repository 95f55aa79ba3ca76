"""What a plan says, on programs small enough to count by hand."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import by_hand
import fedgrad as fg
from programs import (
    EVAL,
    TRAIN,
    Moved,
    fedavgm,
    forgetting,
    parallel_placements,
    stateful,
    train_then_eval,
)

X, Z = jnp.arange(1.0, 4.0), jnp.arange(12.0).reshape(4, 3)


def plan_of(fun, *args, **placements):
    return fg.plan(fg.program(**(placements or {"z": fg.CLIENTS}))(fun), *(args or (X, Z)))


def traffic(plan):
    return [(t.round, t.down, t.up, t.times) for t in plan.traffic]


# --- messages -----------------------------------------------------------------------------------


@pytest.mark.promotes("dtype")
def test_scalars_and_bytes_of_every_dtype():
    def f(x, key, z):
        small, flag = fg.broadcast((x.astype(jnp.float32), x > 0))
        drawn = jax.random.normal(fg.client_key(key))
        return fg.sum((small * z.astype(jnp.float16) * flag, z.astype(jnp.int8), drawn))

    (record,) = plan_of(f, X, jax.random.key(0), Z, z=fg.CLIENTS).traffic
    assert (record.round, record.placement, record.times) == (1, "clients", 1)
    assert (record.down, record.down_bytes) == (3 + 3 + 2, 3 * 4 + 3 * 1 + 2 * 4)
    assert (record.up, record.up_bytes) == (3 + 3 + 1, 3 * 4 + 3 * 8 + 8)


def test_a_value_is_broadcast_once():
    def f(x, z):
        return fg.sum(fg.broadcast(x) * z), fg.sum(fg.broadcast(x) + z), fg.broadcast(x)

    assert traffic(plan_of(f)) == [(1, 3, 6, 1)]


def test_equal_expressions_are_one_value():
    def f(x, z):
        return fg.sum(fg.broadcast(jnp.sin(x)) * z) + fg.sum(fg.broadcast(jnp.sin(x)) * z)

    assert traffic(plan_of(f)) == [(1, 3, 3, 1)]


def test_a_value_is_not_sent_again_in_a_later_round():
    def f(x, z):
        here = fg.broadcast(x)
        total = fg.sum(here * z)
        return fg.sum(here * z * fg.broadcast(total))

    plan = plan_of(f)
    assert traffic(plan) == [(1, 3, 3, 1), (2, 3, 3, 1)]
    assert plan.client_memory == {"clients": 24}  # here * z


def test_independent_communication_shares_a_round():
    def f(x, z):
        a, b = fg.sum(fg.broadcast(x) * z), fg.sum(fg.broadcast(x**2) + z)
        return a + b, fg.mean(z)

    assert traffic(plan_of(f)) == [(1, 6, 3 + 3 + 3 + 1, 1)]


def test_a_sum_travels_as_early_as_it_can():
    def f(x, z):
        later = fg.broadcast(fg.sum(fg.broadcast(x) * z))
        return fg.sum(later * z), fg.sum(z**2)

    assert traffic(plan_of(f)) == [(1, 3, 6, 1), (2, 3, 3, 1)]


def test_a_broadcast_travels_as_late_as_it_can():
    def f(x, z):
        total = fg.sum(fg.broadcast(x) * z)
        return fg.sum(fg.broadcast(total) * fg.broadcast(x**2) * z)

    plan = plan_of(f)
    assert traffic(plan) == [(1, 3, 3, 1), (2, 6, 3, 1)]
    assert plan.client_memory == {"clients": 0}


def test_dead_code_is_not_counted():
    def f(x, z):
        fg.sum(fg.broadcast(x) * z)
        unused = fg.mean(fg.broadcast(jnp.cos(x)) + z)
        return fg.sum(z), unused.shape[0]

    assert traffic(plan_of(f)) == [(1, 0, 3, 1)]


def test_dead_communication_inside_a_loop_is_not_counted():
    def f(x, z):
        def body(carry, _):
            a, b = carry
            return (a + fg.sum(z), b + fg.sum(fg.broadcast(b) * z)), fg.mean(z)

        return jax.lax.scan(body, (x, x), None, length=5)[0][0]

    assert traffic(plan_of(f)) == [(1, 0, 3, 5)]


def test_constants_are_not_sent():
    def f(x, z):
        return fg.sum(fg.broadcast(jnp.arange(3.0)) * z + fg.broadcast(2.0))

    assert traffic(plan_of(f)) == [(1, 0, 3, 1)]


def test_a_program_without_communication_has_no_rounds():
    plan = plan_of(lambda x, z: (x * 2, z * 3))
    assert (plan.rounds, plan.traffic, plan.readdressed) == (0, (), ())
    said = str(plan.audit())
    assert said == "nothing leaves any client\nstays at clients: float64[3], result[1]"


def test_a_broadcast_result_costs_its_message():
    assert traffic(plan_of(lambda x, z: fg.broadcast(x) + z)) == [(1, 3, 0, 1)]


# --- counts behind means ------------------------------------------------------------------------


def test_clients_are_counted_once_however_many_means():
    def f(x, z):
        here = fg.broadcast(x)
        first = fg.mean({"a": here * z, "b": z[0]})
        second = fg.mean(here * z * fg.broadcast(first["a"]))
        return first, second, fg.mean(z.astype(jnp.int32))

    plan = plan_of(f)
    assert traffic(plan) == [(1, 3, 3 + 1 + 3 + 1, 1), (2, 3, 3, 1)]


def test_the_sum_of_a_constant_needs_only_the_count():
    def f(x, z):
        return fg.mean(z), fg.sum(7.0), fg.sum(jnp.ones((2, 2)))

    assert traffic(plan_of(f)) == [(1, 0, 3 + 1, 1)]
    found = fg.program(z=fg.CLIENTS)(f)(X, Z)
    np.testing.assert_allclose(found[1], 28.0)
    np.testing.assert_allclose(found[2], np.full((2, 2), 4.0))


def test_clients_are_counted_once_across_nested_programs_and_jit():
    inner = fg.program(z=fg.CLIENTS)(lambda z: fg.mean(z))

    def f(x, z):
        return inner(z), jax.jit(fg.mean)(z * 2), fg.mean(z * 3)

    assert traffic(plan_of(f)) == [(1, 0, 3 * 3 + 1, 1)]


def test_equal_weights_are_summed_once():
    def f(x, z):
        weight = z[0] ** 2
        return fg.mean(z, weights=weight), fg.mean(z[1], weights=weight), fg.sum(weight)

    assert traffic(plan_of(f)) == [(1, 0, 3 + 1 + 1, 1)]


def test_each_placement_is_counted_by_itself():
    def f(a, b):
        return fg.mean(a, at=TRAIN) + fg.mean(a + 1, at=TRAIN) + fg.mean(b, at=EVAL)

    plan = plan_of(f, Z, Z, a=TRAIN, b=EVAL)
    assert {t.placement: t.up for t in plan.traffic} == {"train": 3 + 3 + 1, "eval": 3 + 1}


# --- who is asked again, and what is remembered -------------------------------------------------


def test_readdressed():
    two = (X, Z, Z)
    assert fg.plan(parallel_placements, *two).readdressed == ()
    assert fg.plan(stateful, X, Z).readdressed == ("clients",)
    assert plan_of(lambda x, z: fg.sum(z)).readdressed == ()


@pytest.mark.parametrize("length, expected", [(1, ()), (2, ("clients",))])
def test_a_loop_readdresses(length, expected):
    def f(x, z):
        step = lambda c, _: (c + fg.sum(fg.broadcast(c) * z), None)
        return jax.lax.scan(step, x, None, length=length)[0]

    assert plan_of(f).readdressed == expected


def test_each_cohort_of_a_serial_round_is_addressed_once():
    """Training clients in round 1, loss clients in round 2; nobody *must* be asked twice."""
    plan = fg.plan(train_then_eval, X, Z, Z)
    assert plan.readdressed == ()
    assert [(t.round, t.placement) for t in plan.traffic] == [(1, "train"), (2, "eval")]


def test_placements_share_a_round():
    plan = fg.plan(parallel_placements, X, Z, Z)
    assert plan.rounds == 1
    assert {(t.round, t.placement, t.down, t.up) for t in plan.traffic} == {
        (1, "train", 3, 1),
        (1, "eval", 3, 1),
    }


def test_memory_is_what_the_client_keeps_of_earlier_rounds():
    def f(x, z):
        s = jnp.sin(fg.broadcast(x)) * z  # 24 bytes, kept for round 3
        small = (jnp.sum(s) > 0).astype(jnp.float32)  # 4 bytes, kept for round 2
        first = fg.sum(small).astype(s.dtype) * fg.sum(s)
        second = fg.sum(fg.broadcast(first) * small.astype(s.dtype))
        return fg.sum(fg.broadcast(second) * s)

    plan = plan_of(f)
    assert plan.rounds == 3
    assert plan.client_memory == {"clients": 24 + 4}


def test_what_needs_no_message_is_not_remembered():
    def f(x, z):
        heavy = jnp.sin(z) ** 2  # from the client's own argument
        total = fg.sum(heavy)
        return fg.sum(fg.broadcast(total) * heavy)

    assert plan_of(f).client_memory == {"clients": 0}


def test_a_client_result_is_not_memory():
    assert plan_of(lambda x, z: fg.broadcast(x) * z).client_memory == {"clients": 0}


def test_state_carried_by_a_loop_is_memory():
    def f(x, z):
        def body(carry, _):
            w, state = carry
            state = state + fg.broadcast(w) * z
            return (w + fg.sum(state), state), None

        return jax.lax.scan(body, (x, jnp.zeros(3)), None, length=3)[0][0]

    assert plan_of(f).client_memory == {"clients": 24}


def test_recomputing_trades_memory_for_messages():
    program = fg.program(z=fg.CLIENTS)(
        lambda x, z: fg.sum((fg.broadcast(fg.sum(s := fg.broadcast(x) * z)) - s) ** 2)
    )
    once = fg.plan(program, X, Z)
    again = forgetting(program, X, Z)
    assert (traffic(once), once.client_memory) == ([(1, 3, 3, 1), (2, 3, 3, 1)], {"clients": 24})
    assert (traffic(again), again.client_memory) == ([(1, 3, 3, 1), (2, 6, 3, 1)], {"clients": 0})
    moved = Moved()
    reference = fg.executors.reference(observe=moved, recompute=True)
    np.testing.assert_allclose(program.on(reference)(X, Z), program(X, Z))
    assert moved.messages["clients", 0] == [(3, 24, 3, 24), (6, 48, 3, 24)]


# --- control flow -------------------------------------------------------------------------------


def test_loops_are_nested_not_unrolled():
    def f(x, z):
        def inner(c, _):
            return c + fg.sum(fg.broadcast(c) * z), None

        def outer(c, _):
            c = jax.lax.scan(inner, c, None, length=3)[0]
            return fg.mean(fg.broadcast(c) * z), None

        return jax.lax.scan(outer, fg.sum(z) + x, None, length=4)[0]

    plan = plan_of(f)
    assert plan.rounds == 1 + 4 * (3 + 1)
    assert traffic(plan) == [(1, 0, 3, 1), (2, 3, 3, 12), (3, 3, 4, 4)]


def test_a_long_loop_is_planned_as_quickly_as_a_short_one():
    def f(x, z):
        step = lambda c, _: (c + fg.sum(fg.broadcast(c) * z), None)
        return jax.lax.scan(step, x, None, length=10**6)[0]

    assert (plan_of(f).rounds, traffic(plan_of(f))) == (10**6, [(1, 3, 3, 10**6)])


def test_a_branch_counts_as_its_longest_side():
    def f(x, z):
        def two(x):
            return fg.sum(fg.broadcast(fg.sum(fg.broadcast(x) * z)) * z)

        return jax.lax.cond(x[0] > 0, two, lambda x: fg.sum(z), x)

    plan = plan_of(f)
    assert plan.rounds == 2
    assert sorted((t.down, t.up, t.times) for t in plan.traffic) == [
        (0, 3, None),
        (3, 3, None),
        (3, 3, None),
    ]


def test_what_data_decide_is_not_counted():
    def f(x, z):
        def body(c):
            return c + fg.sum(fg.broadcast(c) * z)

        return jax.lax.while_loop(lambda c: jnp.sum(c) < 100, body, x)

    plan = plan_of(f)
    assert (plan.rounds, traffic(plan)) == (1, [(1, 3, 3, None)])
    assert plan.readdressed == ("clients",)


def test_loops_without_communication_are_part_of_a_stage():
    def f(x, z):
        local = jax.lax.fori_loop(0, 5, lambda i, w: w - 0.1 * (w - z), fg.broadcast(x))
        return jax.lax.fori_loop(0, 3, lambda i, w: w * 2, fg.sum(local))

    plan = plan_of(f)
    assert traffic(plan) == [(1, 3, 3, 1)]
    assert not any(plan.graph.loops)


# --- the plan as a whole ------------------------------------------------------------------------


def test_the_number_of_clients_is_not_part_of_the_program():
    few, many = (fg.plan(stateful, X, jnp.zeros((n, 3))) for n in (2, 2000))
    assert few.traffic == many.traffic
    assert (few.clients, many.clients) == ({"clients": 2}, {"clients": 2000})


def test_planning_computes_nothing():
    huge = jax.ShapeDtypeStruct((10**9, 10**6), jnp.float32)
    program = fg.program(z=fg.CLIENTS)(lambda z: fg.sum(jnp.sin(z)))
    assert fg.plan(program, huge).traffic[0].up_bytes == 4 * 10**6


def test_a_plan_is_frozen():
    plan = fg.plan(stateful, X, Z)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.name = "other"
    assert (plan.name, plan.rules) == ("stateful", ())


def test_keyword_arguments_and_defaults():
    @fg.program(z=fg.CLIENTS)
    def f(x, z, *, scale=2.0):
        return fg.sum(fg.broadcast(x * scale) * z)

    assert fg.plan(f, z=Z, x=X, scale=3.0).traffic == fg.plan(f, X, Z).traffic
    np.testing.assert_allclose(f(z=Z, x=X), 2 * X * Z.sum(0))
    np.testing.assert_allclose(f(X, Z, scale=3.0), 3 * X * Z.sum(0))


# --- the audit ----------------------------------------------------------------------------------


@pytest.mark.promotes("dtype")
def test_the_audit_lists_every_sum_with_its_line():
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        y = jnp.tanh(fg.broadcast(x) * z)  # line 3
        return fg.sum(y), fg.sum(fg.broadcast(jnp.max(fg.sum(y))) * y[0].astype(jnp.float32))

    audit = fg.plan(f, X, Z).audit()
    assert audit.only_sums and audit.findings == ()
    facts = [(r.round, r.placement, r.shape, r.dtype, r.size, r.clients) for r in audit.releases]
    assert facts == [
        (1, "clients", (3,), "float64", 3, 4),
        (2, "clients", (), "float64", 1, 4),
    ]
    first = inspect.getsourcelines(f.fun)[1]
    assert f"test_plan.py:{first + 2}" in audit.releases[0].source
    assert f"test_plan.py:{first + 3}" in audit.releases[1].source
    assert str(audit).count("\n") == 1 and "sum over clients ×4" in str(audit)


def _named(algorithm, **more):
    """(what it is called, size) of all that leaves clients, but what an argument is called."""
    cohort = fg.population(by_hand.make_clients([5, 3, 8])).everyone
    params = by_hand.as_params(by_hand.START)
    if algorithm.client_init is not None:
        one = algorithm.client_init(params, 3)
        more["client_state"] = jax.tree.map(lambda x: jnp.stack([x] * 3), one)
    more |= dict.fromkeys(algorithm.cohorts, cohort)
    args = algorithm.init(params), algorithm.hyper, cohort, jax.random.key(0)
    audit = fg.plan(algorithm.round, *args, **more).audit()
    return audit, {(r.source, r.size) for r in audit.releases}


NAMED = {
    "fed_avg": (
        lambda: fg.fed_avg(by_hand.loss),
        {
            ("model update, weighted", 2),
            ("training loss, weighted", 1),
            ('weight, "cohort.count"', 1),
        },
    ),
    "fed_exp": (
        lambda: fg.fed_exp(by_hand.loss),
        {("model update", 2), ("training loss", 1), ("squared norm", 1)},
    ),
    "power": (
        lambda: fg.fed_avg(by_hand.loss, weighting="power"),
        {("model update, weighted", 2), ("weight", 1)},
    ),
    "scaffold": (lambda: fg.scaffold(by_hand.loss), {("model update", 2), ("control variate", 2)}),
    "fed_dyn": (lambda: fg.fed_dyn(by_hand.loss), {("model update", 2), ("training loss", 1)}),
    "tuned": (
        lambda: fg.self_tuning(fg.fed_avgm(by_hand.loss), ["server", "client"]),
        {
            ("model update, weighted", 2),
            ("derivative of model update, weighted", 2),
            ("loss of the model, weighted", 1),
            ("derivative of loss of the model, weighted", 2),
        },
    ),
    "race": (
        lambda: fg.fed_auto(by_hand.loss),
        {("model update, weighted", 2), ("ranks of the candidates", 3)},
    ),
}


@pytest.mark.parametrize("make, expected", NAMED.values(), ids=NAMED)
def test_the_audit_names_what_leaves_in_our_own_algorithms(make, expected):
    audit, found = _named(make())
    assert expected <= found
    assert "library" not in str(audit)


def test_the_audit_does_not_take_every_argument_for_data():
    """FedDyn's clients know how many there are, and add that up."""
    audit, _ = _named(fg.fed_dyn(by_hand.loss))
    assert '"client_state.clients" (a raw argument of the client' in str(audit)
    assert "data" not in str(audit)


def test_a_derivative_has_the_line_of_the_sum_that_it_is_of():
    def encode(values):
        return [x.astype(float) for x in reversed(values)]

    def decode(sums, shapes):
        return [x.astype(s.dtype) for x, s in zip(reversed(sums), shapes, strict=True)]

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        return fg.mean(jnp.sum(fg.broadcast(x) * z) ** 2)

    line = f"test_plan.py:{f.fun.__code__.co_firstlineno + 2} ("
    backwards = fg.executors.local(aggregator=fg.aggregate.Aggregator("back", encode, decode))
    for gradient in (fg.grad(f, mode="mixed"), fg.grad(f, mode="mixed").on(backwards)):
        audit = fg.plan(gradient, X, Z).audit()
        (source,) = [r.source for r in audit.releases if r.shape == X.shape]
        assert line in source
        assert "library" not in str(audit)


def test_the_audit_lists_what_stays_at_clients():
    audit, _ = _named(fg.scaffold(by_hand.loss))
    assert [(k.placement, k.shape, k.result) for k in audit.kept] == [
        ("clients", (), "result[2].control['b']"),
        ("clients", (2,), "result[2].control['w']"),
        ("clients", (), "result[2].share"),
    ]
    assert "stays at clients: float64[2], result[2].control['w']" in str(audit)
    assert _named(fg.fed_avg(by_hand.loss))[0].kept == ()


def test_a_scope_of_the_user_is_said_with_the_line():
    def f(x, z):
        with jax.named_scope("distance"):
            return fg.sum(jnp.sum((fg.broadcast(x) - z) ** 2))

    (release,) = plan_of(f).audit().releases
    assert release.source.startswith("distance, ") and "test_plan.py" in release.source


def test_the_audit_sees_into_loops_and_placements():
    audit = fg.plan(fedavgm, *_fedavgm_shapes(4, 5)).audit()
    assert {(r.placement, r.clients) for r in audit.releases} == {("train", 4), ("eval", 5)}

    def f(x, z):
        step = lambda c, _: (c + fg.sum(fg.broadcast(c) * z), None)
        return jax.lax.scan(step, x, None, length=3)[0]

    (release,) = plan_of(f).audit().releases
    assert release.shape == (3,)


def test_releases_are_the_traffic():
    plan = fg.plan(fedavgm, *_fedavgm_shapes(4, 5))
    for t in plan.traffic:
        released = [
            r.size
            for r in plan.audit().releases
            if (r.round, r.placement) == (t.round, t.placement)
        ]
        assert sum(released) == t.up


def test_a_sum_over_one_client_is_no_secret():
    audit = fg.plan(stateful, X, Z[:1]).audit()
    assert not audit.only_sums
    assert "one client" in audit.findings[0] and "! " in str(audit)


def _fedavgm_shapes(train, test):
    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float64)

    hyper = {"lr": of(), "momentum": of()}
    data = [{"x": of(n, 4, 2), "y": of(n, 4)} for n in (train, test)]
    return hyper, of(2), of(2), *data
