"""Evaluation: of each client, before the first round, and which model was the best."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.federation import InProcess
from fedgrad.training.log import read_log
from line import FIRST, line, mean_square, points

POINTS = points(clients=37)
CLIENTS = fg.population(POINTS)
LINE = line()
WEIGHTS = {"w": np.array([0.3, -1.0, 0.5], np.float32)}
KINDS = ("mean", "lowest_tenth", "highest_tenth", "percentiles")


def train(algorithm=LINE, rounds=6, **more):
    settings = {"params": FIRST, "cohort_size": 5, "key": jax.random.key(3), "progress": False}
    return fg.fit(algorithm, CLIENTS, rounds=rounds, **(settings | more))


def is_close(params, batch):
    return jnp.abs(batch["x"] @ params["w"] - batch["y"]) < 1


def by_hand(metric, clients, params=WEIGHTS):
    """What every client has, in numpy."""
    return np.array([np.mean(np.asarray(metric(params, client), float)) for client in clients])


def described(values):
    ordered, tenth = np.sort(values), int(np.ceil(len(values) / 10))
    chosen = ordered[[int((i + 0.5) * len(values) / 100) for i in range(100)]]
    return [np.mean(values), np.mean(ordered[:tenth]), np.mean(ordered[-tenth:]), chosen]


# --- of each client ---------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 9, 10, 37])
def test_how_a_metric_is_spread_over_clients(clients):
    metrics = {"loss": mean_square, "close": is_close}
    there = POINTS[:clients]
    checked = fg.Evaluation(metrics, fg.population(there), per_client=True)
    found, each = checked(WEIGHTS), checked.each_client(WEIGHTS)
    assert set(found) == {"loss", "close"} | set(checked.metrics) - set(metrics)
    for name, metric in metrics.items():
        wanted = by_hand(metric, there)
        np.testing.assert_allclose(each[name], wanted, rtol=1e-5)
        for kind, value in zip(KINDS, described(wanted), strict=True):
            np.testing.assert_allclose(found[f"per_client.{name}.{kind}"], value, rtol=1e-5)
    # What it gives without that is what it gives with it: the mean over examples.
    assert found["loss"] == fg.Evaluation(metrics, fg.population(there))(WEIGHTS)["loss"]


def test_clients_without_examples_do_not_count():
    empty = fg.Evaluation(
        {
            "loss": fg.Ratio(
                mean_square, lambda p, batch: (batch["x"][:, 0] > 1.5).astype(np.float32)
            )
        },
        CLIENTS,
        per_client=True,
    )
    each = empty.each_client(WEIGHTS)["loss"]
    there = each[~np.isnan(each)]
    assert 0 < len(there) < len(each)  # some have no such example
    found = empty(WEIGHTS)
    for kind, value in zip(KINDS, described(there), strict=True):
        np.testing.assert_allclose(found[f"per_client.loss.{kind}"], value, rtol=1e-5)


def test_a_client_that_diverges_is_among_the_highest():
    broken = [dict(c) for c in POINTS]
    broken[3]["y"] = np.full_like(broken[3]["y"], np.nan)
    checked = fg.Evaluation({"loss": mean_square}, fg.population(broken), per_client=True)
    found = checked(WEIGHTS)
    assert np.isnan(found["per_client.loss.highest_tenth"])
    assert np.isfinite(found["per_client.loss.lowest_tenth"])
    assert np.isnan(found["per_client.loss.percentiles"][-1])
    assert np.isfinite(found["per_client.loss.percentiles"][:-3]).all()


def test_clients_on_disk_portion_by_portion(tmp_path, monkeypatch):
    from fedgrad.clients import on_disk

    fg.store(tmp_path / "clients", POINTS)
    monkeypatch.setattr(on_disk, "PORTION", 500)
    stored = fg.stored(tmp_path / "clients")
    assert sum(1 for _ in stored.portions()) > 1
    settings = {"per_client": True, "batch_size": 4}
    here, there = (fg.Evaluation({"loss": mean_square}, c, **settings) for c in (CLIENTS, stored))
    wanted, found = here(WEIGHTS), there(WEIGHTS)
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)
    np.testing.assert_allclose(
        there.each_client(WEIGHTS)["loss"], here.each_client(WEIGHTS)["loss"], rtol=1e-6
    )


def test_trials_side_by_side_are_spread_apart():
    rates = np.array([0.01, 0.1], np.float32)
    together = fg.side_by_side(LINE, {"rate": rates, "noise": 0.0})
    checked = fg.Evaluation({"loss": mean_square}, CLIENTS, every=3, per_client=True)
    found = train(together, evaluate=checked).history
    assert found["eval.per_client.loss.percentiles"].shape == (3, 2, 100)
    for i, rate in enumerate(rates):
        alone = train(LINE.starting({"rate": rate, "noise": 0.0}), evaluate=checked).history
        for kind in KINDS:
            name = f"eval.per_client.loss.{kind}"
            np.testing.assert_allclose(found[name][:, i], alone[name], rtol=1e-5)


def test_what_is_spread_is_watched_and_logged(tmp_path):
    checked = fg.Evaluation({"loss": mean_square}, CLIENTS, every=2, per_client=True)
    stop = fg.early_stop("eval.all.per_client.loss.highest_tenth", patience=100)
    result = train(evaluate={"all": checked}, callbacks=[stop], out=tmp_path)
    name = "eval.all.per_client.loss.percentiles"
    assert result.history[name].shape == (4, 100)
    assert np.array_equal(read_log(tmp_path / "history.jsonl")[name], result.history[name])
    with pytest.raises(fg.ArgumentError, match=r"Did you mean 'eval\.all\.per_client\.loss\.mean'"):
        train(
            evaluate={"all": checked},
            callbacks=[fg.early_stop("eval.all.per_client.loss.men")],
        )


def test_numbers_of_clients_on_nodes_stay_there():
    with fg.executors.flower(InProcess.of(POINTS[:3])) as executor:
        checked = fg.Evaluation({"loss": mean_square}, executor.population(), per_client=True)
        with pytest.raises(fg.ArgumentError, match="only sums leave them"):
            checked.on(executor)(WEIGHTS)


@pytest.mark.parametrize("made", ["function", "without"])
def test_what_has_no_clients_to_look_at(made):
    with pytest.raises(fg.ArgumentError, match="per_client=True"):
        if made == "function":
            fg.Evaluation(lambda params: {"w": 1.0}, per_client=True)
        else:
            fg.Evaluation({"loss": mean_square}, CLIENTS).each_client(WEIGHTS)


# --- before the first round -------------------------------------------------------------------


def test_the_first_model_is_evaluated_as_round_0(tmp_path):
    seen = []
    checked = fg.Evaluation({"loss": mean_square}, CLIENTS, every=4)
    result = train(
        evaluate=checked, out=tmp_path, callbacks=[lambda r, state, metrics: seen.append(r)]
    )
    history = result.history
    assert history.rounds("eval.loss").tolist() == [0, 4, 6]
    assert history["eval.loss"][0] == checked(FIRST)["loss"]
    assert history.rounds("loss").tolist() == history.rounds("seconds").tolist() == seen
    log = read_log(tmp_path / "history.jsonl")
    assert log.rounds("eval.loss").tolist() == [0, 4, 6]
    assert log.rows()[0] == {"round": 0, "eval.loss": history["eval.loss"][0]}
    assert train(rounds=0, evaluate=checked).history.rounds("eval.loss").tolist() == [0]


def test_a_stop_that_reads_the_loss_waits_for_the_first_round(tmp_path):
    checked = fg.Evaluation({"loss": mean_square}, CLIENTS, every=4)

    def fail(round, state, metrics):
        raise ZeroDivisionError

    stop = fg.Stop("loss", lambda values: len(values) == 2)
    for callbacks in ([stop, fail], [stop]):
        try:
            result = train(evaluate=checked, callbacks=callbacks, out=tmp_path)
        except ZeroDivisionError:
            continue
    assert result.rounds == 2 and result.history.rounds("eval.loss").tolist() == [0, 2]


# --- the best one -----------------------------------------------------------------------------


def first_weight(params):
    return {"far": jnp.abs(params["w"][2] - 0.15)}


def test_the_best_model_is_kept():
    models = {}

    def watch(round, state, metrics):
        models[round] = np.asarray(state.params["w"])

    # The weight goes through 0.15 on its way to 0.64.
    checked = fg.Evaluation(first_weight, every=1)
    result = train(
        LINE.starting({"rate": 0.02, "noise": 0.0}),
        rounds=40,
        evaluate=checked,
        callbacks=[watch, fg.keep_best("eval.far")],
    )
    values = result.history["eval.far"]
    at = int(result.history.rounds("eval.far")[np.argmin(values)])
    assert 0 < at < 40, "otherwise it would tell nothing"
    assert (result.best.round, result.best.value) == (at, values.min())
    assert np.array_equal(result.best.params["w"], models[at])
    assert train(evaluate=checked).best is None
    most = train(evaluate=checked, callbacks=[fg.keep_best("eval.far", maximize=True)])
    assert most.best.value == most.history["eval.far"].max()
    assert re.fullmatch(r"Best\(eval.far \d\S{0,7}, of round \d+\)", repr(most.best))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.bool_])
def test_the_best_of_what_is_counted(dtype):
    rates = {"rate": np.array([0.1, 0.2], np.float32), "noise": 0.0}
    counted = iter(np.array([[0, 1], [1, 0], *[[0, 0]] * 5], dtype))
    checked = fg.Evaluation(lambda params: {"right": next(counted)}, every=1)
    keep = fg.keep_best("eval.right", maximize=True)
    found = train(fg.side_by_side(LINE, rates), evaluate=checked, callbacks=[keep])
    assert found.best.round.tolist() == [1, 0]


def test_the_first_model_may_be_the_best():
    worse = LINE.starting({"rate": -0.1, "noise": 0.0})
    checked = fg.Evaluation({"loss": mean_square}, CLIENTS, every=2)
    result = train(worse, evaluate=checked, callbacks=[fg.keep_best("eval.loss")])
    assert result.best.round == 0 and np.array_equal(result.best.params["w"], FIRST["w"])


def test_each_trial_has_its_best():
    rates = np.array([-0.1, 0.05], np.float32)
    together = fg.side_by_side(LINE, {"rate": rates, "noise": 0.0})
    checked = fg.Evaluation({"loss": mean_square}, CLIENTS, every=2)
    result = train(together, evaluate=checked, callbacks=[fg.keep_best("eval.loss")])
    assert result.best.round.tolist() == [0, 6]
    assert np.array_equal(result.best.value, result.history["eval.loss"].min(0))
    assert np.array_equal(result.best.params["w"][0], FIRST["w"])
    assert np.array_equal(result.best.params["w"][1], result.params["w"][1])


@pytest.mark.parametrize("at", [1, 5, 14, 25])
def test_the_best_of_a_resumed_run_is_that_of_one_that_was_never_interrupted(at, tmp_path):
    algorithm = LINE.starting({"rate": 0.02, "noise": 0.0})
    settings = {"rounds": 30, "evaluate": fg.Evaluation(first_weight, every=1)}

    def fail(round, state, metrics):
        if round == at:
            raise ZeroDivisionError

    keep = fg.keep_best("eval.far")
    with pytest.raises(ZeroDivisionError):
        train(algorithm, **settings, callbacks=[keep, fail], out=tmp_path)
    found = train(algorithm, **settings, callbacks=[keep], out=tmp_path)
    wanted = train(algorithm, **settings, callbacks=[keep])
    assert (found.best.round, found.best.value) == (wanted.best.round, wanted.best.value)
    assert np.array_equal(found.best.params["w"], wanted.best.params["w"])
    assert np.array_equal(found.history["eval.far"], wanted.history["eval.far"])
    assert found.history.rounds("eval.far").tolist() == list(range(31))
    # What was the best by another metric is not the best by this one.
    other = fg.keep_best("eval.other")
    more = {"evaluate": fg.Evaluation(lambda p: {"other": p["w"][1]}, every=1), "rounds": 32}
    again = train(algorithm, **more, callbacks=[other], out=tmp_path)
    assert again.best.metric == "eval.other" and again.best.round > 30


@pytest.mark.parametrize(
    "callbacks, message",
    [
        (lambda: [fg.keep_best("loss")], "judged by an evaluation"),
        (lambda: [fg.keep_best("eval.los")], "Did you mean 'eval.loss'"),
        (lambda: [fg.keep_best("eval.loss"), fg.keep_best("eval.loss")], "one best model"),
    ],
)
def test_what_cannot_be_kept(callbacks, message):
    checked = fg.Evaluation({"loss": mean_square}, CLIENTS)
    with pytest.raises(fg.ArgumentError, match=message):
        train(evaluate=checked, callbacks=callbacks())
