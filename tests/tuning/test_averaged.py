"""The average of late models: the formula, whatever the algorithm, and free."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from by_hand import POPULATION, START, STATELESS, as_params, as_vector, loss
from laws import every_executor

KEY = jax.random.key(0)
AVGM = fg.fed_avgm(loss, fg.local_training(0.3, batch_size=10), 0.7, 0.8)


def models(algorithm, rounds):
    """The model after each round."""
    state, found = algorithm.init(as_params(START)), []
    for t in range(rounds):
        cohort = POPULATION.sample(KEY, 3, round=t + 1)
        state, _ = algorithm.round(state, algorithm.hyper, cohort, jax.random.key(t))
        found.append(as_vector(state.params))
    return state, np.array(found)


def polynomial(values, power):
    """Shamir and Zhang (2013), from the recursion."""
    mean = np.zeros_like(values[0])
    for t, value in enumerate(values):
        mean = (1 - (power + 1) / (t + power + 1)) * mean + (power + 1) / (t + power + 1) * value
    return mean


@pytest.mark.parametrize("power", [0, 3, 8.0])
@pytest.mark.parametrize("name", STATELESS)
def test_the_average_is_that_of_the_formula_and_training_does_not_change(name, power):
    algorithm = STATELESS[name](loss)
    _, values = models(algorithm, 5)
    state, _ = models(fg.averaged(algorithm, power), 5)
    np.testing.assert_allclose(as_vector(state.last), values[-1], rtol=1e-12)
    np.testing.assert_allclose(as_vector(state.params), polynomial(values, power), rtol=1e-9)
    if power == 0:
        np.testing.assert_allclose(as_vector(state.params), values.mean(0), rtol=1e-9)


@every_executor
def test_on_every_executor(executor):
    there, _ = models(fg.averaged(AVGM).on(executor), 3)
    here, _ = models(fg.averaged(AVGM), 3)
    np.testing.assert_allclose(as_vector(there.params), as_vector(here.params), rtol=1e-9)


def test_nothing_more_is_sent():
    cohort = POPULATION.everyone
    plans = [
        fg.plan(a.round, a.init(as_params(START)), a.hyper, cohort, KEY).bytes
        for a in (AVGM, fg.averaged(AVGM))
    ]
    assert plans[0] == plans[1]


def test_fit_gives_the_average_and_the_last_model_and_resumes_both(tmp_path):
    def train(algorithm, rounds, out=None):
        return fg.fit(
            algorithm,
            POPULATION,
            params=as_params(START),
            rounds=rounds,
            cohort_size=3,
            key=KEY,
            out=out,
            progress=False,
        )

    plain, whole = train(AVGM, 6), train(fg.averaged(AVGM), 6)
    np.testing.assert_array_equal(as_vector(whole.last), as_vector(plain.params))
    np.testing.assert_array_equal(as_vector(plain.last), as_vector(plain.params))
    assert not np.allclose(as_vector(whole.params), as_vector(whole.last))
    train(fg.averaged(AVGM), 2, tmp_path)
    again = train(fg.averaged(AVGM), 6, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)


def test_around_an_algorithm_with_client_state_and_side_by_side():
    scaffold = fg.averaged(fg.scaffold(loss, fg.local_training(0.1, batch_size=10)))
    settings = {"params": as_params(START), "rounds": 3, "cohort_size": 3, "key": KEY}
    result = fg.fit(scaffold, POPULATION, progress=False, **settings)
    assert not np.allclose(as_vector(result.params), as_vector(result.last))
    rates = np.array([0.5, 1.0])
    many = fg.side_by_side(
        fg.averaged(AVGM), fg.hyper.replace(AVGM.hyper, {"server.learning_rate": rates})
    )
    together = fg.fit(many, POPULATION, progress=False, **settings)
    for i, rate in enumerate(rates):
        one = fg.averaged(AVGM.starting({"server.learning_rate": float(rate)}))
        alone = fg.fit(one, POPULATION, progress=False, **settings)
        for name in "bw":
            np.testing.assert_allclose(together.params[name][i], alone.params[name], rtol=1e-9)


def test_a_power_is_a_number():
    with pytest.raises(fg.FederatedError, match="at least 0"):
        fg.averaged(AVGM, -1)
    with pytest.raises(fg.FederatedError, match="no algorithm"):
        fg.averaged(3)
    with pytest.raises(fg.FederatedError, match="power"):
        fg.averaged(AVGM, powr=2)


def test_narrow_models_are_averaged_in_wide_numbers():
    """In bfloat16 a small share of a small difference would be lost."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), as_params(START))
    state = fg.averaged(AVGM, 0).init(narrow)
    found = []
    algorithm = fg.averaged(AVGM, 0)
    for t in range(30):
        cohort = POPULATION.sample(KEY, 3, round=t + 1)
        state, _ = algorithm.round(state, algorithm.hyper, cohort, jax.random.key(t))
        found.append(as_vector(state.last))
    assert state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(as_vector(state.average), np.mean(found, 0), rtol=2e-3)
