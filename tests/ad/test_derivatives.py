"""Derivatives of every program of the table, in every mode, are those of plain JAX."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.core.primitives import (
    ClosedJaxpr,
    Jaxpr,
    broadcast_p,
    foreign_axis,
    inner_jaxprs,
    make_jaxpr,
    sum_p,
)
from laws import EXECUTORS
from programs import (
    TABLE,
    Case,
    class_1,
    custom_vjp_inside,
    distillation,
    forgetting,
    normal,
    stateful,
    two_rounds,
    weight_exponent,
    while_loop,
)

N = 3
AGAIN = fg.CostModel(readdress=True)
MODES = {
    "forward": {"mode": "forward"},
    "reverse": {"mode": "reverse"},
    "mixed": {"mode": "mixed"},
    "auto": {"mode": "auto"},
    "auto_again": {"mode": AGAIN},
}
every_case = pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
every_mode = pytest.mark.parametrize("mode", MODES)
pure_modes = pytest.mark.parametrize("mode", ["forward", "reverse", "mixed"])
X, Z = normal(0, 3), normal(1, N, 3)


def assert_close(found, wanted, rtol=1e-12):
    """Equal trees; the largest difference is small against the largest entry of each leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b))
        a, b = np.asarray(a), np.asarray(b)
        assert np.isfinite(a).all()
        assert np.abs(a - b).max(initial=0) <= rtol * max(1.0, np.abs(b).max(initial=0))


# --- every program x every mode x every executor ------------------------------------------------

IMPOSSIBLE = {  # JAX cannot push through a custom_vjp, nor pull through a while_loop
    ("custom_vjp_inside", "forward"),
    ("custom_vjp_inside", "mixed"),  # its backward function may not be linear
    ("custom_vjp_around", "forward"),
    *((case.name, "reverse") for case in TABLE if not case.reverse),
    # Its own rule asks clients again, so by default nothing is left for auto.
    ("custom_vjp_around", "auto"),
}
# Chunks and the reference see a plan, whatever mode it came from, and are slow to compile: each
# program meets them in some modes, each mode on many programs.
SMALL = {"class_1", "weight_exponent", "stateful", "train_then_eval", "cond", "custom_jvp_around"}


def combinations():
    for number, case in enumerate(TABLE):
        alternating = ("forward", "reverse", "mixed")[number % 3]
        for mode, executor in itertools.product(MODES, EXECUTORS):
            chosen = {
                "local": True,
                "chunked": mode == alternating,
                "reference": case.name in SMALL,
                "mesh": case.name in SMALL,
            }
            if chosen[executor] and (case.name, mode) not in IMPOSSIBLE:
                yield pytest.param(case, mode, executor, id=f"{case.name}-{mode}-{executor}")


@functools.cache
def arguments(case: Case, clients: int = N):
    return case.args(clients)


@functools.cache
def scalar(case: Case) -> fg.Program:
    """The program, or one that makes a number of all it returns, also of what is at clients."""
    if case.scalar:
        return case.program
    at = next(iter(case.program.placements.values()))

    def total(*args):
        parts = []
        for i, leaf in enumerate(jax.tree.leaves(case.program(*args))):
            part = jnp.sum(jnp.sin(leaf) * (i + 1))
            parts.append(fg.sum(part, at) if i in case.client_outputs else part)
        return sum(parts)

    total.__name__ = f"total({case.name})"
    total.__signature__ = case.program.signature
    return fg.Program(total, case.program.placements)


def plain(case: Case):
    """The same number in plain JAX."""

    def total(*args):
        leaves = jax.tree.leaves(case.centralized(*args))
        if case.scalar:
            return leaves[0]
        return sum(jnp.sum(jnp.sin(leaf) * (i + 1)) for i, leaf in enumerate(leaves))

    return total


@functools.cache
def centralized(case: Case, clients: int = N, derived: bool = True):
    """(value, gradient) by the server's arguments in plain JAX, or only what the program gives."""
    args = arguments(case, clients)
    placed = [name in case.program.placements for name in case.program.signature.parameters]
    fun = jax.value_and_grad(plain(case), case.server_argnums) if derived else case.centralized

    @jax.jit
    def run(server):  # data of clients are constants: a cohort's sizes are read by plain Python
        rest = iter(server)
        return fun(*(a if p else next(rest) for a, p in zip(args, placed, strict=True)))

    return run([a for a, p in zip(args, placed, strict=True) if not p])


