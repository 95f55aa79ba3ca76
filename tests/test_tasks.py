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
from fedgrad.tasks import TASKS, TaskError, classifier, split, task
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


def test_synthetic_feature_means_scatter_around_centres_of_deviation_beta(clients):
    means = np.array([c.mean for c in clients])
    assert means.mean(1).std() == pytest.approx(np.sqrt(2.0**2 + 1 / 60), rel=0.1)
    assert (means - means.mean(1, keepdims=True)).std() == pytest.approx(1, rel=0.02)
    # Centres are no function of the model's: u and B are independent.
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


def test_synthetic_without_heterogeneity_has_common_centres():
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


SMALL = {"synthetic": {"clients": 8}, "digits": {"clients": 30}}


@pytest.fixture(scope="module", params=sorted(TASKS))
def made(request):
    return task(request.param, **SMALL[request.param])


def test_every_task_is_small_here():
    assert set(SMALL) == set(TASKS)


def test_a_task_gives_one_loss_and_one_metric_per_example(made):
    params = made.init(jax.random.key(0))
    batch = rows(made.train, 0)
    n = len(batch["y"])
    for function in (made.loss, *made.metrics.values()):
        assert function(params, batch).shape == (n,)
        one = jax.tree.map(lambda x: x[:1], batch)
        np.testing.assert_allclose(function(params, one)[0], function(params, batch)[0], rtol=1e-5)
    assert len(made.train) == len(made.test)
    assert made.defaults.cohort_size <= len(made.train)


def test_a_task_is_reproducible_and_differs_by_seed(made):
    a, b = (TASKS[made.name](**SMALL[made.name], seed=s) for s in (0, 1))
    same = jax.tree.map(np.array_equal, a.train.everyone.store, made.train.everyone.store)
    assert all(jax.tree.leaves(same))
    assert not np.array_equal(a.train.everyone.store["x"], b.train.everyone.store["x"])


def test_a_task_can_be_learned(made):
    """Plain gradient descent on all examples: the loss falls, and accuracy on held-out rises."""
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
