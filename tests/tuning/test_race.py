"""A race inside one training: candidates train as they would alone, and the best one is left."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import fedgrad as fg
from by_hand import CLIENTS, POPULATION, START, as_params, as_vector, loss
from fedgrad.federation import InProcess
from fedgrad.tuning.cuts import Cuts
from laws import every_executor

KEY = jax.random.key(0)
WORK = fg.local_training(0.3, batch_size=10)
AVGM = fg.fed_avgm(loss, WORK, 0.7, 0.8)
SLOW = AVGM.starting({"client.learning_rate": 1e-4})
WILD = AVGM.starting({"client.learning_rate": 1e6})
ADAM = fg.averaged(fg.fed_adam(loss, WORK, 0.05))
MIXED = {"good": AVGM, "slow": SLOW, "wild": WILD, "adam": ADAM}
RULE = fg.HeldOut()


def train(algorithm, rounds=12, clients=POPULATION, out=None, **more):
    settings = {"params": as_params(START), "cohort_size": 3, "key": KEY, "progress": False}
    return fg.fit(algorithm, clients, rounds=rounds, out=out, **(settings | more))


def play(algorithm, rounds, first=0, state=None):
    """Rounds by hand, without `fit`."""
    state = algorithm.init(as_params(START)) if state is None else state
    for t in range(first, first + rounds):
        if algorithm.before_round is not None:
            state = algorithm.before_round(state, t, 100)
        cohort = POPULATION.sample(KEY, 3, round=t + 1)
        state, metrics = algorithm.round(state, algorithm.hyper, cohort, jax.random.key(t))
    return state, metrics


@every_executor
@pytest.mark.parametrize("held_out", [RULE, None], ids=["held out", "all"])
def test_candidates_train_as_they_would_alone(executor, held_out):
    race = fg.race(MIXED, held_out=held_out).on(executor)
    state, metrics = play(race, 2)
    before, _ = play(race, 1)
    for name, one in MIXED.items():
        alone = (fg.holding_out(one, held_out) if held_out else one).on(executor)
        expected, _ = play(alone, 2)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
            state.candidates[name],
            expected,
        )
        # The judge's loss is of the model that the round began with, on the same clients.
        judged = fg.Evaluation(
            {"loss": loss}, POPULATION.sample(KEY, 3, round=2), held_out=held_out
        )
        value = judged(before.candidates[name].params)["loss"]
        np.testing.assert_allclose(metrics.extra[f"race.loss.{name}"], value, rtol=1e-6)


def test_computed_together_or_one_after_another_is_the_same(monkeypatch):
    from fedgrad.tuning import race_rounds as module

    together = play(fg.race({"a": AVGM, "b": SLOW}), 3)
    monkeypatch.setattr(module, "TOGETHER", 0)
    apart = play(fg.race({"a": AVGM, "b": SLOW}), 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), together, apart)


def test_the_best_is_left_and_goes_on_with_all_examples():
    result = train(fg.race(MIXED, {0.25: 2, 0.5: 1}))
    (winner,) = result.state.candidates
    assert winner in ("good", "adam")
    rounds = {n: result.history.rounds(f"race.loss.{n}")[-1] for n in MIXED}
    assert sorted(rounds.values()) == [3, 3, 6, 6] and rounds[winner] == 6
    assert rounds["wild"] == 3
    assert np.isfinite(as_vector(result.params)).all()
    # What it does after the race is what it would do from there, alone.
    half = train(fg.race(MIXED, {0.25: 2, 0.5: 1}), callbacks=[lambda r, *_: r == 6])
    state = half.state.candidates[winner]
    for t in range(7, 13):
        cohort = POPULATION.sample(KEY, 3, round=t)
        state, _ = MIXED[winner].round(state, MIXED[winner].hyper, cohort, round_key(t))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9),
        result.state.candidates[winner],
        state,
    )


def round_key(t):
    from fedgrad.clients.sampling import round_keys

    return round_keys(KEY, None)(t)


def test_judged_in_the_second_half_of_a_stage():
    """A candidate that was bad at first, and is good when it counts."""

    def late(rate_then):
        schedule = optax.piecewise_constant_schedule(1e-6, {3: 0.3 / 1e-6}) if rate_then else 0.02
        return fg.fed_avg(loss, fg.local_training(schedule, batch_size=10))

    result = train(fg.race({"steady": late(False), "late": late(True)}, {1.0: 1}), rounds=30)
    judged = {n: result.history[f"race.rank.{n}"] for n in ("steady", "late")}
    assert judged["late"][:4].mean() > judged["steady"][:4].mean()
    state = result.state
    expected = min(judged, key=lambda n: judged[n][15:].mean())
    np.testing.assert_allclose(
        as_vector(state.params), as_vector(state.candidates[expected].params)
    )
    for name, values in judged.items():
        np.testing.assert_allclose(state.scores[name], values[15:].sum(), rtol=1e-5)


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 6, 7, 11])
def test_resumes_bit_by_bit_in_the_middle(tmp_path, stop):
    race = fg.race(MIXED, {0.25: 3, 0.5: 1})
    whole = train(race)
    train(race, out=tmp_path, callbacks=[lambda round, *_: round == stop])
    again = train(race, out=tmp_path)
    assert jax.tree.structure(again.state) == jax.tree.structure(whole.state)
    jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)
    for name in whole.history:
        if name != "seconds":
            np.testing.assert_array_equal(again.history[name], whole.history[name])
            np.testing.assert_array_equal(again.history.rounds(name), whole.history.rounds(name))


@pytest.mark.parametrize("stop", [2, 12])
def test_an_extended_run_keeps_to_its_plan(tmp_path, stop):
    race = fg.race(MIXED, {0.25: 3, 0.5: 1})
    short = train(race, rounds=12)
    train(race, rounds=12, out=tmp_path, callbacks=[lambda round, *_: round == stop])
    longer = train(race, rounds=20, out=tmp_path)
    assert longer.rounds == 20 and [*longer.state.candidates] == [*short.state.candidates]
    for name in (f"race.loss.{n}" for n in MIXED):
        np.testing.assert_array_equal(longer.history[name], short.history[name])
    again = train(race, rounds=22, out=tmp_path)  # and once more
    assert again.rounds == 22


def test_a_race_of_races():
    rates = (1e-4, 0.3, 1e5)
    family = fg.race(
        {f"rate {i}": AVGM.starting({"client.learning_rate": r}) for i, r in enumerate(rates)},
        {0.25: 1},
    )
    result = train(fg.race({"avgm": family, "adam": ADAM}, {0.5: 1}), rounds=16)
    assert result.history.rounds("race.rank.avgm.rate 0")[-1] == 4
    assert result.history.rounds("race.loss.avgm")[-1] == 8
    assert len(result.state.candidates) == 1
    assert np.isfinite(as_vector(result.params)).all()
    assert sorted(result.history.rounds("race.won.avgm.rate 1")) == [
        *range(5, 9 if "adam" in result.state.candidates else 17)
    ]


def test_a_race_that_goes_on_in_the_winner_keeps_its_name():
    family = fg.race({"rate 0": SLOW, "rate 1": AVGM}, {0.75: 1})
    history = train(fg.race({"avgm": family, "slow": SLOW}, {0.25: 1}), rounds=16).history
    assert {n.split(".", 2)[2] for n in history if n.startswith("race.rank.")} == {
        "avgm", "slow", "avgm.rate 0", "avgm.rate 1",
    }  # fmt: skip
    assert history.rounds("race.rank.avgm.rate 0").tolist() == [*range(1, 13)]
    assert history.rounds("race.won.avgm.rate 1").tolist() == [13, 14, 15, 16]
    assert history.rounds("race.won.avgm").tolist() == [*range(5, 17)]


def test_an_average_around_a_race_and_a_race_of_averages():
    around = train(fg.averaged(fg.race({"a": AVGM, "b": SLOW})))
    assert [*around.state.inner.candidates] == ["a"]
    inside = train(fg.race({"a": fg.averaged(AVGM), "b": fg.averaged(SLOW)}))
    np.testing.assert_allclose(as_vector(inside.last), as_vector(around.last), rtol=1e-9)
    assert not np.allclose(as_vector(inside.params), as_vector(inside.last))


def test_candidates_that_learn_share_their_gradient_cohort():
    tuned = fg.self_tuning(AVGM, "server.learning_rate")
    race = fg.race({"tuned": tuned, "plain": SLOW})
    assert set(race.cohorts) == {"gradient_cohort"}
    result = train(race)
    assert [*result.state.candidates] == ["tuned"]
    assert result.hyper["tuned"]["server"]["learning_rate"] != 0.7
    assert len(result.history["hyper.tuned.server.learning_rate"]) == 9  # after the race


def test_nobody_has_an_example_to_spare():
    """Then what they train on judges."""
    clients = fg.population([{"x": np.ones((1, 2)) * i, "y": np.ones(1)} for i in range(4)])
    result = train(fg.race({"slow": SLOW, "good": AVGM}), clients=clients)
    assert [*result.state.candidates] == ["good"]
    assert np.isfinite(result.history["race.loss.slow"]).all()


def test_when_all_diverge_the_first_one_is_left():
    race = fg.race({"second": WILD, "a": WILD.starting({"client.learning_rate": 1e200})})
    with pytest.warns(RuntimeWarning, match="not finite"):
        result = train(race, params=as_params(START * np.nan))
    assert [*result.state.candidates] == ["second"]


def test_on_nodes():
    race = fg.race({"good": AVGM, "slow": SLOW, "adam": ADAM}, {0.3: 2, 0.6: 1})
    here = train(race, rounds=6)
    with fg.executors.flower(InProcess.of(CLIENTS), platforms=("cpu",)) as nodes:
        there = train(race, rounds=6, clients=nodes.population())
    assert [*there.state.candidates] == [*here.state.candidates]
    np.testing.assert_allclose(as_vector(there.params), as_vector(here.params), rtol=1e-9)


def test_one_message_and_the_price_of_each_phase():
    race = fg.race({"good": AVGM, "slow": SLOW, "avg": fg.averaged(AVGM)}, {0.1: 2, 0.5: 1})
    shown = fg.explain(race, as_params(START), POPULATION.everyone, rounds=40)
    assert [(p.first, p.last, len(p.candidates)) for p in shown.phases] == [
        (1, 4, 3),
        (5, 20, 2),
        (21, 40, 1),
    ]
    assert all(p.plan.rounds == 1 for p in shown.phases)
    alone = fg.plan(AVGM.round, AVGM.init(as_params(START)), AVGM.hyper, POPULATION.everyone, KEY)
    assert shown.phases[-1].bytes == sum(alone.bytes)
    model = 8 * 3
    down, up = shown.phases[0].plan.bytes
    assert 4 * model <= down <= 4 * model + 64  # the average is judged, so it is sent as well
    assert 3 * model <= up <= 3 * model + 80
    works = [p.plan.client_work for p in shown.phases]
    assert works[0] > works[1] > works[2] > 0
    total = 4 * shown.phases[0].bytes + 16 * shown.phases[1].bytes + 20 * shown.phases[2].bytes
    assert shown.bytes == total and shown.times > 1
    assert "21 to 40" in str(shown) and "<pre" in shown._repr_html_()


def test_a_round_is_compiled_once_for_each_stage():
    calls = []

    def counted(params, batch):
        calls.append(1)
        return loss(params, batch)

    base = fg.fed_avg(counted, WORK)
    race = fg.race({"a": base, "b": base.starting({"client.learning_rate": 0.1})}, {0.5: 1})
    train(race, rounds=4)
    first = len(calls)
    train(race, rounds=40)
    assert len(calls) == first


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: fg.race({}), "by name"),
        (lambda: fg.race({"a": 3}), "Give an algorithm"),
        (lambda: fg.race({"a.b": AVGM}), "without a dot"),
        (lambda: fg.race({"a": AVGM, "b": fg.fed_avg(lambda p, b: loss(p, b))}), "another loss"),
        (lambda: fg.race({"a": fg.scaffold(loss)}), "keep a state"),
        (lambda: fg.race({"a": AVGM}, {0.5: 2}), "at last 1"),
        (lambda: fg.race({"a": AVGM}, {0.5: 1, 0.7: 2}), "fewer and fewer"),
        (lambda: fg.race({"a": AVGM}, {1.5: 1}), "between 0 and 1"),
        (lambda: fg.race({"a": AVGM}, {0.5: 1.0}), "whole number"),
        (lambda: fg.race({"a": AVGM}, cut={0.5: 1}), "cuts"),
        (lambda: fg.race([AVGM]), "by name"),
        (
            lambda: fg.race({"a": AVGM, "b": SLOW.on(fg.executors.reference())}),
            "on different executors",
        ),
        (lambda: fg.race({"a": AVGM}, [0.25]), "so many candidates are left"),
        (lambda: fg.race({"a": AVGM}, {"x": 1}), "between 0 and 1"),
        (lambda: fg.race({"a": AVGM}, {0.1: {"": 1, "b": 1}, 0.5: 1}), "of the family 'b'"),
        (lambda: fg.race({"a": AVGM, "b": SLOW}, {0.1: {"a": 1}, 0.5: 1}), "'b' is of none"),
        (lambda: fg.race({"a": AVGM}, held_out=0.2), r"held_out=fg.HeldOut\(0.2\)"),
        (lambda: fg.race({"a": AVGM}, incumbent="b"), "no candidate 'b'"),
        (lambda: fg.race({"a": AVGM}, changes={5: {"a": {}}}), "between 0 and 1"),
        (lambda: fg.race({"a": AVGM}, changes={0.5: {"b": {}}}), "no candidate 'b'"),
        (lambda: fg.race({"a": AVGM}, changes={0.5: {"a": {"rate": 1.0}}}), "no hyperparameter"),
        (
            lambda: fg.race(
                {"a": AVGM}, changes={0.5: {"a": {"client.learning_rate": lambda t: 0.1}}}
            ),
            "is a schedule",
        ),
        (lambda: fg.side_by_side(fg.race({"a": AVGM})), "before they race"),
        (lambda: fg.self_tuning(fg.race({"a": AVGM}), "a.server"), "before they race"),
    ],
)
def test_what_is_wrong_is_said(make, words):
    with pytest.raises(fg.FederatedError, match=words):
        make()


def test_rounds_so_few_that_cuts_fall_together():
    result = train(fg.race(MIXED, {0.025: 3, 0.1: 2, 0.25: 1}), rounds=3)
    assert len(result.state.candidates) == 1
    assert jnp.isfinite(result.history["loss"][-1])


def test_a_cut_comes_after_rounds_that_tell_something():
    """The first round judges the model that all begin with."""
    for rounds in (2, 3, 9):
        result = train(fg.race({"slow": SLOW, "good": AVGM}), rounds=rounds)
        until = result.history.rounds("race.rank.slow")[-1]
        assert until == 2 and next(iter(result.state.candidates)) == "good"
        np.testing.assert_array_equal(
            as_vector(result.params), as_vector(result.state.candidates["good"].params)
        )


def test_of_candidates_that_are_equal_the_first_one_leads():
    result = train(fg.race({"second": SLOW, "a": AVGM}), rounds=1)
    np.testing.assert_array_equal(
        as_vector(result.params), as_vector(result.state.candidates["second"].params)
    )


def by_hand(step, start=0.0, rate=None, told=None):
    """An algorithm of a user's own, with a number of its own in the state, which counts rounds; and
    without a loss, unless what is `told` is one."""

    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Own:
        params: Any
        number: Any

    @fg.program(cohort=fg.CLIENTS)
    def round(state, hyper, cohort, key):
        its = fg.hyper.at(hyper, state.number)
        given = [] if rate is None else [its["server"]["learning_rate"]]
        params = jax.tree.map(lambda x: x + step(state.number, *given), state.params)
        known = fg.Metrics(loss=None if told is None else told(state.number, *given))
        return Own(params, state.number + fg.mean(jnp.float32(1))), known

    hyper = {} if rate is None else {"server": {"learning_rate": rate}}
    first = lambda params, hyper=None: Own(params, jnp.float32(start))
    return fg.Algorithm(first, round, hyper, loss)


def unstable(rate):
    """An algorithm that goes on by its server's rate; if that is large, from round 14 on it goes
    much too far, and its clients tell a high loss."""

    def falls_apart(number, rate):
        return (number >= 13) & (rate > 0.006)

    def told(number, rate):
        return jnp.where(falls_apart(number, rate), 5.0, 1 - 0.01 * number)

    def step(number, rate):
        return jnp.where(falls_apart(number, rate), 1e6, rate)

    return by_hand(step, rate=rate, told=told)


def test_who_goes_on_alone_and_gets_worse_goes_back_with_half_the_rate(tmp_path):
    race = fg.race({"best": unstable(0.01), "wild": unstable(100.0)}, {0.2: 1})
    result = train(race, rounds=40)
    # It is asked after 12 rounds, all being well, and after 16: it is where it was after 12.
    pace = result.history["race.pace.best"]
    assert [*result.history.rounds("race.pace.best")] == [*range(9, 41)]
    assert pace.tolist() == [1.0] * 8 + [0.5] * 24
    np.testing.assert_allclose(as_vector(result.params), START + 12 * 0.01 + 24 * 0.005, rtol=1e-6)
    assert result.history["loss"][13:16].tolist() == [5.0] * 3
    assert (result.history["loss"][16:] < 1).all()
    for stop in (12, 15, 16, 17):
        out = tmp_path / str(stop)
        train(race, rounds=40, out=out, callbacks=[lambda t, *_, s=stop: t == s])
        again = train(race, rounds=40, out=out)
        jax.tree.map(np.testing.assert_array_equal, again.state, result.state)
    # An average around it begins anew where it went back to; a schedule is eased, too.
    outside = train(fg.averaged(race), rounds=40)
    np.testing.assert_array_equal(as_vector(outside.last), as_vector(result.params))
    assert np.abs(as_vector(outside.params) - START).max() < 1
    scheduled = race.starting({"best.server.learning_rate": lambda t: jnp.where(t < 99, 0.01, 0.0)})
    assert train(scheduled, rounds=40).history["race.pace.best"].tolist() == pace.tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_pace_has_no_dtype_of_its_own(dtype):
    clients = fg.population([{n: rows.astype(dtype) for n, rows in c.items()} for c in CLIENTS])
    params = jax.tree.map(lambda x: x.astype(dtype), as_params(START))
    state = train(fg.race({"a": AVGM, "b": SLOW}), clients=clients, params=params).state
    assert {leaf.dtype for leaf in jax.tree.leaves(state.last)} == {np.dtype(dtype)}


def test_nobody_is_held_twice_while_several_race():
    race = fg.race({"best": unstable(0.01), "wild": unstable(100.0)}, {0.2: 1})
    held = {}
    train(race, rounds=20, callbacks=[lambda t, s, _: held.update({t: [*s.watch.safe]})])
    assert all(held[t] == ([] if t <= 4 else ["best"]) for t in held)
    # What has no rates that could be lowered is not watched, nor is a race in the race.
    learns = fg.self_tuning(AVGM, "server.learning_rate", optax.sgd(0.01))
    for one in (by_hand(lambda t: 0.1), learns, fg.race({"a": AVGM, "b": SLOW}, {0.2: 1})):
        state = train(fg.race({"one": one}), rounds=20).state
        assert not state.watch.safe and state.pace == 1


def test_an_incumbent_trains_as_if_there_were_no_race():
    """Also on the examples that judge the others."""
    race = fg.race({"given": AVGM, "slow": SLOW}, {0.5: 1}, incumbent="given")
    result, alone = train(race), train(AVGM)
    assert [*result.state.candidates] == ["given"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9),
        result.state.candidates["given"],
        alone.state,
    )
    # So do clients that its hypergradients are of.
    tuned = fg.self_tuning(AVGM, "server.learning_rate")
    race = fg.race({"given": tuned, "slow": SLOW}, {1.0: 1}, incumbent="given")
    found, alone = train(race, rounds=3).state.candidates["given"], train(tuned, rounds=3).state
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found, alone)


def test_what_diverges_in_the_round_before_a_cut_does_not_win():
    def falls(t):
        return jnp.where(t == 2, np.inf, 0.0).astype(float)

    race = fg.race({"falls": by_hand(falls), "worse": by_hand(lambda t: -0.5)}, {0.5: 1})
    for rounds in (3, 6):  # at the end of training, and at the cut
        assert np.isfinite(as_vector(train(race, rounds=rounds).params)).all()


def test_a_round_that_ends_the_winner_is_undone_and_told():
    falls = fg.race({"a": by_hand(lambda t: jnp.where(t == 2, np.inf, 0.1).astype(float))})
    result = train(falls, rounds=4)
    # The number in the state is undone, too, so every later round ends so.
    assert result.history["race.won.a"].tolist() == [1, 1, 0, 0]
    np.testing.assert_allclose(as_vector(result.params), START + 0.2, rtol=1e-6)


def test_a_state_may_hold_what_is_not_finite():
    alone = fg.race({"a": by_hand(lambda t: 0.1, np.inf)})
    expected = as_vector(as_params(START)) + 0.3
    np.testing.assert_allclose(as_vector(train(alone, rounds=3).params), expected, rtol=1e-6)


def test_without_judges_and_losses_all_are_equal():
    clients = fg.population([{"x": np.ones((1, 2)), "y": np.ones(1)} for _ in range(3)])
    race = fg.race({"b": by_hand(lambda t: 0.1), "a": by_hand(lambda t: 0.2)}, {0.5: 1})
    result = train(race, rounds=4, clients=clients)
    assert [*result.state.candidates] == ["b"] and (result.history["race.rank.a"] == 0.5).all()


def stages(cuts, scores, squares=None, incumbent=None, rounds=5, votes=1e6):
    found = Cuts(cuts, [*scores], incumbent)
    return found.best(scores, squares or {}, cuts[min(cuts)], rounds, votes)


def test_families_may_begin_alike():
    scores = {"adam 1": 3.0, "adam 2": 4.0, "adamw 1": 1.0, "adamw 2": 2.0}
    cuts = {0.1: {"adam": 1, "adamw": 1}, 0.5: 1}
    assert stages(cuts, scores) == ["adam 1", "adamw 1"]
    assert stages({0.5: {"": 1}}, scores, {n: 100.0 for n in scores}, "adam 1") == ["adam 1"]


@pytest.mark.parametrize("shift", [0.0, 0.6, 2.0, 6.0])
def test_an_incumbent_gives_way_to_what_chance_does_not_explain(shift):
    ranks = np.random.default_rng(0).normal(size=(6, 2)) + [shift, 0]
    difference = ranks[:, 0] - ranks[:, 1]
    error = difference.std(ddof=1) / np.sqrt(6)
    certain = scipy.stats.t.isf(1e-3, 5) * error  # once in a thousand times
    expected = "other" if difference.mean() > certain else "given"
    scores = dict(zip(("given", "other"), ranks.sum(0), strict=True))
    squares = {"other": np.sum(difference**2)}
    found = stages({0.5: 1}, scores, squares, "given", rounds=6)
    assert found == [expected]


def test_a_few_rounds_in_which_clients_agree_may_be_chance():
    """Of two candidates, by clients that do not care: once in a thousand times the other wins."""
    rng = np.random.default_rng(0)
    for clients, rounds in ((1, 2), (1, 5), (1, 12), (3, 3), (10, 2), (10, 5)):
        won = 0
        for _ in range(2000):
            ahead = rng.choice([-1.0, 1.0], (rounds, clients)).mean(1)
            scores = {"given": ahead.sum(), "other": 0.0}
            squares = {"other": np.sum(ahead**2)}
            votes = rounds * clients
            won += stages({0.5: 1}, scores, squares, "given", rounds, votes) == ["other"]
        assert won <= 8  # of 2,000; more than that has a chance of one in two thousand
    # But if they agree often enough, it is none.
    assert stages({0.5: 1}, {"given": 4.0, "other": 0.0}, {"other": 4.0}, "given", 4, 16) == [
        "other"
    ]


def test_one_round_tells_an_incumbent_nothing_of_chance():
    assert stages({0.5: 1}, {"given": 1.0, "other": 0.0}, {"other": 1.0}, "given", 1) == ["given"]
    assert stages({0.5: 1}, {"given": np.inf, "other": 0.0}, {"other": 1.0}, "given", 1) == [
        "other"
    ]


def test_changes_come_when_they_are_due_and_may_be_nested():
    values = {"server": {"learning_rate": 0.0}}
    race = fg.race({"a": AVGM.starting({"server.momentum": 0.0})}, changes={0.5: {"a": values}})
    seen = []
    train(race, rounds=6, callbacks=[lambda _, state, __: seen.append(as_vector(state.params))])
    moved = [not np.array_equal(a, b) for a, b in zip([START, *seen], seen, strict=False)]
    assert moved == [True] * 3 + [False] * 3


def test_the_server_alone_is_looked_at_where_clients_keep_a_state_too(tmp_path):
    base, seen = fg.scaffold(loss, fg.local_training(0.1, batch_size=10)), []

    def between(state, done, planned):
        seen.append((type(state).__name__, done, planned))
        return dataclasses.replace(state)

    result = train(dataclasses.replace(base, before_round=between), rounds=3, out=tmp_path)
    assert seen == [("ScaffoldState", t, 3) for t in range(3)]
    np.testing.assert_array_equal(as_vector(result.params), as_vector(train(base, rounds=3).params))


def test_only_entries_of_dicts_may_go(tmp_path):
    def between(state, done, planned):
        return dataclasses.replace(state, number=None) if done == 1 else state

    lost = by_hand(lambda t: 0.1 if t is None else 0.2)
    round = dataclasses.replace(
        lost.round, fun=lambda state, hyper, cohort, key: (state, fg.Metrics())
    )
    lost = dataclasses.replace(lost, before_round=between, round=round)
    with pytest.raises(fg.FederatedError, match="only entries of dicts may go"):
        train(lost, rounds=2, out=tmp_path)


def test_an_algorithm_whose_clients_keep_a_state_is_explained():
    shown = fg.explain(fg.scaffold(loss), as_params(START), POPULATION.everyone, rounds=9)
    assert [(p.first, p.last) for p in shown.phases] == [(1, 9)] and shown.bytes > 0
    with pytest.raises(fg.FederatedError, match="'rounds'"):
        fg.explain(AVGM, as_params(START), POPULATION.everyone)
    with pytest.raises(fg.FederatedError, match="leave out argnums"):
        fg.explain(AVGM, as_params(START), POPULATION.everyone, rounds=9, has_aux=True)


def test_what_is_learned_from_further_clients_is_not_of_examples_that_judge():
    """Labels of held-out examples change who is judged how, and nothing that is trained."""
    clients = [dict(c) for c in CLIENTS]
    for client in clients:
        places = {"x": np.arange(len(client["y"]))}
        held = RULE.split(fg.Examples.of(places))[1]
        rows, mask = held.batch(0, len(client["y"]))
        client["y"] = client["y"].copy()
        client["y"][np.asarray(rows["x"])[np.asarray(mask)]] *= -1
    tuned = fg.self_tuning(AVGM, "server.learning_rate")
    for algorithm in (fg.race({"a": tuned, "b": SLOW}, {1.0: 1}), fg.holding_out(tuned)):
        states = [
            train(algorithm, rounds=3, clients=population).state
            for population in (POPULATION, fg.population(clients))
        ]
        tuned_ones = [s.candidates["a"] if hasattr(s, "candidates") else s for s in states]
        jax.tree.map(np.testing.assert_array_equal, *tuned_ones)