@functools.cache
def derived(case: Case, mode: str) -> fg.Program:
    return fg.value_and_grad(scalar(case), case.server_argnums, **MODES[mode])


def traffic(program, args):
    plan = fg.plan(program, *args)
    return plan.rules, plan.traffic, plan.client_memory


@pytest.mark.parametrize("case, mode, executor", list(combinations()))
def test_equals_centralized(case, mode, executor):
    gradient, args = derived(case, mode), arguments(case)
    if mode.startswith("auto") and executor != "reference":
        rules = fg.plan(gradient, *args).rules
        if len(set(rules)) == 1:  # then it is the program of a pure mode, which is run as such
            same = derived(case, {"push": "forward", "pull": "reverse", "local": "mixed"}[rules[0]])
            assert traffic(gradient, args) == traffic(same, args)
            return
    found = gradient.on(EXECUTORS[executor])(*args)
    assert_close(found, centralized(case))
    assert any(jnp.any(g != 0) for g in jax.tree.leaves(found[1]))


@pytest.mark.parametrize(
    "name",
    [
        "class_1",
        "three_rounds",
        "fedavgm",
        "scan_rounds",
        "ragged_sgd",
        "cond_reads_what_is_captured",
        "cond_keeps_constants_of_clients",
    ],
)
def test_equals_finite_differences(name):
    case = next(c for c in TABLE if c.name == name)
    args, eps = list(arguments(case)), 1e-5
    _, gradient = derived(case, "auto")(*args)
    for position, slope in zip(case.server_argnums, gradient, strict=True):
        direction = jax.tree.map(
            lambda x: jnp.cos(jnp.arange(1.0, x.size + 1)).reshape(x.shape), slope
        )

        def moved(by):
            there = jax.tree.map(lambda x, d: x + by * d, args[position], direction)
            return scalar(case)(*args[:position], there, *args[position + 1 :])

        wanted = (moved(eps) - moved(-eps)) / (2 * eps)
        parts = jax.tree.map(lambda g, d: jnp.sum(g * d), slope, direction)
        np.testing.assert_allclose(sum(jax.tree.leaves(parts)), wanted, rtol=1e-6, atol=1e-8)


# --- what a mode cannot -------------------------------------------------------------------------


@fg.program(z=fg.CLIENTS)
def while_at_clients(x, z):
    """The while_loop is each client's own, around no communication."""
    here = fg.broadcast(x)
    _, y = jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, here * z)
    )
    return fg.sum(jnp.sum(y)) ** 2


def _while_at_clients(x, z):
    return jnp.sum(jnp.sin(jnp.sin(jnp.sin(x[None] * z)))) ** 2


@fg.program(z=fg.CLIENTS)
def custom_vjp_and_curved_tail(x, z):
    """A pull needs a second pass here, because the cotangent is not a constant."""
    return custom_vjp_inside(x, z) ** 2


def _custom_vjp_and_curved_tail(x, z):
    case = next(c for c in TABLE if c.name == "custom_vjp_inside")
    return case.centralized(x, z) ** 2


@pytest.mark.parametrize(
    "program, mode, argnums, cent, words",
    [
        (while_loop, "reverse", 0, TABLE, "while_loop"),
        (while_at_clients, "reverse", 0, _while_at_clients, "while_loop"),
        (custom_vjp_inside, "forward", 0, TABLE, "custom_vjp"),
        (class_1, "forward", "z", TABLE, "clients"),
        (two_rounds, "forward", 1, TABLE, "clients"),
    ],
    ids=lambda x: getattr(x, "name", x if isinstance(x, str) else ""),
)
def test_an_impossible_mode_names_one_that_works(program, mode, argnums, cent, words):
    if cent is TABLE:
        cent = next(c.centralized for c in TABLE if c.program is program)
    with pytest.raises(fg.PlanError, match=words) as caught:
        fg.grad(program, argnums, mode=mode)(X, Z)
    assert program.name in str(caught.value)
    (other,) = re.findall(r"mode='(\w+)'", str(caught.value))
    assert other != mode
    position = {"z": 1}.get(argnums, argnums)
    assert_close(fg.grad(program, argnums, mode=other)(X, Z), jax.grad(cent, position)(X, Z))


def test_local_jacobian_goes_the_way_that_is_possible():
    found = fg.grad(while_at_clients, mode="mixed")(X, Z)
    assert_close(found, jax.grad(_while_at_clients)(X, Z))


