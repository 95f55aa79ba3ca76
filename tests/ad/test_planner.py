"""`mode="auto"` takes the cheapest of all ways that the cost model allows."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_random_programs import FEDERATED, read, scripts

import fedgrad as fg
from fedgrad.ad.derivative import Subject, derivative
from fedgrad.ad.planner import rule_vectors
from fedgrad.core.arguments import read_arguments
from fedgrad.core.trace import trace
from fedgrad.core.trace import traced as traced_function
from fedgrad.planning.cut import cut
from fedgrad.planning.plan import Plan
from programs import EVAL, TABLE, TRAIN, class_1, forgetting, normal, two_rounds

N = 3
X, Z = normal(0, 3), normal(1, N, 3)
COSTS = {
    "default": fg.CostModel(),
    "again": fg.CostModel(readdress=True),
    "dear_up": fg.CostModel(up=10, readdress=True),
    "dear_down": fg.CostModel(down=10, readdress=True),
    "dear_rounds": fg.CostModel(round_trip=1e4, readdress=True),
    "no_memory": fg.CostModel(readdress=True, client_memory=0),
}


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float64)


def traced(program, args, wrt=0):
    """The program as the planner sees it, differentiated by its argument number `wrt`."""
    arguments = read_arguments(program, program.bind(args, {}))
    sizes = [len(jax.tree.leaves(argument)) for argument in args]
    first = sum(sizes[:wrt])

    def fun(*flat):
        return jax.tree.leaves(program.call(arguments.rebuild(list(flat))))

    made = traced_function(
        fun, arguments.values, program.client_placements, nested=True, to_derive=True
    )
    wanted = range(first, first + sizes[wrt]), range(len(made.graph.outputs))
    return Subject(program.name, program.client_placements, made.graph, made.outputs, *wanted)


def brute_force(program, args, cost):
    """The least price over all rules and over remembering or recomputing, by trying them all."""
    found = traced(program, args)
    arguments = read_arguments(program, program.bind(args, {}))
    plain = fg.plan(program, *args)
    best = math.inf
    for rules in rule_vectors(found):
        graph = trace(by_rules(program, args, rules), arguments).graph
        for recompute in (False, True):
            plan = Plan("", cut(graph, recompute), plain.clients, None)
            if cost.allows(plan, plain):
                best = min(best, cost.price(plan))
    return best


def auto(program, args, cost):
    return fg.plan(fg.value_and_grad(program, mode=cost), *args)


def pure(program, args):
    """The plan of each mode that JAX can take."""
    for mode in ("forward", "reverse", "mixed"):
        for plan in (fg.plan, forgetting):
            gradient = fg.value_and_grad(program, mode=mode)
            try:
                yield mode, plan(gradient, *args)
            except fg.PlanError:
                continue


# --- the cheapest of all ------------------------------------------------------------------------

SEARCHED = [
    case
    for case in TABLE
    if case.name
    in {
        "class_1",
        "weight_exponent",
        "distillation",
        "two_rounds",
        "stateful",
        "parallel_placements",
        "train_then_eval",
        "while_loop",
        "custom_jvp_inside",
    }
]


@functools.cache
def shapes(case):
    return case.args(N)


@pytest.mark.parametrize("case", SEARCHED, ids=lambda case: case.name)
def test_never_dearer_than_a_pure_mode_and_equal_to_brute_force(case):
    args = shapes(case)
    plain, modes = fg.plan(case.program, *args), list(pure(case.program, args))
    assert len(modes) >= 4
    for name in ("default", "again", "dear_up"):
        cost = COSTS[name]
        plan = auto(case.program, args, cost)
        price = cost.price(plan)
        assert cost.allows(plan, plain)
        for _, other in modes:
            assert price <= cost.price(other) or not cost.allows(other, plain)
        if name != "default":
            assert price == brute_force(case.program, args, cost)


@pytest.mark.parametrize("case", SEARCHED[:4], ids=lambda case: case.name)
@pytest.mark.parametrize("cost", COSTS)
def test_gradient_without_the_value_is_no_dearer_either(case, cost):
    """What is chosen for value and gradient is also cheapest for the gradient alone."""
    cost, args = COSTS[cost], shapes(case)
    plain = fg.plan(case.program, *args)
    price = cost.price(fg.plan(fg.grad(case.program, mode=cost), *args))
    for mode in ("forward", "reverse", "mixed"):
        other = fg.plan(fg.grad(case.program, mode=mode), *args)
        assert price <= cost.price(other) or not cost.allows(other, plain)


def scalar_program(script):
    @fg.program(z=fg.CLIENTS)
    def program(x, z):
        server, client = read(FEDERATED, script, x, z)
        return jnp.sum(jnp.sin(server)) * fg.sum(jnp.sum(client**2))

    return program


X2, Z2 = normal(0, 2), normal(1, N, 2)


@settings(max_examples=8)
@given(scripts, st.sampled_from(sorted(COSTS)))
def test_random_programs(script, cost):
    program, cost, args = scalar_program(script), COSTS[cost], (X2, Z2)
    plain = fg.plan(program, *args)
    assume(plain.rounds <= 3)
    plan = auto(program, args, cost)
    price = cost.price(plan)
    assert cost.allows(plan, plain)
    for _, other in pure(program, args):
        assert price <= cost.price(other) or not cost.allows(other, plain)
    assert price == brute_force(program, args, cost)


@settings(max_examples=4)
@given(scripts)
def test_random_programs_have_the_same_gradient_in_every_mode(script):
    program = scalar_program(script)
    assume(fg.plan(program, X2, Z2).rounds <= 3)
    wanted = jax.jit(jax.grad(program))(X2, Z2)
    for settings_ in (
        {"mode": "forward"},
        {"mode": "mixed"},
        {"mode": COSTS["again"]},
        {"mode": COSTS["dear_down"]},
    ):
        found = fg.grad(program, **settings_)(X2, Z2)
        assert jnp.allclose(found, wanted, rtol=1e-9, atol=1e-12)


# --- every vector of rules gives the same derivative --------------------------------------------


def by_rules(program, args, rules):
    """The derivative by one vector of rules, as a program: (outputs, blocks)."""
    found = traced(program, args)

    def fun(*args):
        return derivative(found, jax.tree.leaves(args), rules)

    fun.__signature__ = program.signature
    return fg.Program(fun, program.placements, derived=True)


@pytest.mark.parametrize("name", ["two_rounds", "stateful", "train_then_eval", "pytrees_and_aux"])
def test_every_vector_of_rules_gives_the_same_derivative(name):
    case = next(c for c in TABLE if c.name == name)
    args = case.args(N)
    vectors = rule_vectors(traced(case.program, args))
    assert len(vectors) == {1: 3, 2: 8}[case.rounds]
    wrt = jax.tree.leaves(jax.jit(jax.jacrev(case.centralized))(*args))
    for rules in vectors:
        _, blocks = by_rules(case.program, args, rules)(*args)
        found = jax.tree.leaves(blocks)
        assert len(found) == len(wrt)
        for a, b in zip(found, wrt, strict=True):
            assert a.shape == b.shape and jnp.allclose(a, b, rtol=1e-11, atol=1e-13)


@fg.program(z=fg.CLIENTS)
def round_then_loop(w, z):
    """The loop reads what clients computed in the round before it."""
    s = jnp.tanh(fg.broadcast(jnp.sin(w)) * z)
    body = lambda w, _: (w + fg.mean(fg.broadcast(w) * s), None)
    return jnp.sum(jax.lax.scan(body, fg.mean(s), None, length=2)[0] ** 2)


@pytest.mark.parametrize(
    "rules",
    rule_vectors(traced(round_then_loop, (X, Z))),
    ids=" ".join,
)
def test_every_vector_of_rules_through_a_round_and_a_loop(rules):
    _, ((found,),) = by_rules(round_then_loop, (X, Z), rules)(X, Z)
    wanted = jax.jit(jax.jacfwd(round_then_loop))(X, Z)
    assert jnp.allclose(found, wanted, rtol=1e-11)


def test_no_push_at_or_after_a_pull():
    vectors = rule_vectors(traced(two_rounds, (X, Z)))
    assert ("pull", "push") not in vectors and ("push", "pull") in vectors
    assert len(set(vectors)) == len(vectors) == 8
    third = rule_vectors(traced(next(c for c in TABLE if c.name == "three_rounds").program, (X, Z)))
    assert len(third) == 20
    assert all("push" not in v[v.index("pull") :] for v in third if "pull" in v)


# --- meeting in the middle ----------------------------------------------------------------------


def chain(sizes, inputs, outputs, tail=jnp.sin):
    """Rounds of given (broadcast size, sum size), with dense curved maps between them."""

    @fg.program(z=fg.CLIENTS)
    def program(x, z):
        for i, (m, p) in enumerate(sizes):
            sent = jnp.tanh(normal(3 * i, m, x.size) @ x)
            x = fg.sum(jnp.sin(normal(3 * i + 1, p, m) @ (fg.broadcast(sent) * z[0])))
        return tail(normal(99, outputs, x.size) @ x)

    return program, (floats(inputs), floats(N, 1))


def prices(program, args, cost):
    plain = fg.plan(program, *args)
    found = {}
    for mode in ("forward", "reverse", "mixed"):
        plan = fg.plan(fg.jacobian(program, mode=mode), *args)
        if cost.allows(plan, plain):
            found[mode] = cost.price(plan)
    plan = fg.plan(fg.jacobian(program, mode=cost), *args)
    return found, plan, cost.price(plan)


def test_push_and_pull_meet_in_the_middle():
    """Small to large, large to small: tangents go up the hill from one side, cotangents from the
    other, and the server multiplies on top. Each pure mode has to go down a hill somewhere."""
    L = 20
    program, args = chain([(2, L), (L, 2)], inputs=1, outputs=1)
    cost = fg.CostModel(down=3, readdress=True)
    pure, plan, price = prices(program, args, cost)
    assert plan.rules == ("push", "pull")
    base = 8 * (3 * (2 + L) + (L + 2))
    assert price == base + 8 * ((3 * 2 + L) + (3 * 2 + L))
    assert pure == {
        "forward": base + 8 * ((3 * 2 + L) + (3 * L + 2)),
        "reverse": base + 8 * ((3 * L + 2) + (3 * 2 + L)),
        "mixed": base + 8 * (2 * L + 2 * L),
    }
    assert price < min(pure.values())


@pytest.mark.parametrize(
    "readdress, rules", [(False, ("local", "push")), (True, ("local", "push"))]
)
def test_mixture_of_local_and_push(readdress, rules):
    """A bottleneck that one number passes is cheapest by its local Jacobian, a wide round not."""
    L = 12
    program, args = chain([(1, L), (L, L)], inputs=3, outputs=4)
    pure, plan, price = prices(program, args, fg.CostModel(readdress=readdress))
    assert plan.rules == rules
    base = 8 * ((1 + L) + (L + L))
    assert price == base + 8 * (L + 3 * (L + L))
    assert pure["forward"] == base + 8 * (3 * (1 + L) + 3 * (L + L))
    assert pure["mixed"] == base + 8 * (L + L * L)
    assert price < min(pure.values())
    assert not plan.readdressed or readdress or fg.plan(program, *args).readdressed


def test_mixture_over_three_rounds():
    L = 10
    program, args = chain([(2, L), (1, 1), (L, 2)], inputs=1, outputs=1)
    cost = fg.CostModel(down=3, readdress=True)
    pure, plan, price = prices(program, args, cost)
    assert plan.rules == ("push", "local", "pull")
    assert price < min(pure.values())
    values = (jnp.full(1, 0.3), normal(5, N, 1))
    found = fg.jacobian(program, mode=cost)(*values)
    wanted = fg.jacobian(program, mode="forward")(*values)
    assert jnp.allclose(found, wanted, rtol=1e-11) and jnp.all(found != 0)


def test_search_is_exact_with_five_rounds():
    """Each end of the chain would rather go the other way, a little; the middle needs both."""
    program, args = chain([(8, 7), (2, 20), (5, 5), (20, 2), (7, 8)], inputs=1, outputs=1)
    cost = fg.CostModel(down=3, readdress=True)
    _, plan, price = prices(program, args, cost)
    rules = ("push", "push", "local", "pull", "pull")
    best = cost.price(fg.plan(by_rules(program, args, rules), *args))
    assert price <= best


# --- what the cost model says is obeyed ---------------------------------------------------------


ASKED_ONCE = [
    pytest.param(case, id=case.name)
    for case in TABLE
    if case.name != "custom_vjp_around"  # its own rule asks again, so nothing is allowed
    and (case.rounds == 1 or case.name in {"train_then_eval", "fedavgm"})
]


@pytest.mark.parametrize("case", ASKED_ONCE)
def test_nobody_is_asked_again_by_default(case):
    args = shapes(case)
    program, argnums = case.program, case.server_argnums[0]
    if case.client_outputs:

        def first(*args):
            return jax.tree.leaves(case.program(*args))[0]

        first.__signature__ = program.signature
        program = fg.Program(first, program.placements)
    plain, plan = fg.plan(program, *args), fg.plan(fg.jacobian(program, argnums), *args)
    assert set(plan.readdressed) <= set(plain.readdressed)
    assert case.decided or not plain.readdressed


def test_readdressing_is_used_where_it_is_allowed_and_pays():
    program, args = chain([(20, 20)], inputs=20, outputs=1)
    plan = fg.plan(fg.jacobian(program), *args)
    assert plan.rules == ("local",) and not plan.readdressed
    plan = fg.plan(fg.jacobian(program, mode=COSTS["again"]), *args)
    assert plan.rules == ("pull",) and plan.readdressed == ("clients",)


@pytest.mark.parametrize(
    "m, p, rules, recompute", [(20, 5, ("pull",), True), (2, 3, ("local",), False)]
)
def test_client_memory_is_obeyed(m, p, rules, recompute):
    program, args = chain([(m, p)], inputs=20, outputs=1)
    free = fg.plan(fg.jacobian(program, mode=COSTS["again"]), *args)
    assert free.rules == ("pull",) and free.client_memory["clients"] > 0
    need = free.client_memory["clients"]
    enough = fg.CostModel(readdress=True, client_memory=need)
    assert fg.plan(fg.jacobian(program, mode=enough), *args).traffic == free.traffic
    for limit in (0, need - 1):
        cost = fg.CostModel(readdress=True, client_memory=limit)
        plan = fg.plan(fg.jacobian(program, mode=cost), *args)
        assert plan.client_memory["clients"] <= limit
        assert plan.rules == rules and plan.recompute == recompute
        assert cost.price(plan) >= cost.price(free)
    values = (normal(3, 20), normal(5, N, 1))
    found = fg.jacobian(program, mode=COSTS["no_memory"])(*values)
    assert jnp.allclose(found, fg.jacobian(program, mode="mixed")(*values), rtol=1e-11)


def fedavgm(n):
    @fg.program(train=TRAIN, test=EVAL)
    def loss(hyper, w, velocity, train, test):
        here = fg.broadcast(w, TRAIN)
        velocity = hyper["momentum"] * velocity + fg.mean(jnp.sin(here * train), at=TRAIN)
        there = fg.broadcast(w - hyper["lr"] * velocity, EVAL)
        return fg.mean(jnp.sum(jnp.tanh(there * test)), at=EVAL)

    hyper = {"lr": floats(), "momentum": floats()}
    return loss, (hyper, floats(n), floats(n), floats(N, n), floats(N, n))


@pytest.mark.parametrize("n", [6, 15])
def test_forward_wins_where_uplink_costs_twice_the_downlink(n):
    """2n down and 2 up against n up: forward wins from up / down = 2n / (n - 2) on."""
    program, args = fedavgm(n)
    edge = 2 * n / (n - 2)
    for ratio, rule in ((0.95 * edge, "local"), (1.05 * edge, "push"), (1.0, "local")):
        for down in (0.5, 2.0):
            plan = auto(program, args, fg.CostModel(down=down, up=down * ratio))
            assert plan.rules == (rule,)


def test_price_of_a_round_trip():
    program, args = chain([(20, 20)], inputs=20, outputs=1)
    pull, local = (fg.plan(fg.jacobian(program, mode=mode), *args) for mode in ("reverse", "mixed"))
    gap = sum(local.bytes) - sum(pull.bytes)
    assert gap > 0 and pull.rounds == local.rounds + 1
    for price, rule in ((0.9 * gap, "pull"), (1.1 * gap, "local")):
        cost = fg.CostModel(round_trip=price, readdress=True)
        assert fg.plan(fg.jacobian(program, mode=cost), *args).rules == (rule,)


@pytest.mark.parametrize("cost", ["default", "again", "dear_down"])
def test_one_number_at_clients_is_one_local_tangent(cost):
    """A learning rate of clients never needs an n x n Jacobian."""
    n = 9

    @fg.program(z=fg.CLIENTS)
    def trained(lr, w, z):
        rate, start = fg.broadcast((lr, w))
        step = lambda local, _: (local - rate * jnp.sin(local * z), None)
        local, _ = jax.lax.scan(step, start, None, length=3)
        return jnp.sum(fg.mean(local) ** 2)

    args = (floats(), floats(n), floats(N, n))
    plan = auto(trained, args, COSTS[cost])
    assert len(plan.traffic) == 1
    (t,) = plan.traffic
    assert (t.down, t.up) == (n + 1, 2 * n + 1)
    assert plan.rules in {("push",), ("local",)}
    assert plan.client_memory == {"clients": 0}
    dear = auto(trained, args, COSTS["dear_up"])  # one number up for n more down: a pull
    assert dear.rules == ("pull",) and dear.scalars == (n + 1 + n, n + 1 + 1)


def test_an_inactive_round_has_no_rule():
    program, args = fedavgm(4)
    assert len(auto(program, args, fg.CostModel()).rules) == 1
    velocity = fg.value_and_grad(program, "w")
    assert len(fg.plan(velocity, *args).rules) == 2

    @fg.program(z=fg.CLIENTS)
    def at_the_server(x, z):
        return jnp.sum(x**2) + fg.mean(jnp.sum(z))

    plan = auto(at_the_server, (X, Z), fg.CostModel())
    assert plan.rules == () and plan.traffic == fg.plan(at_the_server, X, Z).traffic


# --- what cannot be had -------------------------------------------------------------------------


def test_nothing_is_allowed():
    by_data = fg.grad(class_1, "z")  # every client's own derivative needs the server's cotangent
    with pytest.raises(fg.PlanError, match=r"class_1.*readdress=True"):
        by_data(X, Z)
    assert fg.grad(class_1, "z", mode=COSTS["again"])(X, Z).shape == Z.shape


@pytest.mark.parametrize("name", ["down", "up", "round_trip"])
@pytest.mark.parametrize("price", [-1, math.nan, math.inf, "2", None, 1j])
def test_a_price_is_a_number(name, price):
    with pytest.raises(fg.ArgumentError, match=rf"{name}=.*number >= 0"):
        fg.CostModel(**{name: price})


def test_cost_model():
    cost = fg.CostModel(down=2, up=3, round_trip=5)
    plan = fg.plan(class_1, X, Z)
    assert cost.price(plan) == 2 * 24 + 3 * 24 + 5
    assert cost == fg.CostModel(2, 3, 5) and hash(cost) == hash(fg.CostModel(2, 3, 5))
    assert fg.CostModel() == fg.CostModel(1, 1, 0, readdress=False, client_memory=None)
    reverse = fg.plan(fg.value_and_grad(class_1, mode="reverse"), X, Z)
    assert not fg.CostModel().allows(reverse, plan)
    assert fg.CostModel(readdress=True).allows(reverse, plan)
    assert fg.CostModel().allows(reverse, reverse)  # a program that asks twice by itself
    memory = reverse.client_memory["clients"]
    assert not fg.CostModel(readdress=True, client_memory=memory - 1).allows(reverse, plan)
    assert fg.CostModel(readdress=True, client_memory=memory).allows(reverse, plan)
