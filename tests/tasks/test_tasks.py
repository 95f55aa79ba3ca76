"""Tasks: ways to split are partitions, Synthetic has its statistics, every task can be trained."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedgrad as fg
from fedgrad.core.errors import MissingExtra
from fedgrad.execution.convolutions import as_matmul
from fedgrad.tasks import (
    TASKS,
    TaskError,
    cifar100,
    classifier,
    emnist,
    layers,
    shakespeare,
    split,
    stackoverflow_tags,
    stackoverflow_words,
    task,
)
from fedgrad.tasks.synthetic import draw

# ---- splits


@st.composite
def labelled(draw):
    """Labels, a number of clients that they suffice for, and a source of randomness."""
    labels = draw(st.lists(st.integers(0, 5), min_size=1, max_size=120))
    clients = draw(st.integers(1, len(labels)))
    return np.array(labels), clients, np.random.default_rng(draw(st.integers(0, 2**32)))


def assert_partition(parts, examples, clients):
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(examples))


@given(labelled())
def test_iid_is_an_even_partition(case):
    labels, clients, rng = case
    parts = split.iid(labels, clients, rng)
    assert_partition(parts, len(labels), clients)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(labelled(), st.floats(1e-3, 1e3), st.integers(1, 9))
def test_dirichlet_is_a_partition(case, concentration, at_least):
    labels, clients, rng = case
    at_least = min(at_least, len(labels) // clients)
    parts = split.dirichlet(labels, clients, concentration, rng, at_least)
    assert_partition(parts, len(labels), clients)
    assert min(map(len, parts)) >= at_least


@given(labelled(), st.integers(1, 6))
def test_pathological_is_a_partition_with_exactly_so_many_classes(case, wanted):
    labels, clients, rng = case
    sizes = np.unique(labels, return_counts=True)[1]
    possible = wanted <= len(sizes) <= clients * wanted <= np.minimum(sizes, clients).sum()
    if not possible:
        with pytest.raises(TaskError, match="class"):
            split.pathological(labels, clients, wanted, rng)
        return
    parts = split.pathological(labels, clients, wanted, rng)
    assert_partition(parts, len(labels), clients)
    assert {len(np.unique(labels[part])) for part in parts} == {wanted}


@given(labelled())
def test_pachinko_is_an_even_partition(case):
    labels, clients, rng = case
    parts = split.pachinko(labels, labels // 2, clients, rng)
    assert_partition(parts, len(labels), clients)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_pachinko_gives_a_client_few_superclasses_and_many_of_their_classes():
    labels = np.tile(np.arange(100), 50)
    parts = split.pachinko(labels, labels // 5, 50, np.random.default_rng(0))
    tops = [len(np.unique(labels[part] // 5)) for part in parts]
    classes = [len(np.unique(labels[part])) for part in parts]
    # Of 20 superclasses; near the end, clients have to take what is left.
    assert np.median(tops) <= 8 and np.mean(np.divide(classes, tops)) > 3
    # With large concentrations everybody has some of nearly everything.
    flat = split.pachinko(labels, labels // 5, 50, np.random.default_rng(0), (1e3, 1e3))
    assert np.median([len(np.unique(labels[part] // 5)) for part in flat]) >= 18


@given(labelled())
def test_a_column_gives_a_client_for_each_of_its_values(case):
    labels, _, _ = case
    parts = split.by_column(labels)
    assert_partition(parts, len(labels), len(np.unique(labels)))
    assert [labels[part[0]] for part in parts] == sorted(set(labels))
    assert all(len(set(labels[part])) == 1 for part in parts)
    names = np.array([f"client {label}" for label in labels])
    assert len(split.by_column(names)) == len(parts)


LABELS = np.repeat(np.arange(10), 1000)


def shares(parts):
    """Of each class, the share that each client has: classes x clients."""
    counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts])
    return (counts / 1000).T


@pytest.mark.parametrize("concentration", [0.1, 1.0, 30.0])
def test_dirichlet_shares_have_its_variance(concentration):
    clients, rng = 20, np.random.default_rng(1)
    drawn = np.concatenate(
        [shares(split.dirichlet(LABELS, clients, concentration, rng)) for _ in range(40)]
    )
    np.testing.assert_allclose(drawn.mean(0), 1 / clients, atol=0.025)
    expected = (1 / clients) * (1 - 1 / clients) / (clients * concentration + 1)
    assert drawn.var(0).mean() == pytest.approx(expected, rel=0.1)


def test_pathological_cuts_classes_in_proportion_and_pairs_them_at_random():
    labels = np.repeat([0, 1, 2, 3], [800, 400, 400, 400])
    rng = np.random.default_rng(0)
    parts = split.pathological(labels, 20, 2, rng)
    holders = [sum(c in labels[part] for part in parts) for c in range(4)]
    assert holders == [16, 8, 8, 8]
    assert {len(part) for part in parts} <= {50 + 50}
    pairs = {tuple(np.unique(labels[part])) for part in parts}
    assert len(pairs) >= 4


def test_splits_are_reproducible_and_differ_by_seed():
    ways = [
        lambda rng: split.iid(LABELS, 30, rng),
        lambda rng: split.dirichlet(LABELS, 30, 0.5, rng),
        lambda rng: split.pathological(LABELS, 30, 2, rng),
        lambda rng: split.pachinko(LABELS[::10], LABELS[::10] // 2, 30, rng),
    ]
    for way in ways:
        a, b, c = (way(np.random.default_rng(seed)) for seed in (0, 0, 1))
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


def test_divided_examples_are_those_of_the_client():
    data = {"x": np.arange(20.0).reshape(10, 2), "y": np.arange(10)}
    first, second = split.divide(data, [np.array([0, 7]), np.array([3])])
    np.testing.assert_array_equal(first["x"], [[0, 1], [14, 15]])
    np.testing.assert_array_equal(second["y"], [3])


@given(st.lists(st.integers(2, 60), min_size=1, max_size=5), st.floats(0.05, 0.95))
def test_held_out_examples_are_cut_off_within_each_client(sizes, fraction):
    clients = [{"id": 100 * i + np.arange(n)} for i, n in enumerate(sizes)]
    rest, held_out = split.hold_out(clients, fraction, np.random.default_rng(0))
    for size, client, a, b in zip(sizes, clients, rest, held_out, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([a["id"], b["id"]])), client["id"])
        assert len(a["id"]) >= 1 and len(b["id"]) >= 1
        assert abs(len(b["id"]) - fraction * size) <= 1
    assert (
        len(split.hold_out([{"x": np.arange(50)}], 0.1, np.random.default_rng(0))[0][0]["x"]) == 45
    )


RNG = np.random.default_rng(0)
MISUSES = {
    "too few examples": (lambda: split.iid(np.zeros(3), 4, RNG), "at most 3 clients"),
    "too few for the minimum": (lambda: split.dirichlet(np.zeros(9), 4, 1.0, RNG, 3), "3 clients"),
    "no clients": (lambda: split.iid(np.zeros(3), 0, RNG), "at least 1 client"),
    "empty clients": (lambda: split.dirichlet(np.zeros(3), 1, 1.0, RNG, 0), "at_least=0"),
    "one-hot labels": (lambda: split.iid(np.zeros((3, 2)), 1, RNG), r"\(3, 2\)"),
    "concentration": (lambda: split.dirichlet(np.zeros(3), 1, 0.0, RNG), "positive"),
    "more classes than there are": (
        lambda: split.pathological(np.arange(3), 3, 4, RNG),
        "1 to 3",
    ),
    "classes that nobody gets": (lambda: split.pathological(np.arange(9), 2, 2, RNG), "more"),
    "more shards than examples": (lambda: split.pathological(np.arange(9), 9, 2, RNG), "fewer"),
    "fraction": (lambda: split.hold_out([{"x": np.zeros(3)}], 1.0, RNG), "between 0 and 1"),
    "one example": (lambda: split.hold_out([{"x": np.zeros(1)}], 0.5, RNG), "Client 0"),
    "unknown task": (lambda: task("synthetik"), "Did you mean 'synthetic'"),
    "unknown option": (lambda: task("synthetic", alfa=1), "Did you mean 'alpha'"),
    "negative deviation": (lambda: task("synthetic", alpha=-1), "at least 0"),
    "task without clients": (lambda: task("synthetic", clients=0), "at least 1 client"),
    "concentrations": (
        lambda: split.pachinko(np.zeros(3), np.zeros(3), 1, RNG, (0.1, 0.0)),
        "positive",
    ),
    "superclasses of others": (
        lambda: split.pachinko(np.zeros(3), np.zeros(2), 1, RNG),
        r"\(3,\) labels, \(2,\)",
    ),
    "a class in two superclasses": (
        lambda: split.pachinko(np.zeros(3), np.arange(3), 1, RNG),
        "one superclass",
    ),
    "a column of rows": (lambda: split.by_column(np.zeros((3, 2))), r"\(3, 2\)"),
    "unknown size": (lambda: task("emnist", size="large"), "Known: paper, small"),
    "emnist without clients": (lambda: task("emnist", clients=0), "at least 1 client"),
    "a share of validation": (lambda: task("emnist", validation=1.0), "between 0 and 1"),
    "too few to validate": (lambda: task("emnist", clients=2, validation=1e-9), "Ask for more"),
    "a size in a list": (lambda: task("emnist", size=["small"]), "Known: paper, small"),
    "no name": (lambda: task(3), "named by a text, got int"),
    "no number": (lambda: task("synthetic", beta=float("nan")), "at least 0"),
    "more labels than examples": (
        lambda: split.divide({"x": np.zeros(3), "y": np.zeros(4)}, [np.arange(3)]),
        r"one row per example, got arrays of shapes \[\(3,\), \(4,\)\]",
    ),
    "more labels to hold out": (
        lambda: split.hold_out([{"x": np.zeros(3), "y": np.zeros(4)}], 0.5, RNG),
        "one row per example",
    ),
    "data of no kind": (lambda: task("emnist", data=3), "takes a file, a folder"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_explained_at_the_users_line(misuse):
    wrong, message = MISUSES[misuse]
    with pytest.raises(TaskError, match=message) as caught:
        wrong()
    assert "test_tasks.py:" in str(caught.value)


# ---- Synthetic(alpha, beta), by its statistics


@pytest.fixture(scope="module")
def clients():
    return draw(3.0, 2.0, 300, np.random.default_rng(5))


def test_synthetic_sizes_are_lognormal_plus_50(clients):
    sizes = np.array([len(c.y) for c in clients])
    assert sizes.min() >= 50
    below, median, above = np.quantile(sizes - 50, [0.1587, 0.5, 0.8413])
    assert np.log(median) == pytest.approx(4, abs=0.3)
    assert np.log(above) - np.log(median) == pytest.approx(2, abs=0.4)
    assert np.log(median) - np.log(below) == pytest.approx(2, abs=0.4)


def test_synthetic_weights_and_bias_share_a_mean_of_deviation_alpha(clients):
    of_weights = np.array([c.weights.mean() for c in clients])
    of_bias = np.array([c.bias.mean() for c in clients])
    assert of_weights.std() == pytest.approx(3.0, rel=0.1)
    # Means of 600 and of 10 unit normals around the same u.
    assert (of_weights - of_bias).std() == pytest.approx(np.sqrt(1 / 600 + 1 / 10), rel=0.1)
    spread = [np.append(c.weights, c.bias).std() for c in clients]
    np.testing.assert_allclose(np.mean(spread), 1, rtol=0.01)
    assert clients[0].weights.shape == (60, 10) and clients[0].bias.shape == (10,)


def test_synthetic_feature_means_scatter_around_centers_of_deviation_beta(clients):
    means = np.array([c.mean for c in clients])
    assert means.mean(1).std() == pytest.approx(np.sqrt(2.0**2 + 1 / 60), rel=0.1)
    assert (means - means.mean(1, keepdims=True)).std() == pytest.approx(1, rel=0.02)
    # Centers are no function of the model's: u and B are independent.
    models = np.array([c.weights.mean() for c in clients])
    assert abs(np.corrcoef(models, means.mean(1))[0, 1]) < 0.2


def test_synthetic_features_have_the_decaying_variance(clients):
    residuals = np.concatenate([(c.x - c.mean)[:2000] for c in clients])
    assert len(residuals) > 30_000
    np.testing.assert_allclose(residuals.mean(0), 0, atol=0.03)
    covariance = np.cov(residuals.T)
    np.testing.assert_allclose(np.diag(covariance), np.arange(1, 61) ** -1.2, rtol=0.05)
    correlation = np.corrcoef(residuals.T) - np.eye(60)
    assert np.abs(correlation).max() < 0.03


def test_synthetic_labels_are_the_clients_own_argmax(clients):
    for c in clients[:50]:
        scores = [[x @ c.weights[:, k] + c.bias[k] for k in range(10)] for x in c.x[:20]]
        np.testing.assert_array_equal(c.y[:20], np.argmax(scores, axis=1))


def test_synthetic_without_heterogeneity_has_common_centers():
    same = draw(0.0, 0.0, 40, np.random.default_rng(0))
    assert np.std([c.weights.mean() for c in same]) == pytest.approx(1 / np.sqrt(600), rel=0.3)
    assert np.std([c.mean.mean() for c in same]) == pytest.approx(1 / np.sqrt(60), rel=0.3)


def test_synthetic_task_holds_out_a_tenth_of_every_client():
    made = task("synthetic", clients=30, seed=3)
    drawn = draw(1.0, 1.0, 30, np.random.default_rng(3))
    sizes = np.array([len(c.y) for c in drawn])
    np.testing.assert_array_equal(made.train.counts, (9 * sizes) // 10)
    np.testing.assert_array_equal(made.train.counts + made.test.counts, sizes)
    for i in (0, 7):  # the same examples, shuffled
        both = [rows(p, i) for p in (made.train, made.test)]
        x = np.concatenate([b["x"] for b in both])
        y = np.concatenate([b["y"] for b in both])
        order, expected = np.lexsort(x.T), np.lexsort(drawn[i].x.astype(np.float32).T)
        np.testing.assert_array_equal(x[order], drawn[i].x.astype(np.float32)[expected])
        np.testing.assert_array_equal(y[order], drawn[i].y[expected])
        assert not np.array_equal(x, drawn[i].x.astype(np.float32))
    assert all(not leaf.any() for leaf in jax.tree.leaves(made.init(jax.random.key(0))))


def rows(population, client):
    begin, count = population.offsets[client], population.counts[client]
    return jax.tree.map(lambda x: np.asarray(x[begin : begin + count]), population.everyone.store)


# ---- every task


SMALL = {
    "synthetic": {"clients": 8},
    "digits": {"clients": 30},
    "cifar100": {"clients": 6},
    "emnist": {"clients": 6},
    "shakespeare": {"clients": 6},
    "stackoverflow_tags": {"clients": 6},
    "stackoverflow_words": {"clients": 6},
}
CLASSIFIERS = ("digits", "synthetic")  # gradient descent on all examples learns these


@pytest.fixture(scope="module", params=sorted(TASKS))
def made(request):
    return task(request.param, **SMALL[request.param])


def test_every_task_is_small_here():
    assert set(SMALL) == set(TASKS)


def test_a_task_gives_one_loss_and_one_metric_per_example(made):
    params = made.init(jax.random.key(0))
    batch = rows(made.train, 0)
    n = len(batch["y"])
    for function in map(jax.jit, (made.loss, *made.metrics.values())):
        assert function(params, batch).shape == (n,)
        one = jax.tree.map(lambda x: x[:1], batch)
        np.testing.assert_allclose(function(params, one)[0], function(params, batch)[0], rtol=1e-5)
    if made.name in (*CLASSIFIERS, "emnist", "shakespeare"):  # the same clients, not others
        assert len(made.train) == len(made.test)
    assert made.defaults.cohort_size <= len(made.train)


def test_a_task_is_reproducible_and_differs_by_seed(made):
    a, b = (TASKS[made.name](**SMALL[made.name], seed=s) for s in (0, 1))
    same = jax.tree.map(np.array_equal, a.train.everyone.store, made.train.everyone.store)
    assert all(jax.tree.leaves(same))
    assert not np.array_equal(a.train.everyone.store["x"], b.train.everyone.store["x"])


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_task_can_be_learned(name):
    """Plain gradient descent on all examples: the loss falls, and accuracy on held-out rises."""
    made = task(name, **SMALL[name])
    stores = [
        jax.tree.map(lambda x: x[: p.counts.sum()], p.everyone.store)
        for p in (made.train, made.test)
    ]
    mean = jax.jit(lambda p, batch: made.loss(p, batch).mean())
    step = jax.jit(
        lambda p: jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(mean)(p, stores[0]))
    )
    params = start = made.init(jax.random.key(0))
    for _ in range(60):
        params = step(params)
    assert mean(params, stores[0]) < 0.8 * mean(start, stores[0])
    before, after = (made.metrics["accuracy"](p, stores[1]).mean() for p in (start, params))
    assert after > before + 0.1


def test_digits_gives_every_client_a_few_examples_of_all():
    made = task("digits", clients=100, concentration=0.05)
    sizes = made.train.counts + made.test.counts
    assert sizes.sum() == 1797 and sizes.min() >= 5
    assert made.train.everyone.store["x"].max() == 1.0


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'fedgrad\[tasks\]'"):
        task("digits")


# ---- the classifier


def test_the_classifier_against_its_formula():
    rng = np.random.default_rng(0)
    w1, b1, w2, b2 = (rng.normal(size=s) for s in ((4, 3), (3,), (3, 5), (5,)))
    x, y = rng.normal(size=(7, 4)), rng.integers(0, 5, 7)
    scores = np.maximum(x @ w1 + b1, 0) @ w2 + b2
    expected = [np.log(np.exp(s).sum()) - s[c] for s, c in zip(scores, y, strict=True)]
    params = [{"weights": w1, "bias": b1}, {"weights": w2, "bias": b2}]
    batch = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
    np.testing.assert_allclose(classifier.cross_entropy(params, batch), expected, rtol=1e-6)
    np.testing.assert_array_equal(classifier.accuracy(params, batch), scores.argmax(1) == y)


def test_random_layers_keep_the_scale_of_their_inputs():
    params = classifier.random(jax.random.key(0), (200, 300, 10))
    first = np.asarray(params[0]["weights"])
    assert first.std() == pytest.approx(np.sqrt(2 / 200), rel=0.05)
    assert not params[0]["bias"].any() and params[1]["weights"].shape == (300, 10)


def test_a_task_fits_a_program(made):
    @fg.program(cohort=fg.CLIENTS)
    def examples(cohort):
        return fg.sum(cohort.count)

    assert examples(made.train.everyone) == made.train.counts.sum()


# ---- the paper's models

COUNTS = {
    emnist: 1_206_590,
    cifar100: 11_227_812,
    shakespeare: 820_522,
    stackoverflow_words: 4_050_748,
    stackoverflow_tags: 5_000_500,
}


@pytest.mark.parametrize("model", COUNTS, ids=lambda model: model.__name__.split(".")[-1])
def test_the_papers_models_have_the_papers_size(model):
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert layers.parameters(params) == COUNTS[model]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("model", COUNTS, ids=lambda model: model.__name__.split(".")[-1])
def test_a_task_of_the_papers_size_has_the_papers_settings(model):
    name = model.__name__.split(".")[-1]
    made = task(name, size="paper", **SMALL[name])
    assert layers.parameters(jax.eval_shape(made.init, jax.random.key(0))) == COUNTS[model]
    expected = {
        "cifar100": (20, -1.5),
        "emnist": (20, -1.5),
        "shakespeare": (4, 0),
        "stackoverflow_words": (32, -0.5),
        "stackoverflow_tags": (32, 2),
    }[name]
    assert made.defaults.batch_size == expected[0]
    assert np.log10(made.defaults.client_learning_rate) == pytest.approx(expected[1])
    assert made.defaults.rounds == 1500 and made.defaults.cohort_size == 6  # as many as there are
    assert "enerated" in made.about and "not" in made.about


@pytest.mark.parametrize("name", [n for n in SMALL if n not in CLASSIFIERS])
def test_a_papers_task_is_learned_by_a_few_clients(name):
    """Some rounds of FedAvgM, for which the rates are chosen: losses stay finite and fall."""
    made = task(name, **SMALL[name])
    rate = made.defaults.client_learning_rate
    algorithm = fg.fed_avgm(made.loss, fg.local_training(rate, batch_size=10))
    result = fg.fit(
        algorithm,
        made.train,
        params=made.init(jax.random.key(0)),
        rounds=6,
        cohort_size=len(made.train),
        key=jax.random.key(1),
        progress=False,
    )
    losses = result.history["loss"]
    assert np.isfinite(losses).all() and losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("name", [n for n in SMALL if n not in CLASSIFIERS])
def test_a_papers_task_has_gradients_that_are_right(name):
    """Against a difference of the loss, along the gradient, in double precision."""
    made = task(name, **SMALL[name])
    params = jax.tree.map(lambda x: x.astype(np.float64), made.init(jax.random.key(0)))
    batch = jax.tree.map(lambda x: x[:3], made.train.everyone.store)
    if name in ("shakespeare", "stackoverflow_words"):
        batch = {name: tokens[:, :9] for name, tokens in batch.items()}
    loss = jax.jit(lambda p: made.loss(p, batch).mean())
    with jax.numpy_dtype_promotion("standard"):
        gradient = jax.jit(jax.grad(loss))(params)
        square = sum(float((g**2).sum()) for g in jax.tree.leaves(gradient))
        step = 1e-5 / np.sqrt(square)
        ahead, behind = (
            float(loss(jax.tree.map(lambda p, g: p + s * step * g, params, gradient)))
            for s in (1, -1)
        )
    assert np.isfinite(square) and square > 0
    assert (ahead - behind) / (2 * step) == pytest.approx(square, rel=1e-3)


def test_dropout_is_for_training_only():
    made = task("emnist", clients=3)
    params, batch = made.init(jax.random.key(0)), rows(made.train, 0)
    loss, plain = jax.jit(made.loss), jax.jit(made.metrics["loss"])
    keyed = [loss(params, batch, key=jax.random.key(i)) for i in (0, 0, 1)]
    np.testing.assert_array_equal(keyed[0], keyed[1])
    assert not np.allclose(keyed[0], keyed[2])
    np.testing.assert_allclose(plain(params, batch), loss(params, batch), rtol=1e-6)


def test_padding_counts_as_nothing():
    for name in ("shakespeare", "stackoverflow_words"):
        made = task(name, clients=3)
        params, batch = made.init(jax.random.key(0)), dict(rows(made.train, 0))
        batch = {name: np.asarray(tokens, np.int16) for name, tokens in batch.items()}
        real = batch["y"] != 0
        assert real.any() and not real.all()
        assert float(made.metrics["accuracy"].whole(params, batch).sum()) == real.sum()
        # What follows padding is the same padding, whatever was read before.
        other = batch | {"x": np.where(real, batch["x"], 5).astype(np.int16)}
        loss = jax.jit(made.loss)
        np.testing.assert_allclose(loss(params, other), loss(params, batch), rtol=1e-5)


def test_masked_accuracy_is_of_all_tokens_together():
    """A ratio of sums, not the mean of ratios: long sequences count more."""
    made = task("stackoverflow_words", clients=3)
    params = made.init(jax.random.key(3))
    found = fg.Evaluation(made.metrics, made.test)(params)
    batch = jax.tree.map(lambda x: x[: made.test.counts.sum()], made.test.everyone.store)
    guess = np.argmax(np.asarray(jax.jit(stackoverflow_words.logits)(params, batch["x"])), -1)
    wanted = np.where(np.asarray(batch["y"]) < 1004, np.asarray(batch["y"]), 1)
    for metric, counts in (("accuracy", wanted != 0), ("accuracy_of_words", wanted >= 4)):
        assert found[metric] == pytest.approx((guess == wanted)[counts].mean(), abs=1e-6)


def test_recall_at_5_by_its_definition():
    params = {"kernel": jnp.zeros((9, 8), jnp.float32), "bias": jnp.arange(8, dtype=jnp.float32)}
    x = np.full((3, 4), -1, np.int16)
    y = np.array([[7, 0, -1], [1, 2, -1], [3, -1, -1]], np.int16)
    batch = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
    # The five highest are 3 to 7.
    np.testing.assert_array_equal(stackoverflow_tags.recalled(params, batch), [1, 0, 1])
    np.testing.assert_array_equal(stackoverflow_tags.tags(params, batch), [2, 2, 1])


def test_tags_are_scored_by_the_shares_of_words():
    """As a product with a vector that has the share of each known word among all words."""
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(size=(9, 8)).astype(np.float32), rng.normal(size=8)
    params = {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias.astype(np.float32))}
    x = np.array([[0, 3, 3, 10_000], [8, -1, -1, -1]], np.int16)  # 10,000 is an unknown word
    shares = np.zeros((2, 9))
    shares[0, 0], shares[0, 3], shares[1, 8] = 1 / 4, 2 / 4, 1
    np.testing.assert_allclose(
        stackoverflow_tags.logits(params, jnp.asarray(x)),
        shares @ kernel + bias,
        rtol=1e-5,
        atol=1e-6,
    )


def test_superclasses_have_five_classes_each():
    assert (np.bincount(cifar100.SUPERCLASS) == 5).all() and len(cifar100.SUPERCLASS) == 100


def test_the_small_model_of_cifar100_scores_each_place_by_itself():
    """36 squares of 4 x 4: what is in one of them counts by where it is, unlike in an average."""
    form = cifar100.SIZES["small"]
    params = cifar100.init(jax.random.key(0), form)
    assert layers.parameters(params) == 116_964
    assert params["classes"]["kernel"].shape == (36 * 32, 100)
    image = np.random.default_rng(0).integers(0, 256, (1, 24, 24, 3)).astype(np.uint8)
    mixed = image.reshape(1, 6, 4, 6, 4, 3)[:, ::-1, :, ::-1].reshape(image.shape)
    one, other = (cifar100.logits(params, x, form) for x in (image, mixed))
    assert np.abs(one - other).max() > 1e-3
    # With the same scores for all places, only which squares there are counts.
    kernel = jnp.tile(params["classes"]["kernel"][:32], (36, 1))
    params = {**params, "classes": {**params["classes"], "kernel": kernel}}
    one, other = (cifar100.logits(params, x, form) for x in (image, mixed))
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_pooling_and_normalizing_against_their_formulas():
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 8)).astype(np.float32)
    pooled = layers.max_pool(jnp.asarray(x), 2, 2)
    np.testing.assert_array_equal(pooled, x.reshape(2, 3, 2, 3, 2, 8).max((2, 4)))
    same = layers.max_pool(jnp.asarray(x), 3, 2, padding=1)
    expected = jax.lax.reduce_window(
        jnp.asarray(x), -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
    )
    np.testing.assert_array_equal(same, expected)
    layer = {"scale": jnp.arange(8, dtype=jnp.float32), "bias": jnp.ones(8, jnp.float32)}
    grouped = x.reshape(2, 36, 4, 2)
    mean, variance = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    normal = ((grouped - mean) / np.sqrt(variance + 1e-3)).reshape(x.shape)
    expected = normal * np.arange(8) + 1
    np.testing.assert_allclose(
        layers.group_norm(layer, jnp.asarray(x), 4), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("model", [emnist, cifar100], ids=["emnist", "cifar100"])
def test_convolutions_are_of_the_kind_that_is_fast_at_clients(model):
    """The executor has a matrix product for each of them, and for each in the gradient."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    images = {emnist: (2, 28, 28), cifar100: (2, 24, 24, 3)}[model]
    gradient = jax.grad(lambda p, x: model.logits(p, x).sum())
    jaxpr = jax.make_jaxpr(gradient)(params, jax.ShapeDtypeStruct(images, np.uint8))
    found = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert len(found) >= 5
    for eqn in found:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        assert jax.eval_shape(lambda *x: as_matmul(eqn, x), *shapes) is not None, eqn


