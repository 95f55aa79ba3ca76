"""Training that needs no hyperparameter, and algorithms that find their own rates."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

import fedgrad as fg
from by_hand import CLIENTS, POPULATION, START, as_params, as_vector, loss
from fedgrad.tuning.rate_search import GIVEN, RATES

KEY = jax.random.key(0)


def train(algorithm, rounds=24, clients=POPULATION, **more):
    settings = {"params": as_params(START), "cohort_size": 4, "key": KEY, "progress": False}
    return fg.fit(algorithm, clients, rounds=rounds, **(settings | more))


AUTO = fg.fed_auto(loss, batch_size=10)


def test_nothing_has_to_be_said_and_it_learns():
    result = train(fg.fed_auto(loss), rounds=60)
    evaluation = fg.Evaluation({"loss": loss}, POPULATION)
    assert evaluation(result.params)["loss"] < 0.9 * evaluation(as_params(START))["loss"]
    assert len(result.state.candidates) == 1


def test_three_race_for_a_quarter_and_at_least_thirty_rounds():
    for rounds, until in ((40, 30), (160, 40)):
        seen = train(AUTO, rounds=rounds, callbacks=[lambda r, *_, u=until: r == u + 1])
        assert [seen.history.rounds(f"race.rank.{n}")[-1] for n in AUTO.hyper] == 3 * [until]
        (winner,) = seen.state.candidates
        assert [*seen.history.rounds(f"race.won.{winner}")] == [until + 1]


def test_it_sends_less_than_twice_what_one_training_does():
    shown = fg.explain(AUTO, as_params(START), POPULATION.everyone, rounds=200)
    assert [(p.first, p.last) for p in shown.phases] == [(1, 50), (51, 200)]
    assert [len(p.candidates) for p in shown.phases] == [3, 1]
    big = {"b": np.zeros(()), "w": np.zeros(1000)}
    clients = fg.population([{"x": np.zeros((3, 1000)), "y": np.ones(3)}])
    shown = fg.explain(AUTO, big, clients.everyone, rounds=200)
    # Three for a quarter, and while they race their averages, too.
    assert shown.times == pytest.approx(0.25 * 3 * 1.5 + 0.75, rel=0.01)


@pytest.mark.parametrize("stop", [1, 12, 31])
def test_resumes_bit_by_bit(tmp_path, stop):
    whole = train(AUTO, rounds=36)
    train(AUTO, rounds=36, out=tmp_path, callbacks=[lambda round, *_: round == stop])
    again = train(AUTO, rounds=36, out=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)


def test_rates_are_not_asked_for():
    with pytest.raises(fg.FederatedError, match="needs no rates"):
        fg.fed_auto(loss, client_learning_rate=0.1)
    with pytest.raises(fg.FederatedError, match=r"argument 'learning_rate'\. It is found out"):
        fg.fed_auto(loss, learning_rate=0.1)
    with pytest.raises(fg.FederatedError, match="batch_size"):
        fg.fed_auto(loss, batchsize=3)
    with pytest.raises(fg.FederatedError, match="give one of them"):
        fg.fed_auto(loss, epochs=2, steps=3)


# ---- self_tuning(algorithm)

BAD = fg.fed_avgm(loss, fg.local_training(1e-3, batch_size=10), 1e-3, 0.5)


def test_a_bad_start_is_left():
    result = train(fg.self_tuning(BAD), rounds=60)
    (winner,) = result.state.rates
    assert winner != GIVEN and [*result.state.parts] == ["alone"]
    assert result.hyper["client"]["learning_rate"] in [pytest.approx(r["client"]) for r in RATES]
    assert result.hyper["server"]["momentum"] == 0.5
    evaluation = fg.Evaluation({"loss": loss}, POPULATION)
    fixed = train(BAD, rounds=60)
    assert evaluation(result.params)["loss"] < evaluation(fixed.params)["loss"]


def test_a_race_then_a_duel_with_hypergradients_then_alone():
    tuned = fg.self_tuning(BAD)
    result = train(tuned, rounds=40)
    history, (winner,) = result.history, result.state.rates
    assert history.rounds(f"race.rank.{GIVEN}")[-1] == 14  # it stays until the last cut
    assert [*history.rounds(f"race.rank.{winner}.follows")] == [*range(15, 19)]
    assert [*history.rounds(f"race.rank.{winner}.stays")] == [*range(15, 19)]
    shown = fg.explain(tuned, as_params(START), POPULATION.everyone, rounds=40)
    assert [(p.first, p.last, len(p.candidates)) for p in shown.phases] == [
        (1, 2, 8),
        (3, 6, 4),
        (7, 14, 3),
        (15, 18, 2),
        (19, 40, 0),
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_where_nothing_is_better_training_is_as_if_nobody_had_raced(dtype):
    good = fg.fed_avgm(loss, fg.local_training(0.1, batch_size=10), 1.0, 0.9)
    clients = fg.population([{n: rows.astype(dtype) for n, rows in c.items()} for c in CLIENTS])
    params = jax.tree.map(lambda x: x.astype(dtype), as_params(START))
    tuned, fixed = (
        train(each, rounds=40, clients=clients, params=params)
        for each in (fg.self_tuning(good), fg.averaged(good))
    )
    assert [*tuned.state.rates] == [GIVEN]
    for ours, theirs in ((tuned.params, fixed.params), (tuned.last, fixed.last)):
        np.testing.assert_allclose(as_vector(ours), as_vector(theirs), rtol=1e-5)


STOPS = [1, 5, 6, 14, 16, 18, 30]


@pytest.fixture(scope="module")
def own_rates_run(tmp_path_factory):
    """One training that was never interrupted, and its folder as it was after each of `STOPS`."""
    tuned, path = fg.self_tuning(BAD), tmp_path_factory.mktemp("own_rates")

    def copy(round, *_):  # the checkpoint of the round before is the newest there is
        if round - 1 in STOPS:
            shutil.copytree(path / "run", path / str(round - 1))

    whole = train(tuned, rounds=40, out=fg.run_folder(path / "run", every=1), callbacks=[copy])
    return tuned, path, whole


@pytest.mark.parametrize("stop", STOPS)
def test_own_rates_resume_bit_by_bit(own_rates_run, stop):
    tuned, path, whole = own_rates_run
    assert fg.load(path / str(stop)).rounds == stop
    again = train(tuned, rounds=40, out=path / str(stop))
    jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)


def test_the_rate_that_hypergradients_found_is_used_if_they_won():
    """Whoever wins the duel, training goes on with the rate that it had."""
    tuned = fg.self_tuning(BAD.starting({"client.learning_rate": 0.03}))
    before = train(tuned, rounds=40, callbacks=[lambda round, *_: round == 18]).state
    after = tuned.before_round(before, 18, 40)
    (name,) = before.rates
    followed = before.parts["duel"].candidates["follows"]
    rate = float(after.rates[name]["server.learning_rate"])
    stays = float(before.rates[name]["server.learning_rate"])
    learned = float(np.exp(followed.learned["server.learning_rate"]))
    assert rate in (pytest.approx(stays), pytest.approx(learned)) and learned != stays
    expected = before.parts["duel"].candidates["stays"] if rate == stays else followed.inner
    jax.tree.map(np.testing.assert_array_equal, after.parts["alone"], expected)


def test_of_two_that_are_alike_the_given_one_stays():
    """What is as good as the start, but for chance, does not take its place."""
    race = fg.race(
        {"given": BAD, "same": BAD.starting({"client.learning_rate": 1.001e-3})},
        {0.5: 1},
        incumbent="given",
    )
    assert [*train(race, rounds=8).state.candidates] == ["given"]
    # Without an incumbent the better one is left, by however little.
    better = fg.race({"given": BAD, "same": BAD.starting({"client.learning_rate": 2e-3})}, {0.5: 1})
    assert [*train(better, rounds=8).state.candidates] == ["same"]


def test_where_it_starts_is_a_start_like_any_other():
    tuned = fg.self_tuning(BAD)
    assert tuned.hyper == BAD.hyper
    good = tuned.starting({"client.learning_rate": 0.3, "server.learning_rate": 0.7})
    assert good.round is tuned.round
    state = good.init(as_params(START))
    assert len(state.rates) == 8
    assert float(state.rates[GIVEN]["client.learning_rate"]) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "algorithm, candidates",
    [
        (fg.fed_prodigy(loss), 8),  # its server's rate is a number, too
        (fg.fed_exp(loss), 4),
        (fg.fed_sgd(loss), 4),
        (fg.fed_adam(loss), 8),
        (fg.fed_avg(loss, fg.local_training({"b": 0.1, "w": 0.2})), 8),
        (fg.fed_avg(loss, fg.local_training({"b": 0.0, "w": 0.2})), 8),
        (fg.fed_avg(loss, fg.local_training(0.0)), 8),
    ],
    ids=lambda x: getattr(getattr(x, "round", None), "name", ""),
)
def test_every_algorithm_races_the_rates_that_it_has(algorithm, candidates):
    state = fg.self_tuning(algorithm).init(as_params(START))
    assert len(state.rates) == len(state.parts["race"].candidates) == candidates


def test_what_cannot_be_raced_is_said():
    plain = fg.fed_opt(loss, server=optax.sgd(1.0), client=optax.sgd(0.1))
    with pytest.raises(fg.FederatedError, match="no learning rate that is a number"):
        fg.self_tuning(plain)
    with pytest.raises(fg.FederatedError, match="say what is to follow them"):
        fg.self_tuning(BAD, horizon=3)
    with pytest.raises(fg.FederatedError, match="keep a state"):
        fg.self_tuning(fg.scaffold(loss))


def test_a_schedule_is_not_taken_for_a_rate():
    decay = optax.exponential_decay(0.1, 10, 0.5)
    decaying = fg.fed_avg(loss, client=fg.local_training(decay))
    assert {*fg.self_tuning(decaying).init(as_params(START)).rates} == {
        *("as given", "server 1e-1", "server 1", "server 10")
    }
    scaled = replace(decaying, hyper=fg.hyper.scalable(decaying.hyper, "client.learning_rate"))
    with pytest.raises(
        fg.FederatedError, match=r"'client.learning_rate' is a schedule with a fact"
    ):
        fg.self_tuning(scaled)
    layer = fg.fed_avg(lambda p, b: loss(p["factor"], b), client={"factor": 0.1})
    assert "client 1e-1, server 1" in fg.self_tuning(layer).init({"factor": as_params(START)}).rates
    late = fg.self_tuning(BAD).starting({"client.learning_rate": decay})
    with pytest.raises(fg.FederatedError, match=r"starting\(\{'client.learning_rate': 0.1\}\)"):
        late.init(as_params(START))


def test_the_answer_is_finite_whatever_the_scale_of_features():
    for scale in (1e-3, 1e3):
        clients = fg.population(
            [
                {"x": scale * np.random.default_rng(i).normal(size=(9, 2)), "y": np.ones(9)}
                for i in range(4)
            ]
        )
        result = train(AUTO, clients=clients)
        assert np.isfinite(as_vector(result.params)).all()
