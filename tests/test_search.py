"""Random search and successive halving against trials that are run one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg

PARAMS = {"w": jnp.zeros(3)}
KEY = jax.random.key(3)
SPACE = {"server.learning_rate": fg.log_uniform(1e-3, 3.0), "server.momentum": fg.uniform(0, 0.9)}


@jax.numpy_dtype_promotion("standard")  # the data is float32, the model float64
def loss(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


@pytest.fixture(scope="module")
def population():
    rng = np.random.default_rng(0)
    truth = np.array([1.0, -2.0, 0.5])
    sizes = rng.integers(3, 20, 12)
    xs = [rng.normal(size=(n, 3)).astype(np.float32) for n in sizes]
    return fg.population([{"x": x, "y": (x @ truth).astype(np.float32)} for x in xs])


@pytest.fixture(scope="module")
def setting(population):
    algorithm = fg.fed_avgm(loss, fg.local_training(0.05, batch_size=5))
    options = {"params": PARAMS, "cohort_size": 4, "key": KEY, "progress": False}
    return algorithm, options, fg.Evaluation({"loss": loss}, population)


def alone(setting, population, found, trial, rounds):
    """The score of one trial that is trained by itself."""
    algorithm, options, evaluate = setting
    started = algorithm.starting({n: v[trial] for n, v in found.tried.items()})
    result = fg.fit(started, population, rounds=rounds, **options)
    return float(evaluate(result.params)["loss"])


def test_random_search_is_trials_one_by_one(setting, population):
    algorithm, options, evaluate = setting
    found = fg.random_search(
        algorithm, population, SPACE, trials=9, rounds=4, evaluate=evaluate, **options
    )
    expected = [alone(setting, population, found, i, 4) for i in range(9)]
    np.testing.assert_allclose(found.scores, expected, rtol=1e-5)
    assert found.best == int(np.argmin(expected))
    np.testing.assert_allclose(float(evaluate(found.params)["loss"]), found.score, rtol=1e-5)
    assert found.rounds.tolist() == [4] * 9
    rates = found.tried["server.learning_rate"]
    assert found.hyper["server"]["learning_rate"] == pytest.approx(rates[found.best])
    assert len(set(rates.tolist())) == 9 and np.all((rates > 1e-3) & (rates < 3))


def test_a_second_search_traces_nothing(setting, population):
    _, options, evaluate = setting
    calls = []

    def counted(params, batch):
        calls.append(None)
        return loss(params, batch)

    algorithm = fg.fed_sgd(counted)
    space = {"server.learning_rate": fg.uniform(0, 1)}
    found = []
    for key in (0, 1):
        settings = {**options, "key": jax.random.key(key), "rounds": 2, "evaluate": evaluate}
        fg.random_search(algorithm, population, space, trials=3, **settings)
        found.append(len(calls))
    assert found[0] == found[1] > 0


def test_halving_keeps_the_best_third(setting, population):
    algorithm, options, evaluate = setting
    halving = fg.Trials(9, rungs=3, keep=1 / 3)
    found = fg.random_search(
        algorithm, population, SPACE, trials=halving, rounds=9, evaluate=evaluate, **options
    )
    assert sorted(found.rounds.tolist()) == [1] * 6 + [3] * 2 + [9]
    first = np.array([alone(setting, population, found, i, 1) for i in range(9)])
    assert set(np.argsort(first)[:3]) == set(np.flatnonzero(found.rounds > 1))
    assert found.rounds[found.best] == 9
    expected = alone(setting, population, found, found.best, 9)
    np.testing.assert_allclose(found.score, expected, rtol=1e-5)


def test_what_diverges_is_never_the_best(setting, population):
    algorithm, options, evaluate = setting
    space = {"server.learning_rate": lambda key, n: jnp.array([1e200, 0.5, 1e200])}
    for maximize in (False, True):
        found = fg.random_search(
            algorithm,
            population,
            space,
            trials=fg.Trials(3, maximize=maximize),
            rounds=3,
            evaluate=evaluate,
            **options,
        )
        assert found.best == 1 and not np.isfinite(found.scores[[0, 2]]).any()


def test_groups_that_fit_into_memory(setting, population, monkeypatch):
    algorithm, options, evaluate = setting
    kinds = dict(trials=3, rounds=3, evaluate=lambda p: {"loss": jnp.sum(p["w"])}, **options)
    together = fg.random_search(algorithm, population, SPACE, **kinds)
    monkeypatch.setattr("fedgrad.training.search.TOGETHER", 60)  # two trials of 24 bytes
    grouped = fg.random_search(algorithm, population, SPACE, **kinds)
    np.testing.assert_allclose(grouped.scores, together.scores, rtol=1e-6)


def test_a_self_tuned_algorithm_is_searched_too(setting, population):
    algorithm, options, evaluate = setting
    tuned = fg.self_tuning(algorithm, ["server.momentum"])
    found = fg.random_search(
        tuned, population, SPACE, trials=2, rounds=2, evaluate=evaluate, **options
    )
    assert np.isfinite(found.scores).all()


@pytest.mark.parametrize(
    "change, says",
    [
        ({"space": {"server.rate": fg.uniform(0, 1)}}, "There is no hyperparameter 'server.rate'"),
        ({"space": {}}, "something to try"),
        (
            {"algorithm": fg.fed_avgm(loss, lambda round: 0.1 / (1 + round))}
            | {"space": {"client.learning_rate": fg.uniform(0, 1)}},
            "'client.learning_rate' is a schedule.*cannot be drawn",
        ),
        ({"space": {"server.learning_rate": (0, 1)}}, "give a range, such as"),
        ({"key": 0}, "key= takes a key of JAX"),
        ({"trials": 0}, "trials=0: give a whole number"),
        ({"trials": fg.Trials(2, "los")}, "Did you mean 'loss'"),
    ],
)
def test_errors(setting, population, change, says):
    algorithm, options, evaluate = setting
    kinds = {"space": SPACE, "trials": 2, "rounds": 1, "evaluate": evaluate, **options, **change}
    with pytest.raises(fg.ArgumentError, match=says):
        fg.random_search(kinds.pop("algorithm", algorithm), population, **kinds)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"rungs": 0}, "rungs=0: give a whole number"),
        ({"rungs": 3, "keep": 1.0}, "keep a part between 0 and 1"),
        ({"keep": 0.5}, "at each of several rungs"),
    ],
)
def test_trials_that_make_no_sense(options, says):
    with pytest.raises(fg.ArgumentError, match=says):
        fg.Trials(9, **options)


def test_ranges():
    with pytest.raises(fg.ArgumentError, match="smaller one first"):
        fg.uniform(2, 1)
    with pytest.raises(fg.ArgumentError, match="positive"):
        fg.log_uniform(-1, 1)
    values = np.asarray(fg.log_uniform(1e-3, 10)(KEY, 20_000))
    assert np.median(values) == pytest.approx(0.1, rel=0.05)