def test_a_custom_vjp_is_not_taken_for_a_jacobian():
    """The one here clips, so a Jacobian times a cotangent is not what it gives."""
    with pytest.raises(fg.PlanError, match=r"programs\.py.*custom_vjp.*mode='reverse'"):
        fg.grad(custom_vjp_and_curved_tail, mode="mixed")(X, Z)


def test_auto_says_when_nothing_is_allowed():
    program = next(c.program for c in TABLE if c.name == "custom_vjp_around")
    with pytest.raises(fg.PlanError, match=r"readdress=True"):
        fg.grad(program)(*arguments(next(c for c in TABLE if c.name == "custom_vjp_around")))


def test_auto_finds_the_possible_mode():
    for program, cent in (
        (while_at_clients, _while_at_clients),
        (while_loop, next(c.centralized for c in TABLE if c.program is while_loop)),
    ):
        plan = fg.plan(fg.grad(program), X, Z)
        assert "pull" not in plan.rules
        assert_close(fg.grad(program)(X, Z), jax.grad(cent)(X, Z))
    again = fg.grad(custom_vjp_and_curved_tail, mode=AGAIN)
    assert "push" not in fg.plan(again, X, Z).rules
    assert_close(again(X, Z), jax.grad(_custom_vjp_and_curved_tail)(X, Z))


# --- arguments and results ----------------------------------------------------------------------


@fg.program(data=fg.CLIENTS)
def many(a, b, steps, key, data):
    """Arguments of all kinds."""
    here = fg.broadcast({"a": a, "b": b})
    noise = jax.random.normal(fg.client_key(key), (3,))
    scale = noise * fg.broadcast(steps).astype(float)
    inner = data["x"] * here["a"] * here["b"]["w"] + here["b"]["c"] * scale
    return jnp.sin(fg.mean(jnp.sum(inner * data["i"].astype(float))))


@jax.numpy_dtype_promotion("standard")
def _many(a, b, steps, key, data):
    total = 0.0
    for i in range(N):
        noise = jax.random.normal(jax.random.fold_in(key, i), (3,))
        inner = data["x"][i] * a * b["w"] + b["c"] * noise * steps
        total = total + jnp.sum(inner * data["i"][i])
    return jnp.sin(total / N)


MANY = (
    jnp.float64(0.7),
    {"w": normal(3, 3), "c": jnp.float64(0.2)},
    jnp.int64(2),
    jax.random.key(7),
    {"x": Z, "i": jnp.arange(N) + 1},
)


@pytest.mark.parametrize(
    "argnums, positions",
    [
        (0, 0),
        ("b", 1),
        (-4, 1),
        ((0, 1), (0, 1)),
        (("b", "a"), (1, 0)),
        ([1, "a"], (1, 0)),
        ((-5,), (0,)),
    ],
    ids=str,
)
def test_argnums(argnums, positions):
    found = fg.grad(many, argnums)(*MANY)
    assert_close(found, jax.grad(_many, positions)(*MANY))
    assert isinstance(found, tuple) == isinstance(positions, tuple)


def test_argnums_by_keyword_arguments():
    a, *rest = MANY
    names = list(many.signature.parameters)[1:]
    found = fg.grad(many, "b")(a, **dict(zip(names, rest, strict=True)))
    assert_close(found, jax.grad(_many, 1)(*MANY))


@pytest.mark.parametrize(
    "argnums, words",
    [
        ("lr", "no argument 'lr'.*Known: a, b, data, key, steps"),
        ("stepz", "Did you mean 'steps'"),
        (5, "5 arguments, so there is no argument 5"),
        (-6, "no argument -6"),
        ((0, "a"), "once"),
        ((), "once"),
    ],
)
@pytest.mark.parametrize("transform", [fg.grad, fg.value_and_grad, fg.jacobian, fg.jvp, fg.vjp])
def test_wrong_argnums(transform, argnums, words):
    with pytest.raises(fg.ArgumentError, match=words):
        transform(many, argnums)


