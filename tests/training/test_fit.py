"""The training loop: what it computes, whom it asks, what it tells, and when it stops."""

import io
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import fedgrad as fg
from fedgrad.clients import sampling
from fedgrad.training.cohort_schedule import draws
from fedgrad.training.history import MetricError
from fedgrad.training.log import read_log
from line import FIRST, line, mean_square, points

POINTS = points()
CLIENTS = fg.population(POINTS)
KEY = jax.random.key(3)
# Compiled once.
LINE = line()
PLAIN = fg.fed_avgm(mean_square, fg.local_training(0.05, batch_size=4))
TUNED = fg.self_tuning(PLAIN, "server.learning_rate", optax.sgd(0.01))
RATES = np.array([0.01, 0.1, 0.3], np.float32)
TRIALS = fg.side_by_side(LINE, {"rate": RATES, "noise": 0.0})


def train(algorithm=None, clients=CLIENTS, rounds=6, **more):
    settings = {"params": FIRST, "cohort_size": 5, "key": KEY, "progress": False}
    return fg.fit(algorithm or LINE, clients, rounds=rounds, **(settings | more))


def first_weight(every):
    return fg.Evaluation(lambda params: {"w": params["w"][0]}, every=every)


def cohorts(rounds, key=KEY, name="cohort", size=5):
    """Who is drawn by hand, which is what `fit` is compared with."""
    return [CLIENTS.sample(key, size, r, name).index.tolist() for r in range(1, rounds + 1)]


# What is computed


def test_it_is_the_hand_written_loop():
    """Gradient steps in numpy, on the clients that the run asked."""
    result = train(LINE.starting({"rate": 0.1, "noise": 0.0}), rounds=5)
    w, losses = np.zeros(3), []
    for chosen in cohorts(5):
        x = np.concatenate([POINTS[c]["x"] for c in chosen]).astype(float)
        y = np.concatenate([POINTS[c]["y"] for c in chosen]).astype(float)
        losses.append(np.mean((x @ w - y) ** 2))
        w = w - 0.1 * (x @ w - y) @ x / len(y)
    np.testing.assert_allclose(result.params["w"], w, rtol=1e-5)
    np.testing.assert_allclose(result.history["loss"], losses, rtol=1e-5)
    assert result.rounds == 5 and result.stopped is None
    assert int(result.state.steps) == 5
    assert result.history["steps"].tolist() == [0, 1, 2, 3, 4]


def test_rounds_through_fit_are_the_rounds_of_the_algorithm():
    algorithm = LINE
    draw = draws({"cohort": CLIENTS}, {"cohort": 5}, KEY)
    state = algorithm.init(jax.tree.map(jnp.asarray, FIRST))
    for r in range(1, 5):
        drawn = draw(r)
        state, metrics = algorithm.round(state, algorithm.hyper, drawn.cohorts["cohort"], drawn.key)
    result = train(algorithm, rounds=4)
    same = [np.array_equal(a, b) for a, b in zip(_data(result.state), _data(state), strict=True)]
    assert all(same)
    assert result.history["loss"][-1] == metrics.loss


def _data(tree):
    return [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)
        for x in jax.tree.leaves(tree)
    ]


def test_any_executor():
    local, reference = train(), train(LINE.on(fg.executors.reference()))
    np.testing.assert_allclose(local.params["w"], reference.params["w"], rtol=1e-5)


def test_the_library_s_algorithms_learn():
    fixed, learned = (train(a, rounds=8) for a in (PLAIN, TUNED))
    before, after = (_everyones_loss(params) for params in (FIRST, fixed.params))
    assert after < before / 2
    rates = learned.history["hyper.server.learning_rate"]
    assert rates[0] == 1 and rates[-1] != 1
    assert learned.hyper["server"] == {"learning_rate": rates[-1], "momentum": 0.9}
    assert fixed.hyper == PLAIN.hyper


def _everyones_loss(params):
    return np.mean(np.concatenate([mean_square(params, client) for client in POINTS]))


def test_nothing_is_traced_or_compiled_again():
    calls, compiled = [], []

    def count(metrics):
        calls.append(None)
        return metrics

    def listen(event, *_, **__):
        if "backend_compile" in event:
            compiled.append(event)

    algorithm = line(metrics=count)
    train(algorithm, rounds=3)
    traced = len(calls)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        train(algorithm, rounds=11)
        other = algorithm.starting({"rate": 0.2, "noise": 0.0})
        train(other, rounds=20, key=jax.random.key(9))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert traced == 1 and len(calls) == traced
    assert compiled == []


