"""Trials side by side are the trials one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedgrad as fg
from by_hand import POPULATION, START, as_params, loss

EXECUTORS = {
    "local": fg.executors.local(),
    "reference": fg.executors.reference(),
    "chunk2": fg.executors.local(chunk=2),
}
ordered = functools.partial(fg.local_training, batch_size=10, shuffle=False)
ADAPTIVE = fg.fed_opt(
    loss,
    server=fg.optimizer(optax.adam, learning_rate=0.1, b1=0.9),
    client=ordered(0.3),
    weighting="power",
)
SGD = fg.fed_sgd(loss, batch_size=10)
AVGM = fg.fed_avgm(loss, ordered(0.3), 0.7, 0.8)
TABLE = {
    # algorithm, executor, what differs between the trials
    "plain": (
        ADAPTIVE,
        "local",
        {"server.b1": [0.5, 0.9, 0.0], "weight_exponent": [0.0, 1.0, -1.0]},
    ),
    "in chunks": (AVGM, "chunk2", {"client.learning_rate": [0.1, 0.5]}),
    "by definition": (SGD, "reference", {"server.learning_rate": [0.1, 0.5]}),
    "parallel": (
        fg.self_tuning(SGD, {"server": fg.log()}, optax.adam(0.05)),
        "local",
        {"server.learning_rate": [0.2, 1e30, 1.0]},
    ),
    "serial": (
        fg.self_tuning(AVGM, "server.momentum", schedule="serial", gradient_from="same"),
        "local",
        # One that is learned and one that is not.
        {"server.momentum": [0.5, 0.9], "client.learning_rate": [0.1, 0.5]},
    ),
}


def run(algorithm, executor, hyper):
    state, metrics = algorithm.init(as_params(START), hyper), []
    round = algorithm.round.on(EXECUTORS[executor])
    for t in range(2 if executor == "reference" else 4):
        key = jax.random.key(t)
        more = {name: POPULATION.sample(key, 2) for name in algorithm.cohorts}
        state, found = round(state, hyper, POPULATION.sample(key, 3), key, **more)
        metrics.append(found)
    return state, metrics


@pytest.mark.parametrize("algorithm, executor, values", TABLE.values(), ids=TABLE)
def test_trials_are_those_run_one_by_one(algorithm, executor, values):
    stacked = fg.hyper.replace(algorithm.hyper, {p: jnp.array(v) for p, v in values.items()})
    together = fg.side_by_side(algorithm, stacked)
    assert together.cohorts == algorithm.cohorts
    found = run(together, executor, stacked)
    for i in range(len(next(iter(values.values())))):
        hyper = fg.hyper.replace(algorithm.hyper, {path: v[i] for path, v in values.items()})
        alone = run(algorithm, executor, hyper)
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-9, atol=1e-12),
            found,
            alone,
        )
    if 1e30 in values.get("server.learning_rate", []):  # the guard is each trial's own
        assert found[0].rejected[0] == found[0].rejected[2] == 0 < found[0].rejected[1]


def test_defaults_and_program():
    """The stacked hyperparameters are the defaults; it is a program as any other."""
    stacked = fg.hyper.replace(AVGM.hyper, {"server.momentum": jnp.linspace(0, 0.9, 5)})
    together = fg.side_by_side(AVGM, stacked)
    state = together.init(as_params(START))
    assert state.params["w"].shape == (5, 2)
    arguments = POPULATION.select([0, 1]), jax.random.key(0)
    plan = fg.plan(together.round, state, together.hyper, *arguments)
    alone = fg.plan(AVGM.round, AVGM.init(as_params(START)), AVGM.hyper, *arguments)
    assert plan.rounds == alone.rounds == 1
    # Every trial sends its own model and update; what they share is sent once.
    n, (down, up) = 3, plan.scalars
    assert (down, up) == (5 * n + 1, 5 * n + 5 + 1)  # models, rate; updates, losses, weight
    assert alone.scalars == (n + 1, n + 2)


def test_trials_are_compiled_together_and_once():
    traces = []

    def counted(params, batch):
        traces.append(None)
        return loss(params, batch)

    algorithm = fg.fed_sgd(counted, batch_size=10)
    stacked = {"server": {"learning_rate": jnp.linspace(0.1, 1.0, 4)}, "client": {}}
    together = fg.side_by_side(algorithm, stacked)
    state = together.init(as_params(START))
    for t in range(3):
        key = jax.random.key(t)
        state, metrics = together.round(state, stacked, POPULATION.sample(key, 2), key)
        if t == 0:
            once = len(traces)
    assert len(traces) == once and metrics.loss.shape == (4,)


def by_entry(learning_rate, scale):
    scaled = optax.stateless(lambda updates, _: {"b": updates["b"], "w": updates["w"] * scale})
    return optax.chain(optax.sgd(learning_rate), scaled)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "values",
    [
        {"server.learning_rate": [0.5, 1.0]},  # as many trials as the vector has entries
        {"server.learning_rate": [0.5, 1.0, 2.0]},
        {"server.scale": [[1.0, 2.0], [0.5, 0.1]]},
        {"server.scale": [[1.0, 2.0]], "server.learning_rate": [0.5]},
    ],
)
def test_a_hyperparameter_that_is_a_vector_is_no_row_of_trials(values, executor):
    server = fg.optimizer(by_entry, learning_rate=1.0, scale=jnp.array([1.0, 0.1]))
    algorithm = fg.fed_opt(loss, server=server, client=ordered(0.3))
    stacked = fg.hyper.replace(algorithm.hyper, {p: jnp.array(v) for p, v in values.items()})
    found = run(fg.side_by_side(algorithm, stacked), executor, stacked)
    for i in range(len(next(iter(values.values())))):
        own = {path: jnp.array(v[i]) for path, v in values.items()}
        alone = run(algorithm, executor, fg.hyper.replace(algorithm.hyper, own))
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-9, atol=1e-12),
            found,
            alone,
        )


def test_without_hyperparameters_the_algorithms_own_are_those_of_the_trials():
    rates = {"server.learning_rate": jnp.array([0.5, 1.0, 2.0])}
    found = fg.side_by_side(AVGM.starting(rates)).init(as_params(START))
    assert found.params["b"].shape == (3,)


def test_mistakes():
    with pytest.raises(fg.ArgumentError, match="Stack at least one"):
        fg.side_by_side(AVGM).init(as_params(START))
    values = {"server.momentum": jnp.zeros(2), "server.learning_rate": jnp.ones(3)}
    with pytest.raises(fg.ArgumentError, match=r"lengths \[2, 3\]"):
        fg.side_by_side(AVGM, fg.hyper.replace(AVGM.hyper, values)).init(as_params(START))
