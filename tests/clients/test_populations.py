"""Whatever clients can be sampled from: every kind draws the same clients, by hand and in `fit`."""

import functools
import tempfile
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.clients.padding import padded
from fedgrad.federation import InProcess
from line import FIRST, line, mean_square, points

POINTS = points()
LINE = line().starting({"rate": 0.1, "noise": 0.0})
KEY = jax.random.key(5)


class OfOnesOwn(fg.Population):
    """All that another kind of clients has to say."""

    def __init__(self, clients):
        self.clients = clients

    def __len__(self):
        return len(self.clients)

    def select(self, clients):
        return fg.population([self.clients[i] for i in np.asarray(clients)]).everyone


def on_disk(clients):
    folder = tempfile.TemporaryDirectory()
    weakref.finalize(found := fg.store(f"{folder.name}/clients", clients), folder.cleanup)
    return found


KINDS = {
    "in memory": fg.population,
    "on disk": on_disk,
    "on a mesh": fg.executors.mesh().population,
    "on nodes": lambda clients: fg.executors.flower(InProcess.of(clients)).population(),
    "of one's own": OfOnesOwn,
}


@functools.cache
def population(kind):
    return KINDS[kind](POINTS)


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_every_kind_is_a_population(kind):
    clients = population(kind)
    assert isinstance(clients, fg.Population) and len(clients) == len(POINTS)
    assert len(clients.everyone) == len(clients)
    known = clients.counts
    assert known is None or known.tolist() == [len(client["y"]) for client in POINTS]


@every_kind
@pytest.mark.parametrize("role", ["cohort", "gradient_cohort"])
def test_the_same_key_draws_the_same_clients_of_every_kind(kind, role):
    clients, stored = population(kind), population("in memory")
    for round in (1, 2, 8, 30):
        for size in (1, 5, len(POINTS)):
            wanted = stored.indices(KEY, size, round, role).tolist()
            assert len(set(wanted)) == size
            assert clients.indices(KEY, size, round, role).tolist() == wanted
            cohort = clients.sample(KEY, size, round, role)
            assert len(cohort) == size and np.asarray(cohort.index).tolist() == wanted
    assert clients.indices(KEY, 5).tolist() == clients.indices(KEY, 5, round=1).tolist()


@every_kind
def test_fit_trains_on_the_clients_that_sample_draws(kind):
    """By hand, round for round; and where the population says, though nobody else does."""
    clients = population(kind)
    trained = fg.fit(LINE, clients, params=FIRST, rounds=10, cohort_size=5, key=KEY, progress=False)
    algorithm = LINE if clients.executor is None else LINE.on(clients.executor)
    state, losses = algorithm.init(jax.tree.map(jnp.asarray, FIRST)), []
    for round in range(1, 11):
        cohort = clients.sample(KEY, 5, round)
        state, metrics = algorithm.round(state, algorithm.hyper, cohort, jax.random.key(round))
        losses.append(float(metrics.loss))
    assert trained.history["loss"].tolist() == losses
    assert np.array_equal(trained.params["w"], state.params["w"])


def test_what_clients_keep_is_their_own_though_a_cohort_numbers_them_anew():
    settings = {"params": FIRST, "rounds": 6, "cohort_size": 3, "key": KEY, "progress": False}
    algorithm = fg.scaffold(mean_square, 0.05)
    found, wanted = (
        fg.fit(algorithm, population(k), **settings) for k in ("of one's own", "in memory")
    )
    np.testing.assert_allclose(found.params["w"], wanted.params["w"], rtol=1e-5)


@every_kind
def test_too_many_are_refused(kind):
    clients = population(kind)
    for size in (0, len(POINTS) + 1):
        with pytest.raises(fg.CohortError, match=f"Cannot sample {size} of 12.*1 to 12"):
            clients.sample(KEY, size)


@every_kind
def test_a_population_is_no_cohort(kind):
    @fg.program(data=fg.CLIENTS)
    def count(data):
        return fg.sum(data.count)

    with pytest.raises(fg.CohortError, match=r"got a population.*population\.everyone"):
        count(population(kind))


