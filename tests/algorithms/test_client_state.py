"""Clients that keep a state between rounds: SCAFFOLD against its published formulas, wherever it
runs, and a trainer that keeps the state of everybody."""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import by_hand
import fedgrad as fg
from by_hand import BATCH, CLIENTS, POPULATION, START, as_params, as_vector, loss
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.federation import InProcess

N = len(CLIENTS)
RATE, SERVER_RATE = 0.3, 0.8
COHORTS = [[0, 1, 2], [3, 1, 0], [2, 3, 1], [0, 2, 3]]
ordered = functools.partial(fg.local_training, batch_size=BATCH, shuffle=False)


def close(found, expected, rtol=1e-12, atol=1e-15):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


# ---- SCAFFOLD by hand: Karimireddy et al. 2020, Algorithm 1 with option II, in numpy


@dataclasses.dataclass
class ByHand:
    """The server's x and c, and c_i of each client."""

    x: np.ndarray
    c: np.ndarray
    own: np.ndarray

    @classmethod
    def first(cls):
        return cls(START, np.zeros(3), np.zeros((N, 3)))

    def play(self, chosen, rate=RATE, server_rate=SERVER_RATE, **order):
        """The round of these clients; their mean loss."""
        far, new, values = [], [], []
        for i in chosen:
            y, batches = self.x, by_hand.batches(CLIENTS[i], **order)
            total, seen = 0.0, 0
            for batch in batches:
                total += by_hand.value(y, batch) * len(batch["y"])
                seen += len(batch["y"])
                y = y - rate * (by_hand.slope(y, batch) - self.own[i] + self.c)
            far.append(y - self.x)
            new.append(self.own[i] - self.c + (self.x - y) / (len(batches) * rate))
            values.append(total / seen)
        moved = np.mean(new - self.own[chosen], axis=0)
        self.x = self.x + server_rate * np.mean(far, axis=0)
        self.c = self.c + len(chosen) / N * moved
        self.own[chosen] = new
        return np.mean(values)

    def check(self, state, own):
        """The same numbers, and c is the mean of the clients' ones."""
        close(as_vector(state.params), self.x)
        close(as_vector(state.control), self.c)
        close(self.c, self.own.mean(0))
        for found, expected in zip(stacked(own.control), self.own, strict=True):
            close(found, expected)


def stacked(control):
    """The clients' control variates as rows."""
    return np.concatenate([np.asarray(control["b"])[:, None], np.asarray(control["w"])], axis=1)


ALGORITHM = fg.scaffold(loss, ordered(RATE), SERVER_RATE)


def everybody(algorithm, params, n=N):
    one = algorithm.client_init(params, n)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *jnp.shape(leaf))), one)


MESH = fg.executors.mesh()
EXECUTORS = {
    "local": (fg.executors.local(), POPULATION),
    "reference": (fg.executors.reference(), POPULATION),
    "chunk2": (fg.executors.local(chunk=2), POPULATION),
    "mesh": (MESH, POPULATION),
    "mesh population": (MESH, MESH.population(CLIENTS)),
}


@pytest.mark.parametrize("executor, population", EXECUTORS.values(), ids=EXECUTORS)
@pytest.mark.parametrize("order", [{}, {"epochs": 2}, {"steps": 3}], ids=str)
def test_scaffold_is_the_published_one(executor, population, order):
    algorithm = fg.scaffold(loss, ordered(RATE, **order), SERVER_RATE).on(executor)
    params, expected = as_params(START), ByHand.first()
    state, own = algorithm.init(params), everybody(algorithm, params)
    for t, chosen in enumerate(COHORTS):
        index = np.array(chosen)
        mine = jax.tree.map(lambda leaf: leaf[index], own)
        cohort = population.select(chosen)
        state, metrics, mine = algorithm.round(
            state, algorithm.hyper, cohort, jax.random.key(t), mine
        )
        own = jax.tree.map(lambda a, new: a.at[index].set(jax.device_get(new)), own, mine)
        close(metrics.loss, expected.play(chosen, **order))
        expected.check(state, own)


