"""Models of every kind are trained as they are: dicts, Equinox, Flax NNX and Flax Linen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedgrad as fg

FEATURES, CLASSES, HIDDEN = 4, 3, 5


def make_population():
    rng = np.random.default_rng(0)
    centers = 2 * rng.normal(size=(CLASSES, FEATURES))
    clients = []
    for size in (23, 4, 11, 9):
        y = rng.integers(0, CLASSES, size)
        x = centers[y] + rng.normal(size=(size, FEATURES))
        clients.append({"x": x.astype(np.float32), "y": y})
    return fg.population(clients)


POPULATION = make_population()


def cross_entropy(scores, batch):
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])


# Each gives its parameters, a function (params, x) -> scores, and how to get the model back.


def a_dict():
    a, b = jax.random.split(jax.random.key(0))
    params = {
        "hidden": {
            "w": 0.5 * jax.random.normal(a, (FEATURES, HIDDEN), jnp.float32),
            "b": jnp.zeros(HIDDEN, jnp.float32),
        },
        "out": 0.5 * jax.random.normal(b, (HIDDEN, CLASSES), jnp.float32),
    }

    @jax.numpy_rank_promotion("allow")  # as models are written
    def scores(p, x):
        return jax.nn.relu(x @ p["hidden"]["w"] + p["hidden"]["b"]) @ p["out"]

    return params, scores, lambda p: lambda x: scores(p, x)


def an_equinox_module():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(FEATURES, CLASSES, HIDDEN, 1, dtype=jnp.float32, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def again(p):
        return jax.vmap(eqx.combine(p, rest))

    return params, lambda p, x: again(p)(x), again


def a_flax_nnx_module():
    nnx = pytest.importorskip("flax.nnx")

    class Classifier(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
            self.out = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.out(jax.nn.relu(self.hidden(x)))

    graph, params = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param)

    def again(p):
        return nnx.merge(graph, p)

    return params, lambda p, x: again(p)(x), again


def a_flax_linen_module():
    linen = pytest.importorskip("flax.linen")
    model = linen.Sequential([linen.Dense(HIDDEN), jax.nn.relu, linen.Dense(CLASSES)])
    params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES), jnp.float32))["params"]

    def scores(p, x):
        return model.apply({"params": p}, x)

    return params, scores, lambda p: lambda x: scores(p, x)


MODELS = [a_dict, an_equinox_module, a_flax_nnx_module, a_flax_linen_module]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_trained_as_it_is(model):
    """With self-tuned FedAvg, whose first rounds are those of FedAvg; then the model is itself."""
    params, scores, again = model()

    def loss(params, batch):
        return cross_entropy(scores(params, batch["x"]), batch)

    plain = fg.fed_avg(loss, fg.local_training(0.3, batch_size=8, shuffle=False))
    tuned = fg.self_tuning(plain, "server.learning_rate", gradient_from="same")
    everyone, key = POPULATION.everyone, jax.random.key(0)
    state, losses, rates = tuned.init(params), [], []
    for _ in range(8):
        state, metrics = tuned.round(state, tuned.hyper, everyone, key)
        losses.append(float(metrics.gradient_loss))
        rates.append(float(metrics.hyper["server.learning_rate"]))
        if len(losses) == 1:
            once, _ = plain.round(plain.init(params), plain.hyper, everyone, key)
            close = np.testing.assert_allclose
            jax.tree.map(lambda a, b: close(a, b, rtol=1e-5, atol=1e-7), state.params, once.params)
    assert losses[-1] < 0.5 * losses[0], losses
    assert len(set(rates)) > 2, "they are learned"
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    assert jax.tree.map(jnp.result_type, state.params) == jax.tree.map(jnp.result_type, params)
    right = jnp.argmax(again(state.params)(everyone.store["x"]), -1) == everyone.store["y"]
    assert jnp.mean(right) > 0.8


def test_rates_by_layer_of_a_flax_model():
    """Layers are the outer entries of the parameters; a rate of 0 leaves one as it is."""
    params, scores, _ = a_flax_linen_module()
    first, second = sorted(params)
    algorithm = fg.fed_sgd(
        lambda p, b: cross_entropy(scores(p, b["x"]), b), {first: 0.0, second: 1.0}
    )
    state, _ = algorithm.round(
        algorithm.init(params), algorithm.hyper, POPULATION.everyone, jax.random.key(0)
    )
    jax.tree.map(np.testing.assert_array_equal, state.params[first], params[first])
    assert not np.array_equal(state.params[second]["kernel"], params[second]["kernel"])


def test_a_whole_equinox_model_is_refused_with_what_to_do():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(FEATURES, CLASSES, HIDDEN, 1, key=jax.random.key(0))
    with pytest.raises(fg.ArgumentError, match=r"eqx.partition\(model, eqx.is_inexact_array\)"):
        fg.fed_avg(lambda p, b: b["y"]).init(model)
