"""What fedgrad reads of JAX's equations is still there, under the names that it knows.

These fail when JAX changes; the message says what to look at. The version that is allowed (the
upper bound in pyproject.toml) is raised when they pass, together with the rest of the suite.
"""

import jax
import jax.numpy as jnp
import pytest

from fedgrad.core import control, primitives

LOOK = (
    "JAX {version} lays out `{name}` differently: its parameters are {found}. Look at {where}, the "
    "only place that reads them, and at tests/core/test_jax_layout.py."
)


def equation(fun, *args, name):
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    (found,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
    return found


def scan(carry, xs):
    constant = jnp.cos(carry)
    return jax.lax.scan(lambda c, x: (c + x * constant, (c, x)), carry, xs)


def loop(x, limit):
    return jax.lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, c[1] * x), (0, x))


def branch(x):
    return jax.lax.switch(x.astype(int), [jnp.sin, jnp.cos, jnp.tanh], x)


ONE, ROWS = jnp.float32(1.0), jnp.ones(5, jnp.float32)
# fun, arguments, primitive, where it is read, and the parameters: one set for each layout we know
KNOWN = [
    (
        scan,
        (ONE, ROWS),
        "scan",
        "core/control.py (scan_of)",
        [
            {"reverse", "length", "jaxpr", "num_consts", "num_carry", "unroll"},  # JAX 0.10
            {"reverse", "length", "jaxpr", "ft_in", "ft_out", "unroll"},  # since 0.11
        ],
    ),
    (
        loop,
        (ONE, 3),
        "while",
        "core/control.py (while_of)",
        [{"cond_nconsts", "cond_jaxpr", "body_nconsts", "body_jaxpr"}],
    ),
    (branch, (ONE,), "cond", "core/control.py (cond_of)", [{"branches"}]),
    (
        jax.jit(jnp.sin),
        (ONE,),
        "jit",
        "core/primitives.py (CALLS)",
        [{"jaxpr"}],
    ),
    (jax.checkpoint(jnp.sin), (ONE,), "remat2", "core/primitives.py (CALLS)", [{"jaxpr"}]),
    (
        jax.nn.relu,
        (ONE,),
        "custom_jvp_call",
        "core/primitives.py (CALLS)",
        [{"call_jaxpr"}],
    ),
    (
        lambda x, y: jax.lax.dot_general(x, y, (((0,), (0,)), ((), ()))),
        (ROWS, ROWS),
        "dot_general",
        "planning/server.py (_work)",
        [{"dimension_numbers"}],
    ),
    (
        lambda x: jax.lax.dynamic_slice(x, (1,), (2,)),
        (ROWS,),
        "dynamic_slice",
        "execution/ragged.py",
        [{"slice_sizes"}],
    ),
    (
        lambda x, k: jax.lax.conv_general_dilated(x, k, (1,), "SAME"),
        (jnp.ones((1, 2, 8)), jnp.ones((3, 2, 3))),
        "conv_general_dilated",
        "execution/convolutions.py",
        [
            {"window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"}
            | {"feature_group_count", "batch_group_count", "precision", "preferred_element_type"}
        ],
    ),
]
EXACT = {"scan", "while", "cond"}  # of the others, more parameters may come


@pytest.mark.parametrize("fun, args, name, where, known", KNOWN, ids=[row[2] for row in KNOWN])
def test_parameters(fun, args, name, where, known):
    found = set(equation(fun, *args, name=name).params)
    fits = any(found == k if name in EXACT else found >= k for k in known)
    assert fits, LOOK.format(version=jax.__version__, name=name, found=sorted(found), where=where)


def test_a_scan_is_read_right():
    """Constants, carry and rows are where they are said to be, also in derivatives."""
    for fun in (
        scan,
        lambda c, xs: jax.jvp(scan, (c, xs), (c, xs)),
        jax.grad(lambda c, xs: jnp.sum(scan(c, xs)[1][0])),
        lambda c, xs: jax.vmap(scan, (0, None))(c[None], xs),
    ):
        for eqn in jax.make_jaxpr(fun)(ONE, ROWS).jaxpr.eqns:
            if eqn.primitive.name != "scan":
                continue
            found = control.scan_of(eqn.params)
            body = found.bodies[0]
            consts, carry, xs = found.split(eqn.invars)
            _, inner, rows = found.split(body.jaxpr.invars)
            message = LOOK.format(
                version=jax.__version__,
                name="scan",
                found=sorted(eqn.params),
                where="core/control.py (scan_of)",
            )
            assert found.length == len(ROWS), message
            assert [v.aval.shape for v in carry] == [v.aval.shape for v in inner], message
            assert all(v.aval.shape[0] == found.length for v in xs), message
            assert [v.aval.shape[1:] for v in xs] == [v.aval.shape for v in rows], message
            after, ys = found.split_outputs(eqn.outvars)
            assert [v.aval.shape for v in after] == [v.aval.shape for v in carry], message
            assert all(v.aval.shape[0] == found.length for v in ys), message
            assert consts is not None


def test_what_jax_says_when_it_cannot():
    """`impossible` reads these words; the rest of the message may change."""
    from fedgrad.ad.rules import impossible

    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    for run in (
        lambda: jax.grad(lambda x: jax.lax.while_loop(lambda c: c < 3, lambda c: c + x, x))(ONE),
        lambda: jax.jvp(f, (ONE,), (ONE,)),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            run()
        assert impossible(caught.value), (
            f"JAX {jax.__version__} says {str(caught.value)[:200]!r}, which ad/rules.py "
            "(impossible) does not know: a mode that is not possible would be a raw error."
        )


def test_a_named_axis_is_an_effect_that_is_known():
    """`has_effects` tells asking for the client's index from doing something."""
    jaxpr = jax.make_jaxpr(lambda: jax.lax.axis_index("a"), axis_env=[("a", 1)])().jaxpr
    (eqn,) = jaxpr.eqns
    assert not primitives.has_effects(eqn), (
        f"JAX {jax.__version__} notes the use of a named axis as {eqn.effects}: look at "
        "core/primitives.py (has_effects)."
    )