def test_wrong_calls():
    with pytest.raises(fg.ArgumentError, match="no floating leaf"):
        fg.grad(many, "steps")(*MANY)
    with pytest.raises(fg.ArgumentError, match=r"unknown mode 'foward'.*'forward'"):
        fg.grad(many, mode="foward")
    with pytest.raises(fg.ArgumentError, match=r"unknown mode 3.*a name or a fg.CostModel"):
        fg.grad(many, mode=3)
    with pytest.raises(fg.ArgumentError, match=r"of a program.*jax\.grad"):
        fg.grad(jnp.sin)

    @fg.program(z=fg.CLIENTS)
    def vector(x, z):
        return fg.sum(fg.broadcast(x) * z)

    with pytest.raises(fg.ArgumentError, match=r"fg\.jacobian"):
        fg.grad(vector)(X, Z)
    with pytest.raises(fg.ArgumentError, match=r"must return \(y, aux\)"):
        fg.grad(class_1, has_aux=True)(X, Z)

    @fg.program(z=fg.CLIENTS)
    def stays(x, z):
        return fg.broadcast(x) * z

    with pytest.raises(fg.PlacementError, match="aux"):
        fg.jacobian(stays)(X, Z)


@pure_modes
def test_leaves_that_are_not_floating_get_none(mode):
    @fg.program(z=fg.CLIENTS)
    def f(p, z):
        here = fg.broadcast(p)
        noise = jax.random.normal(here["key"], (3,))
        return jnp.sin(fg.sum(jnp.sum(here["x"] * z * here["n"].astype(z.dtype) * noise)))

    p = {"x": X, "n": jnp.int64(2), "key": jax.random.key(1), "on": jnp.array([True, False])}
    noise = jax.random.normal(p["key"], (3,))
    value, gradient = fg.value_and_grad(f, mode=mode)(p, Z)
    wanted = jax.value_and_grad(lambda x: jnp.sin(jnp.sum(x[None] * Z * 2 * noise[None])))(X)
    assert gradient["n"] is None and gradient["key"] is None and gradient["on"] is None
    assert_close((value, gradient["x"]), wanted)


@every_mode
def test_has_aux(mode):
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        here = fg.broadcast(x)
        loss = jnp.sin(fg.mean(jnp.sum(here * z)))
        return loss, {"n": fg.sum(1), "per client": here * z, "x": (x, jnp.int64(3))}

    aux = {"n": jnp.int64(N), "per client": X[None] * Z, "x": (X, jnp.int64(3))}
    value, wanted = jax.value_and_grad(lambda x: jnp.sin(jnp.mean(Z @ x)))(X)
    settings = {**MODES[mode], "has_aux": True}
    assert_close(fg.grad(f, **settings)(X, Z), (wanted, aux))
    assert_close(fg.value_and_grad(f, **settings)(X, Z), ((value, aux), wanted))
    assert_close(fg.jacobian(f, **settings)(X, Z), (wanted, aux))


@every_mode
def test_jacobian_has_the_tree_of_jax(mode):
    case = next(c for c in TABLE if c.name == "pytrees_and_aux")
    args = arguments(case)
    found = fg.jacobian(case.program, **MODES[mode])(*args)
    assert_close(found, jax.jit(jax.jacrev(case.centralized))(*args))
    both = fg.jacobian(case.program, ("params",), **MODES[mode])(*args)
    assert_close(both, jax.tree.map(lambda x: x, jax.jacfwd(case.centralized, (0,))(*args)))


def test_result_that_does_not_depend_on_the_argument():
    @fg.program(z=fg.CLIENTS)
    def f(x, y, z):
        return jnp.sum(y) * fg.mean(jnp.sum(z)), jnp.int64(4)

    for mode in MODES:
        found = fg.jacobian(f, **MODES[mode])(X, jnp.ones(2), Z)
        assert_close(found, (jnp.zeros(3), None))


# --- arguments at clients -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reverse", "mixed", "auto", "auto_again"])
@pytest.mark.parametrize("name", ["class_1", "weighted_mean", "stateful", "train_then_eval"])
def test_derivative_by_data_of_clients_stays_there(name, mode):
    case = next(c for c in TABLE if c.name == name)
    args = arguments(case)
    position = len(case.server_argnums)
    try:
        gradient = fg.grad(case.program, position, **MODES[mode])
        found = gradient(*args)
    except fg.PlanError as error:  # it takes a second pass, which is not allowed by default
        assert mode == "auto" and "readdress=True" in str(error)
        return
    assert_close(found, jax.jit(jax.grad(case.centralized, position))(*args))
    plan = fg.plan(gradient, *args)
    placement = case.program.placements[list(case.program.signature.parameters)[position]]
    assert {v.at for v in plan.graph.outputs} == {placement.name}
    assert plan.audit().only_sums


@pytest.mark.parametrize("mode", ["reverse", "mixed"])
def test_derivative_by_server_and_clients_together(mode):
    found = fg.grad(class_1, ("x", "z"), mode=mode)(X, Z)
    case = next(c for c in TABLE if c.program is class_1)
    assert_close(found, jax.grad(case.centralized, (0, 1))(X, Z))