def test_rates_by_layer_and_schedules():
    rates, decay = {"b": 0.5, "w": 0.25}, optax.linear_schedule(1.0, 0.4, 3)
    algorithm = fg.scaffold(loss, ordered(rates), decay)
    params, expected = as_params(START), ByHand.first()
    state, own = algorithm.init(params), everybody(algorithm, params)
    for t in range(3):
        state, _, own = algorithm.round(
            state, algorithm.hyper, POPULATION.everyone, jax.random.key(t), own
        )
        expected.play(np.arange(N), np.array([0.5, 0.25, 0.25]), float(decay(t)))
        expected.check(state, own)
    assert state.server.rounds == 3


@pytest.mark.parametrize("frozen", [{"b": 0.0, "w": 0.25}, optax.linear_schedule(0.0, 0.2, 2)])
def test_a_rate_of_zero_teaches_a_client_nothing(frozen):
    """(x - y) / (K lr) is not defined; c_i stays."""
    algorithm, params = fg.scaffold(loss, ordered(frozen)), as_params(START)
    state, own = algorithm.init(params), everybody(algorithm, params)
    for t in range(3):
        state, _, own = algorithm.round(
            state, algorithm.hyper, POPULATION.everyone, jax.random.key(t), own
        )
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, own)))
        stays = {"b": own.control["b"]} if isinstance(frozen, dict) else own.control
        if isinstance(frozen, dict) or t == 0:
            assert not any(np.any(x) for x in jax.tree.leaves(stays))
    assert np.any(own.control["w"])


# ---- the trainer keeps everybody's


def train(algorithm=ALGORITHM, clients=POPULATION, rounds=6, **options):
    return fg.fit(
        algorithm,
        clients,
        params=as_params(START),
        rounds=rounds,
        cohort_size=2,
        key=jax.random.key(3),
        progress=False,
        **options,
    )


def cohorts(rounds):
    """Whom `fit` asks."""
    return [POPULATION.indices(jax.random.key(3), 2, t + 1) for t in range(rounds)]


@pytest.mark.parametrize("where", ["local", "mesh", "mesh population"])
def test_fit_keeps_the_state_of_everybody(where):
    executor, population = EXECUTORS[where]
    result, expected = train(ALGORITHM.on(executor), population), ByHand.first()
    losses = [expected.play(chosen) for chosen in cohorts(6)]
    close(result.history["loss"], losses)
    expected.check(result.state.server, result.state.clients)
    close(as_vector(result.params), expected.x)


@pytest.fixture
def nodes():
    with fg.executors.flower(InProcess.of(CLIENTS), platforms=("cpu",)) as executor:
        yield executor


def test_on_nodes_it_stays_there(nodes):
    result, expected = train(ALGORITHM.on(nodes), nodes.population()), ByHand.first()
    losses = [expected.play(chosen) for chosen in cohorts(6)]
    close(result.history["loss"], losses)
    close(as_vector(result.params), expected.x)
    close(as_vector(result.state.server.control), expected.c)
    with pytest.raises(fg.FederatedError, match="do not leave"):
        np.asarray(result.state.clients.control["w"])


def test_an_interrupted_run_on_nodes_goes_on(nodes, tmp_path):
    algorithm, clients = ALGORITHM.on(nodes), nodes.population()
    train(algorithm, clients, rounds=3, out=tmp_path)
    gc.collect()
    nodes.federation.flush()
    found, expected = train(algorithm, clients, rounds=6, out=tmp_path), train(rounds=6)
    assert found.rounds == 6 and len(found.history["loss"]) == 6
    close(as_vector(found.params), as_vector(expected.params))
    close(as_vector(found.state.server.control), as_vector(expected.state.server.control))


def test_an_interrupted_run_goes_on_with_everybodys_state(tmp_path):
    train(rounds=3, out=tmp_path)
    found, expected = train(rounds=6, out=tmp_path), train(rounds=6)
    assert found.rounds == 6
    jax.tree.map(np.testing.assert_array_equal, found.state, expected.state)


@pytest.mark.parametrize("make", [fg.scaffold, fg.fed_dyn], ids=["scaffold", "fed_dyn"])
def test_of_a_big_state_there_are_few(make, monkeypatch, tmp_path):
    """Where the states of all clients are big, no more are held than a round needs; and what a
    callback holds stays what it is."""
    monkeypatch.setattr("fedgrad.training.loop.BYTES", 0)
    gc.collect()
    shape = (N, *as_params(START)["w"].shape)

    def alive():
        return {id(x) for x in jax.live_arrays() if x.shape == shape}

    before, most, held = alive(), [], []

    def watch(round, state, metrics):
        most.append(len(alive() - before))

    plain = train(make(loss), out=tmp_path, callbacks=[watch])
    assert most == [len([x for x in jax.tree.leaves(plain.state) if x.shape == shape])] * 6
    assert most[0] > 0
    train(make(loss), callbacks=[lambda round, state, metrics: held.append(state)])
    assert len(held) == 6 and all(np.all(np.isfinite(x)) for x in jax.tree.leaves(held))
    jax.tree.map(np.testing.assert_array_equal, held[-1], plain.state)


