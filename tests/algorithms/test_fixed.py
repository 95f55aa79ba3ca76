"""Arrays that a loss reads and nobody trains: `fg.with_fixed`, with every algorithm, everywhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedgrad as fg
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.federation import InProcess

FEATURES, HIDDEN = 40, 30  # more numbers than what a program may hold unseen
rng = np.random.default_rng(0)
BACKBONE = {"in": rng.normal(size=(FEATURES, HIDDEN)) / 6, "shift": rng.normal(size=HIDDEN)}
CLIENTS = [
    {"x": rng.normal(size=(n, FEATURES)), "y": rng.choice([-1.0, 1.0], n)} for n in (9, 4, 13, 6)
]
POPULATION = fg.population(CLIENTS)
PARAMS = {"w": jnp.asarray(rng.normal(size=HIDDEN) / 6), "b": jnp.zeros(())}
KEY = jax.random.key(0)
close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)


def loss(params, batch, fixed):
    hidden = jnp.tanh(batch["x"] @ fixed["in"] + fixed["shift"][None])
    return jax.nn.softplus(-batch["y"] * (hidden @ params["w"] + params["b"]))


def right(params, batch, fixed):
    hidden = jnp.tanh(batch["x"] @ fixed["in"] + fixed["shift"][None])
    return (batch["y"] * (hidden @ params["w"] + params["b"]) > 0).astype(float)


FIXED = fg.with_fixed(loss, BACKBONE)


# ---- the same without: clients hold what the backbone makes of their examples

HEADED = fg.population(
    [{"x": np.tanh(c["x"] @ BACKBONE["in"] + BACKBONE["shift"]), "y": c["y"]} for c in CLIENTS]
)


def head(params, batch):
    return jax.nn.softplus(-batch["y"] * (batch["x"] @ params["w"] + params["b"]))


def train(algorithm, clients, **options):
    return fg.fit(
        algorithm,
        clients,
        params=PARAMS,
        rounds=4,
        cohort_size=3,
        key=KEY,
        progress=False,
        **options,
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_as_if_the_data_were_so(name):
    found = train(ALGORITHMS[name](FIXED), POPULATION)
    expected = train(ALGORITHMS[name](head), HEADED)
    jax.tree.map(functools.partial(close, rtol=1e-6), found.params, expected.params)
    assert jax.tree.structure(found.params) == jax.tree.structure(PARAMS), "no more is trained"


AROUND = {
    "serial": lambda made: fg.self_tuning(made, ["server", "client"], schedule="serial"),
    "parallel": lambda made: fg.self_tuning(made, ["server", "client"]),
    "far": lambda made: fg.self_tuning(made, "client", horizon=3),
    "its own rates": lambda made: fg.self_tuning(made),
    "averaged": fg.averaged,
    "held out": fg.holding_out,
    "side by side": lambda made: fg.side_by_side(
        made, fg.hyper.replace(made.hyper, {"client.learning_rate": jnp.array([0.1, 0.2])})
    ),
    "race": lambda made: fg.race({"a": made, "b": made.starting({"server.momentum": 0.1})}),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_what_is_around_an_algorithm_takes_it(around):
    found = train(around(fg.fed_avgm(FIXED, momentum=0.5)), POPULATION)
    expected = train(around(fg.fed_avgm(head, momentum=0.5)), HEADED)
    jax.tree.map(functools.partial(close, rtol=1e-6), found.params, expected.params)


EXECUTORS = {
    "reference": fg.executors.reference(),
    "chunked": fg.executors.local(chunk=2),
    "mesh": fg.executors.mesh(),
}


@pytest.mark.parametrize("executor", EXECUTORS.values(), ids=EXECUTORS)
def test_everywhere(executor):
    algorithm = fg.fed_avgm(FIXED)
    evaluation = fg.Evaluation({"loss": FIXED, "right": fg.with_fixed(right, BACKBONE)}, POPULATION)
    found = train(algorithm.on(executor), POPULATION, evaluate=evaluation)
    expected = train(fg.fed_avgm(head), HEADED, evaluate=fg.Evaluation({"loss": head}, HEADED))
    jax.tree.map(close, found.params, expected.params)
    close(found.history["eval.loss"][-1], expected.history["eval.loss"][-1])
    assert 0 < found.history["eval.right"][-1] < 1


def test_on_nodes():
    with fg.executors.flower(InProcess.of(CLIENTS), platforms=("cpu",)) as nodes:
        clients = nodes.population()
        evaluation = fg.Evaluation({"loss": FIXED}, clients, batch_size=5)
        found = train(fg.fed_avgm(FIXED).on(nodes), clients, evaluate=evaluation)
    expected = train(fg.fed_avgm(head), HEADED, evaluate=fg.Evaluation({"loss": head}, HEADED))
    jax.tree.map(close, found.params, expected.params)
    close(found.history["eval.loss"][-1], expected.history["eval.loss"][-1])


# ---- what travels


def planned(loss, clients):
    algorithm = fg.fed_avg(loss)
    args = algorithm.init(PARAMS), algorithm.hyper, clients.everyone, KEY
    return fg.plan(algorithm.round, *args)


def test_a_plan_shows_that_it_is_sent_in_every_round_and_does_not_come_back():
    (found,), (plain,) = planned(FIXED, POPULATION).traffic, planned(head, HEADED).traffic
    # What is small is a constant of the program, like a number that is written in it.
    assert found.down - plain.down == FEATURES * HIDDEN
    assert found.up == plain.up


def test_a_random_loss_keeps_its_key():
    def noisy(params, batch, fixed, key):
        return loss(params, batch, fixed) * (1 + 0.1 * jax.random.normal(key, batch["y"].shape))

    algorithm = fg.fed_avg(fg.with_fixed(noisy, BACKBONE))
    cohort, state = POPULATION.everyone, algorithm.init(PARAMS)
    losses = [
        algorithm.round(state, algorithm.hyper, cohort, jax.random.key(i))[1].loss
        for i in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_values_of_the_server_can_be_fixed_for_a_round():
    """The statistics of a normalization, say: fixed while clients train, and new in every round."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Normalized:
        inner: object
        statistics: object

        @property
        def params(self):
            return self.inner.params

    def normalized(params, batch, fixed):
        x = (batch["x"] - fixed["mean"][None]) / jnp.sqrt(fixed["variance"] + 1e-5)[None]
        return head(params, {**batch, "x": x})

    def inner(statistics):
        return fg.fed_avg(fg.with_fixed(normalized, statistics))

    one = {"mean": jnp.zeros(HIDDEN), "variance": jnp.ones(HIDDEN)}

    def init(params, hyper):
        return Normalized(inner(one).init(params, hyper), one)

    @fg.program(cohort=fg.CLIENTS)
    def round(state, hyper, cohort, key):
        new, metrics = inner(state.statistics).round(state.inner, hyper, cohort, key)
        batch, mask = cohort.batch(0, cohort.capacity)
        x = jnp.where(mask[:, None], batch["x"], 0)
        total = fg.sum({"x": x.sum(0), "square": (x**2).sum(0), "count": cohort.count})
        mean = total["x"] / total["count"].astype(float)
        variance = total["square"] / total["count"].astype(float) - mean**2
        return Normalized(new, {"mean": mean, "variance": variance}), metrics

    algorithm = fg.Algorithm(init, round, inner(one).hyper, normalized)
    state = algorithm.init(PARAMS)
    state, _ = algorithm.round(state, algorithm.hyper, HEADED.everyone, KEY)
    everything = np.concatenate(
        [np.tanh(c["x"] @ BACKBONE["in"] + BACKBONE["shift"]) for c in CLIENTS]
    )
    close(state.statistics["mean"], everything.mean(0))
    close(state.statistics["variance"], everything.var(0))
    second, _ = algorithm.round(state, algorithm.hyper, HEADED.everyone, KEY)
    scaled = fg.population(
        [
            {
                "x": (np.tanh(c["x"] @ BACKBONE["in"] + BACKBONE["shift"]) - everything.mean(0))
                / np.sqrt(everything.var(0) + 1e-5),
                "y": c["y"],
            }
            for c in CLIENTS
        ]
    )
    plain = fg.fed_avg(head)
    expected, _ = plain.round(plain.init(state.params), plain.hyper, scaled.everyone, KEY)
    jax.tree.map(close, second.params, expected.params)