# --- recompute ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reverse", "auto_again"])
@pytest.mark.parametrize("program", [class_1, two_rounds, stateful], ids=lambda p: p.name)
def test_recompute_sends_again_what_clients_would_keep(program, mode):
    once = fg.value_and_grad(program, **MODES[mode])
    remembering, again = fg.plan(once, X, Z), forgetting(once, X, Z)
    assert again.client_memory == {"clients": 0}
    assert remembering.rounds == again.rounds
    assert remembering.scalars[1] == again.scalars[1]
    if mode == "reverse":
        assert remembering.client_memory["clients"] > 0
        assert remembering.scalars[0] < again.scalars[0]
        expected = once.on(fg.executors.reference())(X, Z)
        assert_close(once.on(fg.executors.reference(recompute=True))(X, Z), expected)
        assert_close(once.on(fg.executors.local(chunk=2))(X, Z), expected)


# --- jvp and vjp --------------------------------------------------------------------------------


def direction(seed, tree):
    return jax.tree.map(lambda x: normal(seed, *jnp.shape(x)), tree)


JVP_CASES = [
    c for c in TABLE if c.name in {"pytrees_and_aux", "fedavgm", "weight_exponent", "scan_rounds"}
]


@pytest.mark.parametrize("case", JVP_CASES, ids=lambda case: case.name)
def test_jvp_and_vjp(case):
    args, at = arguments(case), case.server_argnums
    wrt = tuple(args[i] for i in at)
    t, u = direction(5, wrt), direction(6, wrt)

    def of_server(*server):
        full = list(args)
        for i, x in zip(at, server, strict=True):
            full[i] = x
        return case.centralized(*full)

    push, pull = fg.jvp(case.program, at), fg.vjp(case.program, at)
    y, dy = push(*args, t)
    assert_close((y, dy), jax.jit(lambda: jax.jvp(of_server, wrt, t))())
    ct = direction(7, y)
    y, dx = pull(*args, ct)
    wanted_y, transposed = jax.vjp(of_server, *wrt)
    assert_close((y, dx), (wanted_y, transposed(ct)))

    # Linear in the tangent, and each the transpose of the other.
    both = jax.tree.map(lambda a, b: 2 * a - 3 * b, t, u)
    _, du = push(*args, u)
    _, combined = push(*args, both)
    assert_close(combined, jax.tree.map(lambda a, b: 2 * a - 3 * b, dy, du), 1e-11)

    def dot(a, b):
        return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.vdot(x, y), a, b)))

    np.testing.assert_allclose(dot(ct, dy), dot(dx, t), rtol=1e-11)


def test_jvp_and_vjp_by_data_of_clients():
    cent = next(c for c in TABLE if c.program is stateful).centralized
    t = normal(5, N, 3)
    found = fg.jvp(stateful, "z")(X, Z, t)
    assert_close(found, jax.jvp(lambda z: cent(X, z), (Z,), (t,)))
    y, dz = fg.vjp(stateful, "z")(X, Z, jnp.float64(2.0))
    assert_close((y, dz), (cent(X, Z), 2 * jax.grad(cent, 1)(X, Z)))


def test_jvp_passes_leaves_that_are_not_floating():
    y, dy = fg.jvp(many, "b")(*MANY, direction(3, MANY[1]))
    wanted = jax.jvp(lambda b: _many(MANY[0], b, *MANY[2:]), (MANY[1],), (direction(3, MANY[1]),))
    assert_close((y, dy), wanted)
    tangents = (jnp.int64(0), jnp.float64(1.0))
    y, dy = fg.jvp(many, ("steps", "a"))(*MANY, tangents)
    assert_close(dy, jax.grad(_many)(*MANY))
    _, (none, da) = fg.vjp(many, ("steps", "a"))(*MANY, jnp.float64(1.0))
    assert none is None
    assert_close(da, jax.grad(_many)(*MANY))


def test_jvp_and_vjp_by_keyword_and_with_defaults():
    @fg.program(z=fg.CLIENTS)
    def f(x, z, power=2):
        return fg.mean(jnp.sum(fg.broadcast(x) * z)) ** power

    @fg.program(z=fg.CLIENTS)
    def both(x, z):
        _, dy = fg.jvp(f)(x, z=z, tangents=x)
        _, dx = fg.vjp(f)(x, z=z, cotangent=jnp.float64(1.0))
        return dy - jnp.vdot(dx, x), dy

    difference, dy = both(X, Z)
    np.testing.assert_allclose(difference, 0, atol=1e-12)
    assert dy != 0