def test_rounds_are_compiled_once():
    traces = []

    def counted(params, batch):
        traces.append(None)
        return loss(params, batch)

    algorithm = fg.scaffold(counted, ordered(RATE))
    train(algorithm, rounds=1)
    once = len(traces)
    train(algorithm, rounds=5)
    assert len(traces) == once


@pytest.mark.parametrize("make", [fg.scaffold, fg.fed_dyn])
def test_a_state_stays_what_it_is(make):
    values = {"bfloat16": [0.25, -0.5], "float32": 0.1, "float64": [0.25, -0.5]}
    params = {dtype: jnp.asarray(x, dtype) for dtype, x in values.items()}

    @jax.numpy_dtype_promotion("standard")
    def of_all_dtypes(params, batch):
        return loss({"w": params["bfloat16"] + params["float64"], "b": params["float32"]}, batch)

    algorithm = make(of_all_dtypes)
    state, own = algorithm.init(params), everybody(algorithm, params, 2)
    cohort = POPULATION.select([0, 1])
    new, _, kept = jax.eval_shape(
        algorithm.round, state, algorithm.hyper, cohort, jax.random.key(0), own
    )
    assert jax.tree.map(jnp.result_type, (new, kept)) == jax.tree.map(jnp.result_type, (state, own))


@pytest.mark.promotes("dtype")
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("make", [fg.scaffold, fg.fed_dyn])
def test_the_servers_mean_is_that_of_all_clients(make, n, dtype):
    """However many they are (a third has no end in binary), and whatever the model is in."""
    population = fg.population(by_hand.make_clients([5] * n))
    algorithm = make(loss, ordered(RATE))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), as_params(START))
    state, own = algorithm.init(params), everybody(algorithm, params, n)
    for t in range(10):
        state, _, own = algorithm.round(
            state, algorithm.hyper, population.everyone, jax.random.key(t), own
        )
    mean, each = (getattr(x, "control", None) or x.gradient for x in (state, own))
    expected, exact = stacked(each).astype(float).mean(0), dtype == "float64"
    close(as_vector(mean), expected, rtol=1e-13 if exact else 1e-5, atol=1e-15 if exact else 1e-6)


def test_these_are_all_algorithms_whose_clients_keep_a_state():
    assert set(ALGORITHMS) - set(by_hand.STATELESS) == {"feddyn", "scaffold"}


# ---- FedDyn by hand: Acar et al. 2021, Algorithm 1, with local steps instead of a minimum


@dataclasses.dataclass
class FedDynByHand:
    """The server's θ and h, and ∇L_k of each client."""

    x: np.ndarray
    h: np.ndarray
    own: np.ndarray

    @classmethod
    def first(cls):
        return cls(START, np.zeros(3), np.zeros((N, 3)))

    def play(self, chosen, alpha=0.4, rate=RATE):
        """The round of these clients."""
        ends = []
        for i in chosen:
            y = self.x
            for batch in by_hand.batches(CLIENTS[i]):
                y = y - rate * (by_hand.slope(y, batch) - self.own[i] + alpha * (y - self.x))
            ends.append(y)
        ends = np.array(ends)
        self.own[chosen] -= alpha * (ends - self.x)
        self.h = self.h - alpha / N * np.sum(ends - self.x, axis=0)
        self.x = ends.mean(0) - (self.h / alpha if alpha else 0)

    def check(self, state, own):
        """The same numbers, and h is the mean of the clients' gradients."""
        close(as_vector(state.params), self.x)
        close(as_vector(state.gradient), self.h)
        close(self.h, self.own.mean(0))
        for found, expected in zip(stacked(own.gradient), self.own, strict=True):
            close(found, expected)