# Who takes part


def test_a_cohort_depends_on_the_key_and_the_round_only():
    order = cohorts(20)
    assert order == cohorts(20) and order[:3] == cohorts(3)
    backwards = draws({"cohort": CLIENTS}, {"cohort": 5}, KEY)
    assert [np.asarray(backwards(r).cohorts["cohort"].index).tolist() for r in (20, 3)] == [
        order[19],
        order[2],
    ]
    assert order != cohorts(20, jax.random.key(4))
    assert order != cohorts(20, name="gradient_cohort")
    assert len({tuple(c) for c in order}) > 15
    assert all(len(set(c)) == 5 and min(c) >= 0 and max(c) < 12 for c in order)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_the_key_of_a_round(implementation):
    key = jax.random.key(3, impl=implementation)
    draw = draws({"cohort": CLIENTS}, {"cohort": 5}, key)
    keys = [draw(r).key for r in range(1, 12)]
    assert {str(jax.random.key_impl(k)) for k in keys} == {implementation}
    assert len({np.asarray(jax.random.key_data(k)).tobytes() for k in keys}) == 11
    again = draws({"cohort": CLIENTS}, {"cohort": 5}, key)
    assert jax.random.key_data(again(7).key).tolist() == jax.random.key_data(keys[6]).tolist()


def test_old_style_keys():
    old = jax.random.key_data(KEY)
    draw = draws({"cohort": CLIENTS}, {"cohort": 5}, old)
    assert draw(1).key.dtype == jnp.uint32 and draw(1).key.shape == (2,)
    assert np.asarray(draw(1).cohorts["cohort"].index).tolist() == cohorts(1)[0]


def test_cohorts_are_drawn_uniformly():
    chosen = np.bincount(np.concatenate(cohorts(1200)), minlength=12)
    expected, deviation = 1200 * 5 / 12, np.sqrt(1200 * 5 / 12 * 7 / 12)
    assert np.all(np.abs(chosen - expected) < 4 * deviation)


def test_whoever_wants_fewer_clients_gets_the_first_ones():
    everyone = [sampling.positions((1, 2), round, "cohort", 9, 9) for round in range(1, 30)]
    for round, order in enumerate(everyone, 1):
        assert sorted(order) == list(range(9))
        for size in range(1, 9):
            found = sampling.positions((1, 2), round, "cohort", 9, size)
            assert found.tolist() == order[:size].tolist()


def test_fixed_and_learned_runs_share_their_clients():
    seen = {}

    def spy(name):
        class Recorded(Sampled):
            def select(self, clients):
                seen.setdefault(name, []).append(clients.tolist())
                return super().select(clients)

        return Recorded()

    train(PLAIN, spy("fixed"), rounds=4)
    train(TUNED, spy("both"), rounds=4)
    assert seen["both"][::2] == seen["fixed"]  # the others are those of the gradient cohort
    assert seen["both"][1::2] != seen["fixed"]


class Sampled(fg.Population):
    """Clients that can be counted and chosen, and no more."""

    def __len__(self):
        return 12

    def select(self, clients):
        return CLIENTS.select(clients)


def test_clients_that_can_only_be_sampled(tmp_path):
    checked = fg.Evaluation({"loss": mean_square}, Sampled())
    first = train(clients=Sampled(), rounds=3, evaluate=checked, out=tmp_path)
    again = train(clients=Sampled(), rounds=5, evaluate=checked, out=tmp_path)
    straight = train(clients=Sampled(), rounds=5)
    assert first.rounds == 3
    assert np.array_equal(again.history["loss"], straight.history["loss"])
    everyone = fg.Evaluation({"loss": mean_square}, CLIENTS)
    assert first.history["eval.loss"][-1] == pytest.approx(everyone(first.params)["loss"])


def test_clients_of_a_federation_are_those_of_its_simulation():
    asked = []

    class Federation(Sampled):
        def sample(self, key, size, round, role):
            asked.append(self.indices(key, size + 2, round, role).tolist())
            return CLIENTS.select(asked[-1][:size])

    real, simulated = train(clients=Federation(), rounds=3), train(rounds=3)
    assert [len(positions) for positions in asked] == [7, 7, 7]
    assert [positions[:5] for positions in asked] == cohorts(3)
    assert np.array_equal(real.history["loss"], simulated.history["loss"])