def test_wrong_tangents_and_cotangents():
    with pytest.raises(fg.ArgumentError, match="tangents must look like the argument"):
        fg.jvp(class_1)(X, Z, jnp.ones(2))
    with pytest.raises(fg.ArgumentError, match="cotangent must look like the result"):
        fg.vjp(class_1)(X, Z, (jnp.float64(1.0),))
    with pytest.raises(fg.ArgumentError, match="one placement at a time"):
        fg.jvp(class_1, ("x", "z"))


# --- second order -------------------------------------------------------------------------------

PAIRS = [
    *itertools.product(("forward", "reverse", "mixed"), repeat=2),
    ("auto", "auto"),
    ("auto_again", "auto_again"),
]
SECOND = {
    "distillation": (distillation, (normal(0, 2), normal(1, N, 4)), (0,)),
    "weight_exponent": (
        weight_exponent,
        (jnp.float64(0.7), X, Z, jnp.arange(1.0, N + 1) * 3),
        (0, 1),
    ),
    "two_rounds": (two_rounds, (X, Z), (0,)),
}


@functools.cache
def hessian(name):
    program, args, at = SECOND[name]
    cent = next(c for c in TABLE if c.program is program).centralized
    return jax.jit(jax.hessian(cent, at))(*args)


@pytest.mark.parametrize(
    "name, outer, inner",
    [(n, *p) for n in SECOND for p in PAIRS if n != "two_rounds" or p in PAIRS[:9]],
)
def test_hessian(name, outer, inner):
    program, args, at = SECOND[name]
    found = fg.jacobian(fg.grad(program, at, **MODES[inner]), at, **MODES[outer])(*args)
    assert_close(found, hessian(name), 1e-11)


@pytest.mark.parametrize("outer, inner", PAIRS)
def test_grad_of_grad(outer, inner):
    first = fg.grad(weight_exponent, "q", **MODES[inner])
    args = SECOND["weight_exponent"][1]
    found = fg.grad(first, "q", **MODES[outer])(*args)
    assert_close(found, hessian("weight_exponent")[0][0], 1e-11)


def test_third_order():
    args = SECOND["weight_exponent"][1]
    cent = next(c for c in TABLE if c.program is weight_exponent).centralized
    third = fg.grad(fg.grad(fg.grad(weight_exponent, mode="mixed"), mode="reverse"), mode="mixed")
    wanted = jax.jit(jax.grad(jax.grad(jax.grad(cent))))(*args)
    assert_close(third(*args), wanted, 1e-10)


@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto"])
def test_hessian_vector_product(mode):
    v = normal(9, 3)
    _, found = fg.jvp(fg.grad(two_rounds, mode=mode))(X, Z, v)
    assert_close(found, hessian("two_rounds")[0][0] @ v, 1e-11)


@every_mode
def test_program_that_calls_grad(mode):
    """One step of gradient descent, differentiated by its learning rate."""

    @fg.program(z=fg.CLIENTS)
    def after_a_step(lr, x, z):
        value, gradient = fg.value_and_grad(class_1, **MODES[mode])(x, z)
        return class_1(x - lr * gradient, z) + value

    cent = next(c for c in TABLE if c.program is class_1).centralized

    def wanted(lr, x, z):
        value, gradient = jax.value_and_grad(cent)(x, z)
        return cent(x - lr * gradient, z) + value

    found = fg.value_and_grad(after_a_step, (0, 1), **MODES[mode])(0.1, X, Z)
    assert_close(found, jax.jit(jax.value_and_grad(wanted, (0, 1)))(0.1, X, Z), 1e-11)


# --- perturbation confusion ---------------------------------------------------------------------


@fg.program(z=fg.CLIENTS)
def plus(y, x, z):
    return fg.mean(jnp.sum(fg.broadcast(x + y) * z))


@pytest.mark.parametrize("outer, inner", PAIRS)
def test_x_times_derivative_of_x_plus_y(outer, inner):
    """d/dx (x * d/dy (x + y)) is d/dy (x + y), not twice that."""

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        return x * fg.grad(plus, **MODES[inner])(1.0, x, z)

    found = fg.grad(f, **MODES[outer])(2.0, Z)
    assert_close(found, jnp.mean(jnp.sum(Z, 1)))