def test_an_lstm_against_its_equations():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3)).astype(np.float32)
    stack = [layers.lstm_init(jax.random.key(i), n, 4) for i, n in enumerate((3, 4))]
    np.testing.assert_array_equal(stack[0]["bias"], np.repeat([0, 1, 0, 0], 4))

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    below = x
    for layer in jax.tree.map(np.asarray, stack):
        h = c = np.zeros((2, 4))
        out = []
        for t in range(5):
            gates = below[:, t] @ layer["input"] + h @ layer["recurrent"] + layer["bias"]
            i, f, g, o = np.split(gates, 4, 1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            out.append(h)
        below = np.stack(out, 1)
    np.testing.assert_allclose(layers.lstm(stack, jnp.asarray(x)), below, atol=1e-5)
    jaxpr = jax.make_jaxpr(lambda s: layers.lstm(s, jnp.asarray(x)))(stack)
    assert sum(eqn.primitive.name == "scan" for eqn in jaxpr.eqns) == 1


# ---- a task of one's own

CLIENTS = [{"x": np.ones((n, 3), np.float32), "y": np.ones(n, np.float32)} for n in (2, 4, 3)]


def first(key):
    return {"w": jnp.zeros(3, jnp.float32)}


def squares(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def own(**changes):
    return fg.tasks.Task(
        **{"train": fg.population(CLIENTS), "init": first, "loss": squares} | changes
    )


def test_a_task_of_ones_own_needs_clients_a_model_and_a_loss():
    made = own()
    assert made.test is None and made.validation is None and not made.metrics
    assert made.defaults.cohort_size == 3  # of 10, as many as there are


def fails(params, batch):
    return batch["z"]


others = fg.population([{"x": np.ones((2, 4), np.float32), "y": np.ones(2, np.float32)}])
WRONG = {
    "clients in a list": (lambda: own(train=CLIENTS), r"train= .* Write train=fg.population"),
    "test in a list": (lambda: own(test=CLIENTS), "test= takes a population"),
    "no function": (lambda: own(loss=3), "loss is a function, got int"),
    "init takes nothing": (lambda: own(init=lambda: {}), r"init \(test_tasks.py:\d+\) fails"),
    "init gives whole numbers": (lambda: own(init=lambda key: jnp.arange(3)), r"int64\[3\] in it"),
    "init gives nothing": (lambda: own(init=lambda key: {}), "got nothing"),
    "the loss fails": (
        lambda: own(loss=fails),
        r"loss \(test_tasks.py:\d+\) fails .*KeyError: 'z'",
    ),
    "the loss is of something else": (
        lambda: own(loss=lambda params, batch: batch["x"]),
        "one number per example",
    ),
    "the loss has no slope": (
        lambda: own(loss=lambda params, batch: batch["y"].astype(int)),
        "cannot be differentiated",
    ),
    "a metric fails": (lambda: own(metrics={"z": fails}), r"metrics\['z'\] .* fails"),
    "metrics without names": (lambda: own(metrics=[squares]), "functions by name"),
    "metrics by number": (lambda: own(metrics={3: squares}), "functions by name"),
    "a rate without end": (
        lambda: own(defaults=fg.tasks.Defaults(client_learning_rate=float("inf"))),
        "client_learning_rate=inf is not",
    ),
    "test has other examples": (lambda: own(test=others), r"test are x float32\[4\]"),
    "validation has, too": (lambda: own(validation=others), r"validation are x float32\[4\]"),
    "no defaults": (lambda: own(defaults={"rounds": 3}), "fg.tasks.Defaults"),
    "a rate of zero": (
        lambda: own(defaults=fg.tasks.Defaults(client_learning_rate=0)),
        "client_learning_rate=0 is not",
    ),
    "a cohort of more": (lambda: own(defaults=fg.tasks.Defaults(cohort_size=4)), "3 clients"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_task_is_said_when_it_is_made(wrong):
    make, message = WRONG[wrong]
    with pytest.raises(TaskError, match=message) as caught:
        make()
    assert "test_tasks.py:" in str(caught.value)


MODULE = """
import fedgrad as fg, numpy as np, jax.numpy as jnp
clients = [{"x": np.ones((4, 2), np.float32)} for _ in range(5)]
def make(rate: float = 0.5):
    return fg.tasks.Task(
        train=fg.population(clients),
        init=lambda key: jnp.zeros(2, jnp.float32),
        loss=lambda params, batch: (batch["x"] @ params - 1) ** 2,
        defaults=fg.tasks.Defaults(cohort_size=2, client_learning_rate=rate, rounds=2),
    )
ready = make()
number = 3
def wants(rate):
    return make(rate)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "a_module_with_tasks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield "a_module_with_tasks"
    sys.modules.pop("a_module_with_tasks", None)


def test_a_task_of_ones_own_is_named_by_its_module(module):
    assert task(f"{module}:ready").name == f"{module}:ready"
    made = task(f"{module}:make", rate=0.25)
    assert made.defaults.client_learning_rate == 0.25
    for name, options, message in (
        (f"{module}:redy", {}, "Did you mean 'ready'"),
        (f"{module}:number", {}, "neither a Task nor a function that gives one, but int"),
        (f"{module}:ready", {"rate": 1.0}, "rate has no effect"),
        (f"{module}:make", {"rat": 1.0}, "Did you mean 'rate'"),
        (f"{module}:wants", {}, "needs the option 'rate'"),
        ("no_such_module:ready", {}, "no module 'no_such_module'"),
    ):
        with pytest.raises(fg.FederatedError, match=message):
            task(name, **options)


def test_a_task_of_ones_own_is_tuned_by_the_command_line(module, capsys):
    from fedgrad.cli import main

    assert main(["tune", f"{module}:make", "--task-option", "rate=0.1", "--json"]) == 0
    assert f"{module}.make-fedavgm" in capsys.readouterr().out
    assert main(["tune", f"{module}:ready", "--gradient-from", "validation"]) == 2
    assert "has no validation clients" in capsys.readouterr().err
    assert main(["tune", f"{module}:number"]) == 2
    assert "neither a Task" in capsys.readouterr().err