@pytest.mark.parametrize("name", ["local", "reference", "chunk2", "mesh population"])
def test_fed_dyn_is_the_published_one(name):
    executor, population = EXECUTORS[name]
    algorithm = fg.fed_dyn(loss, ordered(RATE), 0.4).on(executor)
    params, expected = as_params(START), FedDynByHand.first()
    state, own = algorithm.init(params), everybody(algorithm, params)
    for t, chosen in enumerate(COHORTS):
        index = np.array(chosen)
        mine = jax.tree.map(lambda leaf: leaf[index], own)
        cohort = population.select(chosen)
        state, _, mine = algorithm.round(state, algorithm.hyper, cohort, jax.random.key(t), mine)
        own = jax.tree.map(lambda a, new: a.at[index].set(jax.device_get(new)), own, mine)
        expected.play(chosen)
        expected.check(state, own)


def test_fed_dyn_trains_on_nodes(nodes):
    algorithm = fg.fed_dyn(loss, ordered(RATE), 0.4)
    result, expected = train(algorithm.on(nodes), nodes.population()), FedDynByHand.first()
    for chosen in cohorts(6):
        expected.play(chosen)
    close(as_vector(result.params), expected.x)
    close(as_vector(result.state.server.gradient), expected.h)


def test_fed_dyn_without_its_weight_is_fed_avg():
    dynamic = fg.fed_dyn(loss, ordered(RATE), optax.constant_schedule(0.0))
    plain = fg.fed_avg(loss, ordered(RATE), weighting="uniform")
    close(as_vector(train(dynamic).params), as_vector(train(plain).params))


def test_fed_dyn_sends_one_model_each_way():
    algorithm, params = fg.fed_dyn(loss), as_params(START)
    own = everybody(algorithm, params)
    args = algorithm.init(params), algorithm.hyper, POPULATION.everyone, jax.random.key(0), own
    (sent,) = fg.plan(algorithm.round, *args).traffic
    # Up: the model, the loss, and how many clients there are: in the round, and at all.
    assert sent.up == 3 + 3


# ---- mistakes


def forgetful():
    plain = fg.fed_avg(loss)

    @fg.program(cohort=fg.CLIENTS, client_state=fg.CLIENTS)
    def round(state, hyper, cohort, key, client_state):
        return plain.round(state, hyper, cohort, key)

    return dataclasses.replace(plain, round=round, client_init=lambda params, n: jnp.zeros(()))


def giving_back(first, after):
    """Clients keep `first`, and after a round `after` of it."""
    plain = fg.fed_avg(loss)

    @fg.program(cohort=fg.CLIENTS, client_state=fg.CLIENTS)
    def round(state, hyper, cohort, key, client_state):
        return *plain.round(state, hyper, cohort, key), after(client_state)

    return dataclasses.replace(plain, round=round, client_init=lambda params, n: first)


MISTAKES = {
    "another dtype": (
        lambda: train(giving_back({"n": jnp.int32(0)}, lambda s: {"n": s["n"].astype(float)})),
        r"keep was int32\[\] each, and is float",
    ),
    "another shape": (  # as many clients as entries: it could be spread over them
        lambda: train(giving_back({"n": jnp.zeros(2)}, lambda s: {"n": jnp.sum(s["n"])})),
        r"keep was float\d\d\[2\] each, and is float\d\d\[\] after",
    ),
    "another structure": (
        lambda: train(giving_back({"n": jnp.zeros(2)}, lambda s: {"m": s["n"]})),
        "keep was .*'n'.* and is .*'m'",
    ),
    "tuned": (lambda: fg.self_tuning(ALGORITHM, "server"), "which self_tuning cannot"),
    "side by side": (lambda: fg.side_by_side(ALGORITHM), "which side_by_side cannot"),
    "momentum": (lambda: fg.scaffold(loss, optax.sgd(0.1)), "steps of plain SGD"),
    "adam": (
        lambda: fg.scaffold(loss, fg.optimizer(optax.adam, learning_rate=0.1)),
        "steps of plain SGD",
    ),
    "typo": (lambda: fg.scaffold(loss, weightin="uniform"), r"scaffold\(\).*'weighting'"),
    "forgotten": (lambda: train(forgetful()), r"gives \(state, metrics, client_state\)"),
}


@pytest.mark.parametrize("mistake, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(mistake, message):
    with pytest.raises(fg.ArgumentError, match=message) as raised:
        mistake()
    assert str(raised.value).startswith(__file__), "it names the line of the user"