@pytest.mark.parametrize("outer, inner", PAIRS)
def test_inner_derivative_of_a_closure(outer, inner):
    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        @fg.program(z=fg.CLIENTS)
        def g(y, z):
            return fg.mean(jnp.sum(jnp.sin(fg.broadcast(x * y)) * z))  # closes over x

        return x * fg.grad(g, **MODES[inner])(x, z)

    def cent(x):
        return x * jax.grad(lambda y: jnp.mean(jnp.sum(jnp.sin(x * y) * Z, 1)))(x)

    assert_close(fg.grad(f, **MODES[outer])(0.7, Z), jax.grad(cent)(0.7))


# --- ragged clients -----------------------------------------------------------------------------

SIZES = (5, 1, 8, 3)


@functools.cache
def ragged():
    rng = np.random.default_rng(0)
    clients = [{"x": rng.normal(size=(k, 2)), "y": rng.normal(size=k)} for k in SIZES]
    return clients, fg.population(clients)


@fg.program(data=fg.CLIENTS)
def train(lr, w, data):
    lr, start = fg.broadcast((lr, w))

    def step(local, batch, mask):
        def loss(w):
            return jnp.mean((jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2, where=mask)

        return local - lr * jax.grad(loss)(local)

    delta = data.fold(step, start, 3, epochs=2) - start
    return jnp.sum((w + fg.mean(delta, weights=data.count)) ** 3)


def _train(lr, w, clients):
    def loss(w, x, y):
        return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

    total = 0.0
    for one in clients:
        local, count = w, len(one["y"])
        for start in [*range(0, count, 3)] * 2:
            x, y = one["x"][start : start + 3], one["y"][start : start + 3]
            local = local - lr * jax.grad(loss)(local, x, y)
        total = total + (local - w) * count
    return jnp.sum((w + total / sum(len(one["y"]) for one in clients)) ** 3)


RAGGED = (jnp.float64(0.3), normal(4, 2))


@functools.cache
def ragged_gradient(chosen):
    clients = [ragged()[0][i] for i in chosen]
    return jax.jit(jax.grad(lambda lr, w: _train(lr, w, clients), (0, 1)))(*RAGGED)


@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto_again"])
def test_ragged_clients(mode):
    gradient = fg.grad(train, ("lr", "w"), **MODES[mode])
    for chosen in ((2, 0, 3), (1, 2, 0)):  # another cohort of the same size compiles nothing
        cohort = ragged()[1].select(list(chosen))
        assert_close(gradient(*RAGGED, cohort), ragged_gradient(chosen))


def test_loop_over_batches_ends_early_where_nothing_is_pulled_back():
    cohort = ragged()[1].select([2, 0, 3])

    def loops(mode, argnums):
        gradient = fg.grad(train, argnums, mode=mode)
        return str(jax.make_jaxpr(gradient)(*RAGGED, cohort))

    assert "while[" in loops("forward", ("lr", "w"))
    assert "while[" in loops("mixed", "lr")  # one number: pushed through each client's own loop
    assert "scan[" in loops("reverse", ("lr", "w"))


# --- closure ------------------------------------------------------------------------------------


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn.params):
            yield from equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def one_client(program, args):
    """The derived program's jaxpr, in the view of the server and one client."""
    plan = fg.plan(program, *args)
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in plan.graph.inputs]
    arguments = fg.core.arguments.read_arguments(program, program.bind(args, {}))
    jaxpr, _ = make_jaxpr(
        lambda *leaves: program.call(arguments.rebuild(list(leaves))),
        program.client_placements,
        *avals,
    )
    return plan, jaxpr.jaxpr


@pure_modes
@every_case
def test_closure(case, mode):
    """A derivative is local work, broadcasts and sums, and nothing leaves a client unsummed."""
    if (case.name, mode) in IMPOSSIBLE:
        pytest.skip("JAX cannot")
    plan, jaxpr = one_client(derived(case, mode), arguments(case))
    assert isinstance(jaxpr, Jaxpr)
    found = list(equations(jaxpr))
    placed = {e.primitive for e in found if "placement" in e.params}
    assert placed and placed <= {broadcast_p, sum_p}
    assert not [e for e in found if foreign_axis(e.primitive, e.params)]
    names = {e.primitive.name for e in found if e.primitive.name.startswith("fed_")}
    assert names <= {"fed_broadcast", "fed_sum"}

    audit = plan.audit()
    assert audit.only_sums and not audit.findings
    for t in plan.traffic:
        if all(
            (other.round, other.placement) != (t.round, t.placement) or other is t
            for other in plan.traffic
        ):
            here = [r for r in audit.releases if (r.round, r.placement) == (t.round, t.placement)]
            assert sum(r.size for r in here) == t.up
    primal = fg.plan(scalar(case), *arguments(case)).audit()
    assert len(audit.releases) >= len(primal.releases)


