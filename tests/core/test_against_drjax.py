"""Where DrJAX can express a program, values and derivatives are the same.

FedAvg on softmax regression, and the loss of the new model on the same clients, as a function of
the server's learning rate, the clients' learning rate and the exponent of the weights.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from programs import normal

drjax = pytest.importorskip("drjax")

N, EXAMPLES, FEATURES, CLASSES, STEPS = 4, 6, 3, 2, 3
HYPER = {"client_lr": jnp.float64(0.3), "exponent": jnp.float64(0.6), "lr": jnp.float64(0.9)}
MODEL = {"w": 0.1 * normal(0, FEATURES, CLASSES), "b": jnp.zeros(CLASSES)}
DATA = {
    "x": normal(1, N, EXAMPLES, FEATURES),
    "y": jnp.asarray(np.random.default_rng(2).integers(0, CLASSES, (N, EXAMPLES))),
    "count": jnp.array([3.0, 10.0, 1.0, 6.0]),
}


def loss(model, data):
    log_p = jax.nn.log_softmax(data["x"] @ model["w"] + model["b"][None])
    return -jnp.mean(jnp.take_along_axis(log_p, data["y"][:, None], 1))


def trained(model, client_lr, data):
    """What local SGD changes of the model."""

    def step(local, _):
        slope = jax.grad(loss)(local, data)
        return jax.tree.map(lambda w, g: w - client_lr * g, local, slope), None

    local, _ = jax.lax.scan(step, model, None, length=STEPS)
    return jax.tree.map(jnp.subtract, local, model)


def updated(model, lr, delta):
    return jax.tree.map(lambda w, d: w + lr * d, model, delta)


@fg.program(data=fg.CLIENTS)
def with_fedgrad(hyper, model, data):
    here, client_lr, exponent = fg.broadcast((model, hyper["client_lr"], hyper["exponent"]))
    delta = fg.mean(trained(here, client_lr, data), weights=data["count"] ** exponent)
    new = updated(model, hyper["lr"], delta)
    return fg.mean(loss(fg.broadcast(new), data))


@drjax.program(placements={"clients": N})
def with_drjax(hyper, model, data):
    sent = drjax.broadcast((model, hyper["client_lr"], hyper["exponent"]))
    deltas = drjax.map_fn(lambda s, d: trained(s[0], s[1], d), (sent, data))
    weights = drjax.map_fn(lambda s, d: d["count"] ** s[2], (sent, data))
    total = drjax.reduce_sum(weights)
    scaled = drjax.map_fn(lambda w, d: jax.tree.map(lambda x: w * x, d), (weights, deltas))
    delta = jax.tree.map(lambda x: x / total, drjax.reduce_sum(scaled))
    new = updated(model, hyper["lr"], delta)
    return drjax.reduce_mean(drjax.map_fn(loss, (drjax.broadcast(new), data)))


@functools.cache
def wanted(mode):
    take = jax.jacfwd if mode == "forward" else jax.grad
    found = jax.jit(lambda *args: (with_drjax(*args), take(with_drjax)(*args)))
    return found(HYPER, MODEL, DATA)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), found, expected)


@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed", "auto"])
def test_hyperparameters(mode):
    value, gradient = fg.value_and_grad(with_fedgrad, mode=mode)(HYPER, MODEL, DATA)
    assert_same((value, gradient), wanted("reverse"))
    assert all(jnp.abs(g) > 1e-4 for g in gradient.values())


def test_drjax_forward_is_our_forward():
    found = fg.value_and_grad(with_fedgrad, mode="forward")(HYPER, MODEL, DATA)
    assert_same(found, wanted("forward"))


@pytest.mark.parametrize("mode", ["reverse", "mixed"])
def test_model(mode):
    found = fg.grad(with_fedgrad, "model", mode=mode)(HYPER, MODEL, DATA)
    assert_same(found, jax.jit(jax.grad(with_drjax, 1))(HYPER, MODEL, DATA))


def test_hessian_of_hyperparameters():
    found = fg.jacobian(fg.grad(with_fedgrad, mode="mixed"), mode="forward")(HYPER, MODEL, DATA)
    assert_same(found, jax.jit(jax.jacfwd(jax.grad(with_drjax)))(HYPER, MODEL, DATA))