# ---- mistakes


def test_it_is_not_differentiated():
    slope = jax.grad(lambda w: fg.with_fixed(lambda p, b, fixed: fixed, w)(None, None))(2.0)
    assert slope == 0


MISTAKES = {
    "no argument": (
        lambda: fg.with_fixed(head, BACKBONE),
        r"head\(params, batch\) has no argument `fixed`. Write def head\(params, batch, fixed\)",
    ),
    "text": (lambda: fg.with_fixed(loss, {"in": "w"}), "takes arrays, found str"),
}


@pytest.mark.parametrize("mistake, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(mistake, message):
    with pytest.raises(fg.ArgumentError, match=message) as raised:
        mistake()
    assert str(raised.value).startswith(__file__)


def test_a_captured_array_is_answered_with_it():
    def captured(params, batch):
        return loss(params, batch, jax.tree.map(jnp.asarray, BACKBONE))

    algorithm = fg.fed_avg(captured)
    with pytest.raises(fg.PlacementError, match=r"fg\.with_fixed\(loss, it\)"):
        algorithm.round(algorithm.init(PARAMS), algorithm.hyper, POPULATION.everyone, KEY)


def test_where_it_meets_the_model_is_said_in_words():
    """And not that it is the result of a primitive of ours, somewhere in a library."""
    wide = jnp.ones((40, 40))

    def captured(params, batch):
        return jnp.sum(wide @ params) * batch["y"]

    algorithm = fg.fed_avg(captured)
    with pytest.raises(fg.PlacementError, match=r"with what the algorithm sends, which is at cl"):
        algorithm.round(algorithm.init(jnp.ones(40)), algorithm.hyper, POPULATION.everyone, KEY)


def test_a_server_optimizer_sees_only_what_is_trained():
    algorithm = fg.fed_opt(FIXED, server=optax.adam(0.1), client=0.1)
    sizes = {np.size(leaf) for leaf in jax.tree.leaves(algorithm.init(PARAMS))}
    assert max(sizes) == HIDDEN