def test_audit_lists_what_a_derivative_adds():
    def releases(program):
        return sorted(r.shape for r in fg.plan(program, X, Z).audit().releases)

    assert releases(class_1) == [(3,)]
    assert releases(fg.value_and_grad(class_1, mode="forward")) == [(3,), (3, 3)]
    assert releases(fg.value_and_grad(class_1, mode="mixed")) == [(3,), (3, 3)]
    assert releases(fg.value_and_grad(class_1, mode="reverse")) == [(3,), (3,)]
    alone = fg.plan(fg.grad(class_1), X, Z[:1]).audit()
    assert not alone.only_sums and "one client" in str(alone)


# --- a derivative is a program like any other ---------------------------------------------------


@pure_modes
def test_inside_jit_vmap_and_another_program(mode):
    case = next(c for c in TABLE if c.program is two_rounds)
    gradient = fg.grad(two_rounds, mode=mode)
    xs = jnp.stack([X, X + 0.5])
    wanted = jax.jit(jax.vmap(jax.grad(case.centralized), (0, None)))(xs, Z)
    assert_close(jax.jit(jax.vmap(gradient, (0, None)))(xs, Z), wanted, 1e-11)

    @fg.program(z=fg.CLIENTS)
    def norm(x, z):
        return jnp.sum(gradient(x, z) ** 2) + fg.sum(jnp.sum(fg.broadcast(x) * z))

    expected = jnp.sum(wanted[0] ** 2) + jnp.sum(Z @ X)
    for executor in EXECUTORS.values():
        assert_close(norm.on(executor)(X, Z), expected, 1e-11)
        assert gradient.on(executor).executor == executor


@pure_modes
def test_jax_differentiates_a_derived_program(mode):
    found = jax.jit(jax.jacrev(fg.grad(two_rounds, mode=mode)))(X, Z)
    assert_close(found, hessian("two_rounds")[0][0], 1e-11)


@every_mode
def test_no_tracing_in_steady_state(mode):
    traces = []

    @fg.program(z=fg.CLIENTS)
    def f(x, z):
        traces.append(None)
        return jnp.sin(fg.mean(jnp.sum(jnp.cos(fg.broadcast(x) * z))))

    gradient = fg.grad(f, **MODES[mode])
    first = gradient(X, Z)
    once = len(traces)
    assert 1 <= once <= 3
    assert jnp.any(gradient(X + 1, Z) != first)
    gradient(X, Z + 1)
    assert len(traces) == once
    gradient(X, jnp.concatenate([Z, Z]))  # more clients: another compilation, the same choice
    assert len(traces) > once


def test_keeps_the_executor_and_the_name():
    chunked = fg.executors.local(chunk=2)
    gradient = fg.grad(class_1.on(chunked))
    assert gradient.executor == chunked
    assert gradient.name == "grad(class_1)"
    assert list(gradient.signature.parameters) == ["x", "z"]
    assert list(fg.jvp(class_1).signature.parameters) == ["x", "z", "tangents"]
    assert list(fg.vjp(class_1).signature.parameters) == ["x", "z", "cotangent"]


@pytest.mark.parametrize("mode", ["auto", "mixed"])
def test_what_only_the_server_does_is_differentiated_by_the_fewer(mode):
    """Few inputs and many results: tangents go forward, and nothing of n x n floats is made."""
    n = 1000

    @fg.program(z=fg.CLIENTS)
    def step(rates, x, z):
        return x - rates[0] * jnp.sin(fg.mean(z) * x) * rates[1]

    args = jnp.array([0.5, 2.0]), jnp.linspace(0, 1, n), jnp.arange(3.0)
    jacobian = fg.jacobian(step, mode=mode)
    sizes = [v.size for e in fg.plan(jacobian, *args).graph.local for v in e.outputs]
    assert max(sizes) <= 2 * n
    expected = jax.jacobian(lambda r: args[1] - r[0] * jnp.sin(args[1]) * r[1])(args[0])
    np.testing.assert_allclose(jacobian(*args), expected, rtol=1e-10)