def test_another_population_for_the_gradient_may_be_small():
    few = fg.population(POINTS[:2])
    tuned = fg.self_tuning(fg.fed_avg(mean_square), "server", gradient_from=few)
    assert np.isfinite(train(tuned, rounds=3).history["gradient_loss"]).all()


# What is recorded


def test_history():
    history = train(
        rounds=7, evaluate={"all": fg.Evaluation(lambda p: {"size": jnp.sum(p["w"])}, every=3)}
    ).history
    assert history["loss"].shape == (7,) and history["loss"].dtype == np.float32
    assert history["steps"].dtype == np.int32
    assert history.rounds("loss").tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert history.rounds("eval.all.size").tolist() == [0, 3, 6, 7]
    assert history.under("eval") == {"all.size": pytest.approx(history["eval.all.size"])}
    assert "loss" in history and "lose" not in history and history.get("lose") is None
    assert "loss[7]" in repr(history)
    with pytest.raises(MetricError, match="Did you mean 'loss'"):
        history["lss"]
    with pytest.raises(ValueError, match="read-only"):
        history["loss"][0] = 0
    early = history.until(4)
    assert len(early["loss"]) == 4 and early.rounds("eval.all.size").tolist() == [0, 3]
    assert [row["round"] for row in early.rows()] == [0, 1, 2, 3, 4]
    assert "eval.all.size" in early.rows()[3] and "eval.all.size" not in early.rows()[4]


def test_history_of_many_rounds():
    history = fg.History()
    for r in range(1, 1001):
        history.record(r, {"loss": np.float32(r), **({"rare": np.arange(2)} if r % 9 == 0 else {})})
    assert np.array_equal(history["loss"], np.arange(1, 1001))
    assert history["rare"].shape == (111, 2)
    with pytest.raises(MetricError, match=r"shape \(3,\) in round 1001"):
        history.record(1001, {"rare": np.arange(3)})


AS_TOLD = {
    "int, then float": [0, 0.25, 0.5, 0.75],
    "float32, then float64": [np.float32(0.5), 1 / 3, np.float32(0.1)],
    "float16, then float32": [np.float16(0.5), np.float32(1 / 3)],
    "bool, then float": [True, 0.5, False],
    "bool, then int": [False, 3],
    "int32, then what needs 64 bits": [np.int32(1), 2**40, -(2**40)],
    "int8, then uint8": [np.int8(-1), np.uint8(255)],
    "float, then int": [0.5, 2**52 + 1],
    "trials": [np.array([0, 1]), np.array([0.5, 1.5]), np.array([2, 3])],
}


@pytest.mark.parametrize("values", AS_TOLD.values(), ids=AS_TOLD)
def test_numbers_are_stored_as_told(values, tmp_path):
    """Whatever came first: in the history, in the log and in a checkpoint that is gone on from."""
    told = iter(values)
    checked = fg.Evaluation(lambda params: {"told": next(told)}, every=1)
    train(rounds=1, evaluate=checked, out=tmp_path)
    result = train(rounds=len(values) - 1, evaluate=checked, out=tmp_path)
    for history in (
        result.history,
        read_log(tmp_path / "history.jsonl"),
        fg.load(tmp_path).history,
    ):
        assert history["eval.told"].tolist() == [np.asarray(v).tolist() for v in values]


def test_numbers_that_no_dtype_holds_together():
    history = fg.History()
    history.record(1, {"count": 2**60 + 1})
    with pytest.raises(MetricError, match=r"'count' is .* in round 2.* float"):
        history.record(2, {"count": 0.5})
    history.record(3, {"share": 0.5})
    with pytest.raises(MetricError, match=r"'share' is .* in round 4.* float"):
        history.record(4, {"share": 2**60 + 1})
    assert history["count"].tolist() == [2**60 + 1] and history["share"].tolist() == [0.5]


