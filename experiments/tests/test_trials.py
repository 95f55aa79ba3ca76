"""Trials of an experiment: what they give does not depend on how they are run."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.cli import main
from fedgrad_experiments import ExperimentError, experiment, load, reproduce, trials
from fedgrad_experiments.experiment import OnTask, evaluations_of
from fedgrad_experiments.server_optimizer.training import DEFAULT, algorithms, key
from fedgrad_experiments.trials import Training, how_many_together, run_trials

RATE = "server.learning_rate"
STARTS = {RATE: np.array([0.5, 1.0, 1e30, 0.1], np.float32)}  # the third one diverges at once
SEEDS = [0, 0, 0, 1]


@pytest.fixture(scope="module")
def task():
    return fg.tasks.task("digits", clients=12, hidden=3)


@pytest.fixture(scope="module")
def training(task):
    def record(result):
        history = result.history
        return {
            "loss": np.asarray(history["eval.train.loss"]),
            "clients": np.asarray(history["loss"]),
        }

    return Training(task, 2, 3, evaluations_of(task, 1), record)


@pytest.fixture(scope="module")
def algorithm(task):
    return fg.fed_avg(task.loss, fg.local_training(0.1, batch_size=5))


def test_trials_side_by_side_are_those_in_turn(training, algorithm, tmp_path):
    found = {
        n: run_trials(training, algorithm, STARTS, SEEDS, tmp_path / str(n), n, False)
        for n in (1, 2, 4)
    }
    assert found[1]["loss"].shape == (4, 3)
    for n in (2, 4):
        for metric in ("loss", "clients"):
            np.testing.assert_allclose(
                found[n][metric], found[1][metric], rtol=1e-5, equal_nan=True
            )
    # One that diverges is recorded as it is, and stops no other.
    assert not np.isfinite(found[1]["loss"][2, 1:]).any()
    assert np.isfinite(found[1]["loss"][[0, 1, 3]]).all()
    assert [p.stem for p in sorted((tmp_path / "2").iterdir())] == [
        "trial-3", "trial-4", "trials-1-to-2"
    ]  # fmt: skip


def test_a_seed_is_of_the_model_and_of_the_order_of_clients(training, algorithm, task, tmp_path):
    found = run_trials(training, algorithm, STARTS, SEEDS, tmp_path, 4, False)
    alone = fg.fit(
        algorithm.starting({RATE: 0.1}), task.train, params=task.init(jax.random.key(1)),
        rounds=2, cohort_size=3, key=jax.random.key(1), progress=False,
    )  # fmt: skip
    np.testing.assert_allclose(found["clients"][3], alone.history["loss"], rtol=1e-6)


def test_interrupted_trials_go_on(training, algorithm, tmp_path, monkeypatch):
    asked, interrupted = [], []

    def fit(*args, **kwargs):
        asked.append(kwargs["out"].name)
        if len(asked) == 3 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    original = fg.fit
    monkeypatch.setattr(fg, "fit", fit)
    with pytest.raises(KeyboardInterrupt):
        run_trials(training, algorithm, STARTS, SEEDS, tmp_path / "a", 1, False)
    again = run_trials(training, algorithm, STARTS, SEEDS, tmp_path / "a", 1, False)
    assert asked == ["trial-1", "trial-2", "trial-3", "trial-3", "trial-4"]
    whole = run_trials(training, algorithm, STARTS, SEEDS, tmp_path / "b", 1, False)
    np.testing.assert_array_equal(again["loss"], whole["loss"])


@pytest.mark.parametrize(
    "bytes_each, seconds_of_few, room, expected",
    [
        (10, 3.0, 1e9, 3),  # all of one seed: they fit, and are faster together
        (10, 4.5, 1e9, 1),  # slower together than each alone
        (10, 2.0, 25, 2),  # two fit
        (10, 2.0, 5, 1),  # not even one does; it is tried all the same
    ],
)
def test_how_many_run_together(
    training, algorithm, tmp_path, monkeypatch, bytes_each, seconds_of_few, room, expected
):
    def price(training, algorithm):
        n = np.size(algorithm.hyper["server"]["learning_rate"])

        def seconds():
            assert n == 1 or bytes_each * n <= room, "what does not fit is never run"
            return 1.0 if n == 1 else seconds_of_few / 4 * n

        return trials._Price(bytes_each * n, seconds)

    monkeypatch.setattr(trials, "_price", price)
    monkeypatch.setattr(trials, "_room", lambda: room)
    kept = tmp_path / "kept"
    assert how_many_together(training, algorithm, STARTS, SEEDS, kept) == expected
    monkeypatch.delattr(trials, "_price")  # found out once
    assert how_many_together(training, algorithm, STARTS, SEEDS, kept) == expected


def test_the_price_of_a_round(training, task, algorithm):
    tuned = fg.self_tuning(algorithm, [RATE])
    one = trials._price(training, trials._from(tuned, {RATE: np.ones(1)}))
    four = trials._price(training, trials._from(tuned, {RATE: np.ones(4)}))
    model = sum(x.nbytes for x in jax.tree.leaves(task.init(jax.random.key(0))))
    assert one.seconds() > 0 and one.bytes > model
    assert four.bytes - one.bytes > 3 * model


@pytest.mark.parametrize("takes, calls", [(1, 3), (9, 3), (25, 1)])
def test_long_rounds_are_not_timed_again_and_again(monkeypatch, takes, calls):
    clock = iter(range(0, 1000, takes))
    monkeypatch.setattr(trials.time, "perf_counter", lambda: next(clock))
    called = []
    assert trials._fastest(lambda: called.append(0)) == takes
    assert len(called) == calls


def test_trials_that_cannot_be_together_are_not_priced(training, algorithm, tmp_path, monkeypatch):
    monkeypatch.delattr(trials, "_price")
    assert how_many_together(training, algorithm, STARTS, [0, 1, 2, 3], tmp_path / "kept") == 1


# ---- on a task


@pytest.fixture(scope="module")
def on_digits(tmp_path_factory):
    out = tmp_path_factory.mktemp("on-task")
    found = experiment("server-optimizer", "digits", {"clients": 12, "hidden": 3})
    small = dict(trials=2, seeds=2, rounds=3, eval_every=2, evaluated_clients=5)
    return out, found, reproduce(found, out, replace(found.settings(), **small), progress=False)


def test_an_experiment_on_a_task(on_digits):
    out, found, shown = on_digits
    facts = shown.results.facts
    assert facts["task"] == "digits" and facts["kinds"] == ["fixed", "learned"]
    assert facts["metrics"] == {"digits": "accuracy"}
    assert shown.results.arrays[key("digits", DEFAULT, "learned", RATE)].shape == (2, 2)
    # It can be drawn again from its folder alone.
    again = load(out)
    assert experiment(again.experiment, again.facts["task"]).tables(again) == shown.tables
    assert main(["report", str(out), "--quiet"]) == 0


def test_the_folder_of_other_settings_is_refused(on_digits):
    out, found, _ = on_digits
    with pytest.raises(ExperimentError, match=r"other settings \(.*rounds.*\).*another folder"):
        reproduce(found, out, found.settings(), progress=False)


def test_sizes_on_the_tasks_of_the_paper():
    for task in ("cifar100", "emnist", "shakespeare", "stackoverflow_tags", "stackoverflow_words"):
        found = experiment("server-optimizer", task, {"data": "here"})
        paper, laptop = found.settings("paper"), found.settings()
        (on,) = paper.tasks
        assert (paper.trials, paper.seeds, paper.rounds, on.cohort_size) == (50, 50, 1500, 50)
        assert on.options["size"] == "paper" and "clients" not in on.options
        assert {o.options["data"] for s in found.sizes.values() for o in s.tasks} == {"here"}
        assert "size" not in laptop.tasks[0].options
        assert ("validation" in laptop.kinds) == (task == "shakespeare")


def test_validation_clients_say_what_the_loss_is():
    found = experiment("server-optimizer", "shakespeare", {"clients": 20})
    task = found.settings("quick").tasks[0].make()
    tuned = algorithms(found.settings("quick"), task)["validation"]
    assert tuned.cohorts["gradient_cohort"] is task.validation
    bare = replace(task, validation=None)
    with pytest.raises(ExperimentError, match="no validation clients"):
        algorithms(found.settings("quick"), bare)


def test_a_task_that_cannot_be_judged_is_refused(task):
    with pytest.raises(ExperimentError, match="has no test="):
        evaluations_of(replace(task, test=None), 1)
    with pytest.raises(ExperimentError, match="has no metrics"):
        evaluations_of(replace(task, metrics={}), 1)


def test_on_a_task_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {}

    def fake(experiment, folder, settings, progress):
        asked.update(folder=folder, settings=settings)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedgrad_experiments.command.reproduce", fake)
    words = [
        "reproduce",
        "server-optimizer",
        "--task",
        "emnist",
        "--task-option",
        "data=x,clients=3",
    ]
    main([*words, "--paper"])
    assert str(asked["folder"]) == "out/server-optimizer-emnist-paper"
    (on,) = asked["settings"].tasks
    assert on == OnTask("emnist", {"size": "paper", "data": "x", "clients": 3}, 50)
    with pytest.raises(SystemExit):
        main([*words[:3], "emnits"])
    assert "Did you mean 'emnist'" in capsys.readouterr().err
    assert main(["reproduce", "server-optimizer", "--paper"]) != 0
    assert "has no size 'paper'" in capsys.readouterr().err
    assert main(["reproduce", "server-optimizer", "--task-option", "clients=3"]) != 0
    assert "no task" in capsys.readouterr().err


def test_settings_are_kept_as_json(on_digits):
    out, _, shown = on_digits
    assert json.loads((out / "settings.json").read_text())["trials"] == 2
    assert load(out).settings["tasks"][0]["options"] == {"clients": 12, "hidden": 3}