def test_a_digest_is_of_the_examples_and_not_of_where_they_are():
    kinds = ("in memory", "on disk", "on a mesh")
    found = {kind: population(kind).digest for kind in KINDS}
    assert len({found[kind] for kind in kinds}) == 1 and len(found["in memory"]) == 32
    assert found["on nodes"] is None and found["of one's own"] is None
    assert population("in memory").select(np.arange(len(POINTS))).digest == found["in memory"]


SAME_BYTES = np.arange(6, dtype=np.float32).reshape(2, 3)
# Clients that differ from [{"x": SAME_BYTES, "y": zeros}] * 2 in one thing each.
TOLD_APART = {
    "a bit": [{"x": SAME_BYTES, "y": np.zeros(2)}, {"x": SAME_BYTES, "y": np.array([0.0, -0.0])}],
    "a name": [{"x": SAME_BYTES, "z": np.zeros(2)}] * 2,
    "a dtype": [{"x": SAME_BYTES.view(np.int32), "y": np.zeros(2)}] * 2,
    "a shape": [{"x": SAME_BYTES.reshape(2, 1, 3), "y": np.zeros(2)}] * 2,
    "whose they are": [{"x": np.tile(SAME_BYTES, (2, 1))[:n], "y": np.zeros(n)} for n in (3, 1)],
    "one client more": [{"x": SAME_BYTES, "y": np.zeros(2)}] * 3,
}


@pytest.mark.parametrize("kind", ["in memory", "on disk", "on a mesh"])
def test_every_difference_has_another_digest(kind):
    first = [{"x": SAME_BYTES, "y": np.zeros(2)}] * 2
    digests = [KINDS[kind](clients).digest for clients in (first, *TOLD_APART.values())]
    assert len(set(digests)) == 1 + len(TOLD_APART)
    assert KINDS[kind]([dict(one) for one in first]).digest == digests[0]


def test_every_row_of_every_client_counts():
    """Also of many: a digest that looked at some of them let a run go on with other labels."""
    labels = np.arange(3000) % 7
    counts = [1, 1400, 599, 1000]

    def digest(y):
        return fg.population([{"y": part} for part in np.split(y, np.cumsum(counts)[:-1])]).digest

    known = {digest(labels)}
    for row in (0, 1, 2, 3, 1399, 1400, 1401, 1999, 2000, 2998, 2999):
        changed = labels.copy()
        changed[row] += 1
        known.add(digest(changed))
    assert len(known) == 12


def test_sampling_within_jit():
    stored = population("in memory")
    drawn = jax.jit(lambda key: stored.sample(key, 5, 3))(KEY)
    wanted = stored.sample(KEY, 5, 3)
    for found, value in ((drawn.index, wanted.index), (drawn.count, wanted.count)):
        assert np.array_equal(found, value)
    keys = jax.random.split(KEY, 4)
    many = jax.vmap(lambda key: stored.indices(key, 5))(keys)
    assert np.array_equal(many, [stored.indices(key, 5) for key in keys])
    old = jax.jit(lambda key: stored.indices(key, 5, 3))(jax.random.key_data(KEY))
    assert np.array_equal(old, wanted.index)


def test_training_takes_a_population():
    settings = {"params": FIRST, "rounds": 1, "cohort_size": 1, "key": KEY, "progress": False}
    for clients in (POINTS, population("in memory").everyone):
        with pytest.raises(fg.ArgumentError, match=r"takes a population.*fg\.population\(\["):
            fg.fit(LINE, clients, **settings)


def test_padding_is_examples():
    parts = [np.array([[3.0], [4.0]]), np.array([[5.0]])]
    assert padded(parts, 5).tolist() == [[3], [4], [5], [3], [3]]
    assert padded(parts, 3).tolist() == [[3], [4], [5]]
    assert isinstance(padded([jnp.ones((2, 1))], 4), jax.Array)