def test_trials_side_by_side(tmp_path):
    checked = fg.Evaluation({"loss": mean_square}, CLIENTS, every=4)
    together = train(TRIALS, evaluate=checked, out=tmp_path)
    assert together.history["loss"].shape == (6, 3)
    assert together.history["eval.loss"].shape == (3, 3)
    for i, rate in enumerate(RATES):
        alone = train(LINE.starting({"rate": rate, "noise": 0.0}), evaluate=checked)
        np.testing.assert_allclose(together.history["loss"][:, i], alone.history["loss"], rtol=1e-5)
        np.testing.assert_allclose(
            together.history["eval.loss"][:, i], alone.history["eval.loss"], rtol=1e-5
        )
    rows = [*map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())]
    assert rows[4]["eval.loss"] == together.history["eval.loss"][1].tolist()
    assert np.array_equal(read_log(tmp_path / "history.jsonl")["loss"], together.history["loss"])


def test_the_log_is_the_history(tmp_path):
    result = train(rounds=5, out=tmp_path, evaluate=first_weight(every=2))
    rows = [*map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())]
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert set(rows[0]) == {"round", "eval.w"}
    assert set(rows[1]) == {"round", "loss", "steps", "seconds"}
    assert set(rows[2]) == set(rows[5]) == {"round", "loss", "steps", "seconds", "eval.w"}
    assert [row["loss"] for row in rows[1:]] == result.history["loss"].tolist()
    found = read_log(tmp_path / "history.jsonl")
    assert all(np.array_equal(found[name], result.history[name]) for name in result.history)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hyper"] == {"rate": 0.1, "noise": 0.01} and config["cohort_size"] == 5


