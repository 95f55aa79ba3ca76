"""`fg.check_grads` and `fg.hessian`: right where JAX is, and loud where a derivative is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from programs import TABLE, class_1, normal, while_loop

X, Z = normal(0, 3), normal(1, 4, 3)


@pytest.mark.parametrize("argnums", ["x", "z", ("x", "z")], ids=str)
def test_every_mode_agrees_with_finite_differences(argnums):
    found = fg.check_grads(class_1, (X, Z), argnums)
    assert set(found) == (
        {"forward", "reverse", "mixed"} if argnums == "x" else {"reverse", "mixed"}
    )
    assert max(found.values()) < 1e-7


def test_results_that_are_not_one_number():
    @fg.program(z=fg.CLIENTS)
    def several(x, z, n):
        mean = fg.mean(jnp.tanh(fg.broadcast(x["a"]) * z))
        return {"mean": mean, "count": n, "scaled": mean * x["b"]}

    found = fg.check_grads(several, ({"a": X, "b": 2.0}, Z, 3))
    assert set(found) == {"forward", "reverse", "mixed"}


def test_a_mode_that_is_impossible_is_left_out():
    assert "reverse" not in fg.check_grads(while_loop, (X, Z))


def test_a_wrong_derivative_is_found():
    @jax.custom_jvp
    def wrong(x):
        return x**2

    wrong.defjvp(lambda primals, tangents: (wrong(*primals), 3 * primals[0] * tangents[0]))

    @fg.program(z=fg.CLIENTS)
    def loss(x, z):
        return fg.mean(jnp.sum(wrong(fg.broadcast(x)) * z))

    with pytest.raises(fg.GradientError, match=r"loss: by x, mode 'mixed' gives .* finite diff"):
        fg.check_grads(loss, (X, Z), modes=["mixed"])
    assert fg.check_grads(loss, (X, Z), tolerance=10.0)


@pytest.mark.parametrize(
    "result, words",
    [
        (lambda x, z: fg.sum(fg.broadcast(x) > z), "not floating"),
        (lambda x, z: fg.broadcast(x) * z, "at clients"),
        (lambda x, z: (fg.sum(z), z), "at clients"),
    ],
    ids=["integers", "of clients", "also of clients"],
)
def test_a_result_without_a_derivative_is_refused(result, words):
    with pytest.raises(fg.ArgumentError, match=rf"returns what is {words}.*fg\.mean"):
        fg.check_grads(fg.program(z=fg.CLIENTS)(result), (X, Z))


def test_arguments_that_have_only_a_position():
    @fg.program(z=fg.CLIENTS)
    def positional(x, /, z):
        return fg.mean(jnp.sum(fg.broadcast(x) ** 3 * z))

    assert max(fg.check_grads(positional, (X, Z)).values()) < 1e-7


@pytest.mark.parametrize("mode", ["auto", "forward", "reverse", "mixed"])
def test_the_hessian_is_that_of_jax(mode):
    case = next(c for c in TABLE if c.program is class_1)
    found = fg.hessian(class_1, mode=mode)(X, Z)
    np.testing.assert_allclose(found, jax.hessian(case.centralized)(X, Z), rtol=1e-10)