def test_a_log_is_read_while_it_is_written(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('{"round": 1, "loss": 2.5}\n{"round": 2, "loss": 1.5}\n{"round": 3, "lo')
    assert read_log(path)["loss"].tolist() == [2.5, 1.5]


def test_numbers_that_json_does_not_have(tmp_path):
    values = [np.nan, np.inf, -np.inf, 1.0]
    odd = line(metrics=lambda m: fg.Metrics(extra={"odd": jnp.asarray(values)[m.extra["steps"]]}))
    history = train(odd, rounds=4, out=tmp_path).history
    lines = (tmp_path / "history.jsonl").read_text().splitlines()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = [json.loads(text, parse_constant=refuse)["odd"] for text in lines]
    assert found == ["NaN", "Infinity", "-Infinity", 1.0]
    np.testing.assert_array_equal(read_log(tmp_path / "history.jsonl")["odd"], values)
    np.testing.assert_array_equal(history["odd"], values)


# Evaluation


def accuracy(params, batch):
    return jnp.abs(batch["x"] @ params["w"] - batch["y"]) < 1


def one_number(params, batch):
    return jnp.sum(mean_square(params, batch))


@pytest.mark.parametrize("metric", [mean_square, accuracy, one_number], ids=lambda f: f.__name__)
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_evaluation_is_the_mean_over_all_examples(metric, batch_size):
    params = {"w": np.array([0.3, -1.0, 0.5], np.float32)}
    x, y = (np.concatenate([c[name] for c in POINTS]).astype(float) for name in "xy")
    error = x @ params["w"] - y
    expected = np.mean(np.abs(error) < 1) if metric is accuracy else np.mean(error**2)
    checked = fg.Evaluation({"it": metric}, CLIENTS, batch_size)
    assert checked(params)["it"] == pytest.approx(expected, rel=1e-5)
    assert checked.on(fg.executors.reference())(params)["it"] == pytest.approx(expected, rel=1e-5)


def test_several_evaluations_and_when():
    seen = []

    def test(params):
        seen.append(np.asarray(params["w"]))
        return {"loss": float(np.sum(params["w"]))}

    result = train(
        rounds=5,
        evaluate={
            "a": fg.Evaluation(test, every=2),
            "b": fg.Evaluation({"m": accuracy}, CLIENTS, every=2),
            "c": fg.Evaluation(test, every=3),
        },
    )
    assert result.history.rounds("eval.a.loss").tolist() == [0, 2, 4, 5]
    assert result.history.rounds("eval.b.m").tolist() == [0, 2, 4, 5]
    assert result.history.rounds("eval.c.loss").tolist() == [0, 3, 5]
    assert np.array_equal(seen[-1], result.params["w"])
    assert result.history["eval.a.loss"][-1] == pytest.approx(np.sum(result.params["w"]))


def test_evaluation_only_sums_leave_a_client():
    checked = fg.Evaluation({"loss": mean_square, "accuracy": accuracy}, CLIENTS)
    plan = fg.plan(checked.program, FIRST, checked.clients)
    assert plan.rounds == 1 and plan.traffic[0].up == 3 and plan.audit().only_sums


# Callbacks and stopping


def test_callbacks_see_every_round_and_may_stop_it():
    seen = []

    def watch(round, state, metrics):
        seen.append((round, int(state.steps), metrics.loss, metrics.eval.get("w")))
        return round == 4

    result = train(rounds=50, callbacks=[watch], evaluate=first_weight(every=3))
    straight = train(rounds=4)
    assert [s[:2] for s in seen] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [s[2] for s in seen] == result.history["loss"].tolist()
    assert [s[3] is None for s in seen] == [True, True, False, True]
    # Rounds that were started before the callback was asked leave no trace.
    assert np.array_equal(result.history["loss"], straight.history["loss"])
    assert np.array_equal(result.params["w"], straight.params["w"])
    assert result.rounds == 4 and result.stopped == "watch asked for it"
    assert result.history.rounds("eval.w").tolist() == [0, 3, 4]


def test_clients_are_not_asked_in_vain():
    """Where results are there at once, as from a federation, no round is started too early."""

    class Counted(Sampled):
        asked = 0

        def select(self, clients):
            self.asked += 1
            return super().select(clients)

    clients = Counted()
    stop = lambda round, state, metrics: round == 2
    reference = fg.executors.reference()
    result = train(LINE.on(reference), clients, rounds=9, callbacks=[stop])
    assert result.rounds == clients.asked == 2


def test_callbacks_are_closed_also_after_an_error():
    class Closing:
        closed = 0

        def __call__(self, round, state, metrics):
            if round == 2:
                raise ZeroDivisionError

        def close(self):
            self.closed += 1

    callback = Closing()
    with pytest.raises(ZeroDivisionError):
        train(callbacks=[callback])
    assert callback.closed == 1


STOPS = {
    "improves": ([5, 4, 3, 2, 1], fg.early_stop(patience=2), False),
    "stands still": ([5, 4, 4, 4], fg.early_stop(patience=2), True),
    "is patient": ([5, 4, 4], fg.early_stop(patience=2), False),
    "gets worse": ([5, 4, 6, 7], fg.early_stop(patience=2), True),
    "recovers": ([5, 4, 6, 3], fg.early_stop(patience=2), False),
    "too little": ([5, 4, 3.99, 3.98], fg.early_stop(patience=2, improvement=0.1), True),
    "nan is no improvement": ([5, 4, np.nan, np.nan], fg.early_stop(patience=2), True),
    "all nan": ([np.nan] * 4, fg.early_stop(patience=2), True),
    "higher is better": ([1, 2, 3, 4], fg.early_stop(patience=2, maximize=True), False),
    "no longer higher": ([1, 4, 3, 4], fg.early_stop(patience=2, maximize=True), True),
    "one trial improves": ([[5, 5], [4, 4], [4, 3], [4, 2]], fg.early_stop(patience=2), False),
    "no trial improves": ([[5, 5], [4, 4], [4, 4], [4, 5]], fg.early_stop(patience=2), True),
    "small integers": (
        np.array([-128, 1, 2], np.int8),
        fg.early_stop(patience=1, maximize=True),
        False,
    ),
    "counts": (np.array([1, 3, 2], np.uint32), fg.early_stop(patience=1, maximize=True), True),
    "right and wrong": (np.array([False, True, True]), fg.early_stop(patience=1), True),
    "finite": ([1, 2], fg.non_finite(), False),
    "not finite": ([1, np.inf], fg.non_finite(), True),
    "some trials finite": ([[1, 2], [np.nan, 1]], fg.non_finite(), False),
}


@pytest.mark.parametrize("name", STOPS)
def test_when_it_stops(name):
    losses, stop, expected = STOPS[name]
    history = fg.History({"loss": (np.arange(1, len(losses) + 1), np.asarray(losses))})
    assert bool(stop.reason(history)) is expected


def test_early_stop_ends_training_and_says_why(tmp_path):
    falling = line(
        metrics=lambda m: fg.Metrics(jnp.maximum(5.0 - m.extra["steps"].astype(float), 2.0))
    )
    stop = fg.early_stop(patience=3)
    result = train(falling, rounds=100, callbacks=[stop], out=tmp_path)
    assert result.history["loss"].tolist() == [5, 4, 3, 2, 2, 2, 2]
    assert "loss has not improved 3 times" in result.stopped
    again = train(falling, rounds=100, callbacks=[stop], out=tmp_path)
    assert again.rounds == 7 and again.stopped == result.stopped
    assert train(falling, rounds=9, out=tmp_path).rounds == 9


def test_early_stop_on_an_evaluation():
    stop = [fg.non_finite(), fg.early_stop("eval.w", patience=1)]
    flat = fg.Evaluation(lambda p: {"w": 1.0}, every=4)
    result = train(rounds=30, evaluate=flat, callbacks=stop)
    assert result.rounds == 4  # no better than the first model
    third = fg.Stop("loss", lambda values: len(values) == 3)
    assert train(rounds=4, callbacks=[third]).rounds == 3
    other = fg.Evaluation(lambda p: {"w": 1.0}, every=3)
    stop = fg.early_stop("eval.b.w", patience=1)
    assert train(rounds=30, evaluate={"a": other, "b": flat}, callbacks=[stop]).rounds == 4


def test_early_stop_sees_what_improves_by_less_than_one():
    falling = iter([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    checked = fg.Evaluation(lambda p: {"error": next(falling)}, every=1)
    result = train(evaluate=checked, callbacks=[fg.early_stop("eval.error", patience=2)])
    assert result.stopped is None and result.rounds == 6


def test_a_loss_that_is_not_finite_is_reported_once():
    broken = line(metrics=lambda m: fg.Metrics(jnp.where(m.extra["steps"] < 2, 1.0, jnp.nan)))
    with pytest.warns(RuntimeWarning, match=r"The loss of round 3 is not finite\. ") as caught:
        result = train(broken, rounds=6)
    assert len(caught) == 1
    assert np.isnan(result.history["loss"]).tolist() == [False] * 2 + [True] * 4
    with pytest.warns(RuntimeWarning, match="not finite"):
        stopped = train(broken, rounds=6, callbacks=[fg.non_finite()])
    assert stopped.rounds == 3 and stopped.stopped == "loss is not finite"
    trials = line(metrics=lambda m: fg.Metrics(loss=jnp.array([1.0, jnp.nan])))
    with pytest.warns(RuntimeWarning, match="in 1 of 2 trials"):
        train(trials, rounds=1)
    guarded = line(metrics=lambda m: fg.Metrics(loss=jnp.nan * m.loss, rejected=1))
    train(guarded, rounds=2)  # warnings are errors here


# Progress


def test_progress_in_a_terminal():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=150)
    train(TUNED, progress=console)
    for text in (
        "compiling",
        "round 6/6",
        "loss 0.",
        "server.learning_rate 1",
        "clients/s",
        "0:00 left",
    ):
        assert text in screen.getvalue()


def test_progress_elsewhere_is_plain_and_not_in_the_output(capsys):
    train(progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    first, last = err.splitlines()
    assert first == "round 0/6 · compiling" and "\x1b" not in err
    assert last.startswith("round 6/6 · loss 0.") and "clients/s" in last
    train(progress=False)
    assert capsys.readouterr() == ("", "")


def test_progress_of_trials(capsys):
    train(TRIALS, progress=True)
    assert " to " in capsys.readouterr().err


# Mistakes

MISTAKES = {
    "too many clients": ({"cohort_size": 13}, "there are 12 clients"),
    "no clients": ({"cohort_size": 0}, "Ask for 1 to 12"),
    "half a client": ({"cohort_size": 2.5}, "cohort_size=2.5: give a whole number"),
    "rounds": ({"rounds": 2.5}, "rounds=2.5: give a whole number"),
    "a number as key": ({"key": 0}, r"key=jax.random.key\(0\)"),
    "several keys": ({"key": jax.random.split(KEY)}, "takes one key"),
    "evaluate": ({"evaluate": "test"}, "evaluate= takes a function"),
    "evaluation without names": ({"evaluate": lambda p: 1.0}, "Give metrics by name"),
    "metrics without names": ({"algorithm": line(metrics=lambda m: m.loss)}, "by name"),
    "metrics without a type": ({"algorithm": line(metrics=lambda m: {"loss": 1.0})}, "fg.Metrics"),
    "a metric of another's name": (
        {"algorithm": line(metrics=lambda m: fg.Metrics(m.loss, extra={"loss": 1.0}))},
        "in extra is called 'loss'",
    ),
    "a metric that is none": ({"evaluate": lambda p: {"x": "good"}}, "are numbers"),
    "nothing to watch": ({"callbacks": [fg.early_stop("eval.loss")]}, "nothing is evaluated"),
    "another to watch": (
        {"callbacks": [fg.early_stop("eval.tst.x")], "evaluate": {"test": lambda p: {"x": 1}}},
        "Did you mean 'eval.test.'",
    ),
    "another metric to watch": (
        {
            "callbacks": [fg.early_stop("eval.los")],
            "evaluate": fg.Evaluation({"loss": mean_square}, CLIENTS),
        },
        "Did you mean 'eval.loss'",
    ),
    "a callback": ({"callbacks": ["watch"]}, "callbacks= takes functions"),
    "no list of callbacks": ({"callbacks": fg.early_stop()}, "callbacks= takes a list"),
    "params": ({"params": {"w": print}}, "made of arrays"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, message = MISTAKES[name]
    with pytest.raises(fg.ArgumentError, match=message) as caught:
        train(**settings)
    assert "test_fit.py" in str(caught.value)


OBJECTS = {
    "evaluation every": (lambda: first_weight(every=0), "every=0: give a whole number of"),
    "evaluation of nobody": (lambda: fg.Evaluation({"loss": mean_square}), "the clients whose"),
    "evaluation in batches": (lambda: fg.Evaluation(print, batch_size=3), "batch_size=3"),
    "evaluation in no batches": (
        lambda: fg.Evaluation({"loss": mean_square}, CLIENTS, batch_size=0),
        "batch_size=0: give a whole number",
    ),
    "evaluation of a list": (
        lambda: fg.Evaluation({"loss": mean_square}, [1, 2]),
        "takes a population, got list",
    ),
    "evaluation of nothing": (lambda: fg.Evaluation({}, CLIENTS), "takes functions by name"),
    "a function on an executor": (
        lambda: first_weight(1).on(fg.executors.reference()),
        "Only an evaluation of clients",
    ),
    "folder every": (lambda: fg.run_folder("never", every=0), "every=0"),
    "not JSON": (lambda: fg.run_folder("x", config={"x": {1, 2}}), "config= is written as JSON"),
    "patience": (lambda: fg.early_stop(patience=0), "patience=0"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_mistakes_are_explained_where_they_are_made(name):
    make, message = OBJECTS[name]
    with pytest.raises(fg.ArgumentError, match=message) as caught:
        make()
    assert "test_fit.py" in str(caught.value)


def test_metrics_without_a_type_are_no_metrics_of_a_self_tuned_round_either():
    tuned = fg.self_tuning(line(metrics=lambda m: {"loss": m.loss}), "rate")
    with pytest.raises(fg.ArgumentError, match=r"fg\.Metrics"):
        train(tuned)


def test_a_metric_that_is_not_there_to_stop_on():
    with pytest.raises(MetricError, match="Did you mean 'loss'"):
        train(callbacks=[fg.early_stop("los")])


def test_no_rounds():
    """They are for who evaluates the first model, or begins a folder."""
    result = train(rounds=0, evaluate=first_weight(every=1))
    assert result.rounds == 0 and np.array_equal(result.params["w"], FIRST["w"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert result.hyper == LINE.hyper
    with pytest.raises(fg.ArgumentError, match="rounds=0: nothing is trained"):
        train(rounds=0)


def test_a_column_is_widened_without_the_memory_behind_it():
    """Unused room holds whatever was in memory, such as a signaling NaN: cast, it would warn."""
    history = fg.History()
    history.record(1, {"loss": np.float32(0.5)})
    signaling = np.frombuffer(np.uint32([0x7F800001] * 64).tobytes(), np.float32).copy()
    signaling[0] = 0.5
    history._columns["loss"]._values = signaling
    history._columns["loss"]._rounds = np.resize(history._columns["loss"].rounds, 64)
    history.record(2, {"loss": np.float64(1 / 3)})
    assert history["loss"].tolist() == [0.5, 1 / 3]
