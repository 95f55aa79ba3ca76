"""Training that needs no tuning: its tasks, the rules of others by hand, its trainings at tiny
sizes, and claims that hold, fail, or are not decided."""

import json
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.cli import main
from fedgrad_experiments import ExperimentError, Results, experiment, load, reproduce, show
from fedgrad_experiments.no_tuning import tasks as laptops
from fedgrad_experiments.no_tuning import training
from fedgrad_experiments.no_tuning.methods import METHODS, Settings, random_starts, rungs
from fedgrad_experiments.no_tuning.outcome import calibrated, outcomes
from fedgrad_experiments.no_tuning.rules import RATE, DeltaSgd, fathom, schedule_free
from fedgrad_experiments.no_tuning.tasks import TASKS, data_set
from fedgrad_experiments.no_tuning.training import key

# ---- tasks


@pytest.mark.parametrize("name", ["emnist", "cifar100", "shakespeare", "words", "tags"])
def test_tasks_of_real_data_on_generated_ones(name):
    task = getattr(laptops, name)()
    assert max(task.train.counts) <= laptops.MOST
    params = task.init(jax.random.key(0))
    found = fg.Evaluation({"loss": task.loss, **task.metrics}, task.test)(params)
    assert all(np.isfinite(value) for value in found.values())


def test_what_a_client_has_of_text_is_what_comes_next():
    pieces = {
        "x": np.array([[1, 5, 6, 7], [1, 8, 0, 0]]),
        "y": np.array([[5, 6, 7, 2], [8, 2, 0, 0]]),
    }
    found = laptops._what_is_next(pieces)
    pairs = {
        tuple(x[-3:]): y for x, y in zip(found["x"].tolist(), found["y"].tolist(), strict=True)
    }
    # Padding is nothing that comes next.
    assert pairs == {
        (0, 0, 1): pairs[0, 0, 1], (0, 1, 5): 6, (1, 5, 6): 7, (5, 6, 7): 2, (0, 1, 8): 2
    }  # fmt: skip
    assert len(found["y"]) == 6 and found["x"].shape == (6, laptops.CONTEXT)


def test_tables_have_the_scale_that_they_say():
    tasks = [TASKS[f"iris_x{scale:g}"].made("iris", None) for scale in laptops.SCALES]
    spread = [
        np.std(np.asarray(t.train.everyone.store["x"])[: t.train.counts.sum()]) for t in tasks
    ]
    np.testing.assert_allclose(np.divide(spread, laptops.SCALES), spread[1], rtol=1e-5)
    assert 0.8 < spread[1] < 1.2
    assert [data_set(name) for name in ("iris_x50", "digits")] == ["iris", "digits"]


def test_synthetic_clients_are_capped():
    task = TASKS["synthetic"].made("synthetic", None)
    assert max(task.train.counts) == 180 and max(task.test.counts) == 20


def test_data_are_found_by_name(tmp_path):
    (tmp_path / "femnist_part.npz").touch()
    assert TASKS["emnist"].file("emnist", tmp_path).name == "femnist_part.npz"
    assert TASKS["emnist"].file("emnist", tmp_path / "femnist_part.npz").suffix == ".npz"
    with pytest.raises(ExperimentError, match=r"no shakespeare\* in .*data=FOLDER"):
        TASKS["shakespeare"].file("shakespeare", tmp_path)
    with pytest.raises(ExperimentError, match=r"no folder is given.*data=FOLDER"):
        TASKS["tags"].made("tags", None)


# ---- rules of others


@pytest.fixture(scope="module")
def line():
    """Two clients, a loss whose gradient is easy, and their cohort."""

    def loss(params, batch):
        return 0.5 * batch["c"] * jnp.sum((params[None] - batch["x"]) ** 2, axis=-1)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 4, 2)).astype(np.float32)
    c = rng.uniform(0.5, 2, (2, 4)).astype(np.float32)
    clients = [{"x": x[i], "c": c[i]} for i in range(2)]
    return loss, clients, fg.cohort(clients)


def slope(client, rows, x):
    return np.mean(client["c"][rows, None] * (x - client["x"][rows]), axis=0)


def test_delta_sgd_is_its_formula(line):
    loss, clients, cohort = line
    client = DeltaSgd(batch_size=2, shuffle=False, epochs=2)
    algorithm = fg.fed_avg(loss, client)
    state = algorithm.init(jnp.zeros(2, jnp.float32))
    state, _ = algorithm.round(state, algorithm.hyper, cohort, jax.random.key(0))
    ends = []
    for one in clients:
        x = before = np.zeros(2)
        eta, theta = 0.2, 1.0
        for k in range(4):
            rows = np.arange(2) + 2 * (k % 2)
            g, g_before = slope(one, rows, x), slope(one, rows, before)
            if k:
                smooth = 2 * np.linalg.norm(x - before) / (2 * np.linalg.norm(g - g_before))
                new = min(smooth, np.sqrt(1 + 0.1 * theta) * eta)
                eta, theta = new, new / eta
            x, before = x - eta * g, x
        ends.append(x)
    np.testing.assert_allclose(state.params, np.mean(ends, axis=0), rtol=1e-5)


def test_fathom_is_its_formula(line):
    loss, clients, cohort = line
    work = fg.local_training(0.1, batch_size=4, shuffle=False)
    algorithm = fathom(fg.fed_avg(loss, work))
    state = algorithm.init(jnp.ones(2, jnp.float32))
    x, smoothed, rate, rates = np.ones(2), np.zeros(2), 0.1, []
    for t in range(4):
        state, metrics = algorithm.round(state, algorithm.hyper, cohort, jax.random.key(t))
        rates.append(rate)
        np.testing.assert_allclose(metrics.hyper[RATE], rate, rtol=1e-5)
        delta = rate * np.mean([slope(one, np.arange(4), x) for one in clients], axis=0)
        x = x - delta
        norms = np.linalg.norm(delta) * np.linalg.norm(smoothed)
        rate *= np.exp(0.01 * (delta @ smoothed / norms if norms else 0))
        smoothed = 0.5 * smoothed + 0.5 * delta
        np.testing.assert_allclose(state.params, x, rtol=1e-5)
    assert rates[0] == rates[1] < rates[2]  # the first round has nothing to compare with


def test_the_model_of_a_schedule_free_server_is_its_average(line):
    loss, clients, cohort = line
    algorithm = schedule_free(loss, fg.local_training(0.1, batch_size=4, shuffle=False))
    state = algorithm.init(jnp.ones(2, jnp.float32))
    z = x = np.ones(2)
    for t in range(3):
        y = 0.1 * z + 0.9 * x
        z = z - 0.1 * np.mean([slope(one, np.arange(4), y) for one in clients], axis=0)
        x = x + (z - x) / (t + 1)
        state, _ = algorithm.round(state, algorithm.hyper, cohort, jax.random.key(t))
    np.testing.assert_allclose(state.params, x, rtol=1e-5)


# ---- claims, on results made so that all hold, and then one does not


def made_results(tasks=("digits", "iris_x1", "iris_x50"), fewer=1, **changes):
    """Accuracies by method: fixed ones spread over all, ours at the best of them."""
    settings = Settings()
    counts = {"fedavgm": 50, "fedadam": 25, "auto": 20, "blind": 20, "self-tuning": 20, "paper": 20}
    arrays = {}
    rng = np.random.default_rng(0)
    methods = {t: [m for m, one in METHODS.items() if t in (one.only or tasks)] for t in tasks}
    for task in tasks:
        for name in methods[task]:
            method = METHODS[name]
            n = counts.get(name, 5 * max(1, len(method.rates))) // fewer
            top = {"auto": 0.97, "blind": 0.965, "self-tuning": 0.96}.get(name, 0.9)
            accuracy = top - np.linspace(0, 0.005, n)
            if name in ("fedavgm", "fedadam", "paper"):
                accuracy = rng.permutation(np.linspace(0.1, 0.95, n))
            if name.startswith("good"):
                accuracy = np.full(n, 0.95)
            found = {
                "accuracy": accuracy,
                "last": accuracy - 0.01,
                "loss": 1 - accuracy,
                "finite": np.full(n, True),
                "bytes": np.full(n, 2e6 if name == "auto" else 1e6),
                "seeds": np.arange(n),
            }
            if method.rates:
                found[f"start/{RATE}"] = np.tile(np.float32(method.rates), 5)[:n]
            if method.searches:
                found["runs"] = np.full(n, 2.5)
            arrays |= {key(task, name, what): values for what, values in found.items()}
    for name, change in changes.items():
        method, what = name.rsplit("_", 1)
        for task in tasks[:1]:
            at = key(task, method.replace("_", "-"), what)
            arrays[at] = change(arrays[at])
    about = {"metric": "accuracy", "about": "", "rounds": 9, "cohort_size": 3, "clients": 10}
    facts = {
        "tasks": dict.fromkeys(tasks, about),
        "methods": methods,
        "left out": [name for name in TASKS if name not in tasks],
    }
    return Results("no-tuning", asdict(settings), facts, arrays)


def verdicts(results):
    claims = experiment("no-tuning").claims(results)
    return {claim.statement: claim.holds for claim in claims}


def test_all_claims_can_hold():
    assert list(verdicts(made_results()).values()) == [True] * 9


BREAKS = {
    "worst tenth": {"auto_accuracy": lambda a: np.where(np.arange(20) < 3, 0.93, a)},
    "median of fed_auto is above the best": {"auto_accuracy": lambda a: np.full(20, 0.95)},
    "So is that": {"blind_accuracy": lambda a: np.where(np.arange(20) < 3, 0.93, a)},
    "And its median": {"blind_accuracy": lambda a: np.full(20, 0.95)},
    "times the bytes": {"auto_bytes": lambda b: 3.1e6 + 0 * b},
    "not finite": {"auto_finite": lambda f: np.arange(20) > 0},
    "loses at most": {"good_tuned_accuracy": lambda a: a - 0.0031},
    "ahead of every other": {"dog_accuracy": lambda a: a + 1},
    "at as many bytes": {"prodigy_longer_accuracy": lambda a: a + 1},
}


@pytest.mark.parametrize("broken", BREAKS)
def test_each_claim_can_fail(broken):
    failed = [s for s, holds in verdicts(made_results(**BREAKS[broken])).items() if holds is False]
    assert len(failed) == 1 and broken in failed[0]
    (claim,) = [
        c for c in experiment("no-tuning").claims(made_results(**BREAKS[broken])) if not c.holds
    ]
    if broken not in ("ahead of every other", "at as many bytes"):
        assert "Met on 2 of 3 tasks" in claim.evidence and "digits" in claim.evidence
        assert claim.evidence.count("NOT MET") == 1


def test_few_trainings_decide_nothing():
    claims = experiment("no-tuning").claims(made_results(fewer=5, **BREAKS["loses at most"]))
    bytes_of_one = 4  # which is known of one training
    for i, claim in enumerate(claims):
        assert claim.holds is (True if i == bytes_of_one else None)
        assert i == bytes_of_one or "Too small to decide" in claim.evidence
    # But one that is not finite is enough to refute.
    broken = made_results(fewer=5, auto_finite=lambda f: f & False)
    assert list(verdicts(broken).values()).count(False) == 1


def test_what_is_calibrated_is_calibrated_on_other_data():
    results = made_results()
    best = int(np.argmax(results.arrays[key("digits", "fedavgm", "accuracy")]))
    # iris is calibrated on digits alone, at whatever scale.
    assert calibrated(results, "iris_x1", "fedavgm") == best
    assert calibrated(results, "iris_x50", "fedavgm") == best
    found = outcomes(results, "iris_x1")["fedavgm calibrated"]
    expected = results.arrays[key("iris_x1", "fedavgm", "accuracy")][best]
    assert found.accuracy.tolist() == [expected]
    assert calibrated(made_results(tasks=("iris_x1", "iris_x50")), "iris_x1", "fedadam") is None


def test_a_random_search_takes_the_lowest_training_loss():
    results = made_results(fedavgm_loss=lambda loss: np.where(np.arange(50) == 7, -1, loss))
    found = outcomes(results, "digits")["random search"]
    assert len(found) == 50 * 49 * 48 / 6 and found.bytes == 3
    lucky = results.arrays[key("digits", "fedavgm", "accuracy")][7]
    assert np.mean(found.accuracy == lucky) == pytest.approx(3 / 50)


def test_it_is_shown(tmp_path):
    results = made_results()
    shown = show(experiment("no-tuning"), results, tmp_path)
    for name, tasks in (("", ("digits",)), ("-on-tables", ("iris_x50",))):
        svg = (tmp_path / f"best-of-n-against-one{name}.svg").read_text()
        for words in ("fed_auto", "best of n fixed FedAvgM", "bytes, 1 = a fixed training", *tasks):
            assert words in svg
    text = (tmp_path / "results.txt").read_text()
    assert "9 of 9 tested claims hold" in text
    assert "Prodigy, client rate 0.01" in text and "FedAdam as is best on other tasks" in text
    assert "emnist, shakespeare, cifar100, words, tags with --task-option data=FOLDER" in text
    goals, means, *_ = shown.tables
    shown_so_far = ["2.00x ✓", "0 of 20 ✓", "+0.0 ✓"]
    assert goals.rows[0] == ["digits", "+1.5 ✓", "+1.8 ✓", "+1.0 ✓", "+1.2 ✓", *shown_so_far]
    assert means.rows[0][:2] == ["fed_auto", "2.00"]
    assert next(row for row in means.rows if row[0].startswith("successive"))[1] == "2.50"


# ---- a small run

TINY = Settings(
    tasks=("iris_x1",), fixed=3, adam=2, starts=2, seeds=2, others=1, searched=3, rounds=2
)


SOME = ("fedavgm", "fedadam", "auto", "self-tuning", "good", "good-tuned", "prodigy", "halving")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One method of each kind, trained."""
    out = tmp_path_factory.mktemp("no-tuning")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "METHODS", {name: METHODS[name] for name in SOME})
        yield out, reproduce(experiment("no-tuning"), out, TINY, progress=False)


@pytest.mark.parametrize("name", [n for n, method in METHODS.items() if method.only != ("tags",)])
def test_every_method_can_be_trained(name, tmp_path):
    """Its rounds are traced, and its bytes counted."""
    task = TASKS["iris_x1"].made("iris_x1", None)
    work = training.Work.of(task, TASKS["iris_x1"], TINY, tmp_path, training._algorithm)
    assert work.bytes(name) > 0.9 * work.bytes("fedavgm") > 0


def test_a_small_run(small):
    out, shown = small
    arrays, facts = shown.results.arrays, shown.results.facts
    assert list(facts["tasks"]) == ["iris_x1"] and "emnist" in facts["left out"]
    assert facts["methods"] == {"iris_x1": list(SOME)}
    for name in SOME:
        n = {"fedavgm": 3, "fedadam": 2, "auto": 2, "self-tuning": 2, "prodigy": 2}.get(name, 1)
        assert arrays[key("iris_x1", name, "accuracy")].shape == (n,), name
        assert arrays[key("iris_x1", name, "bytes")][0] > 0
        assert (out / "runs" / "iris_x1" / f"{name}.npz").exists()
    assert not [p for p in (out / "runs" / "iris_x1").iterdir() if p.is_dir()]
    assert all(claim.holds is None or "bytes" in claim.statement for claim in shown.claims)
    again = show(experiment("no-tuning"), load(out), out)
    assert again.text() == shown.text()


def test_a_trial_is_the_training_that_it_says(small):
    _, shown = small
    task = TASKS["iris_x1"].made("iris_x1", None)
    start = {name: values[1] for name, values in random_starts(3).items()}
    fixed = fg.averaged(fg.fed_avgm(task.loss, fg.local_training(0.1, batch_size=10)))
    result = fg.fit(
        fixed.starting({name: float(value) for name, value in start.items()}), task.train,
        params=task.init(jax.random.key(0)), rounds=2, cohort_size=5, key=jax.random.key(0),
        progress=False,
    )  # fmt: skip
    found = fg.Evaluation(task.metrics, task.test)
    arrays = shown.results.arrays
    for what, model in (("accuracy", result.params), ("last", result.last)):
        value = arrays[key("iris_x1", "fedavgm", what)][1]
        assert value == pytest.approx(float(found(model)["accuracy"]), abs=1e-6)


def test_what_is_done_is_not_done_again(small, monkeypatch):
    out, shown = small
    (out / "runs" / "iris_x1" / "auto.npz").unlink()
    asked = []
    original = training.run_trials
    monkeypatch.setattr(
        training, "run_trials", lambda *a, **k: asked.append(a[4].name) or original(*a, **k)
    )
    again = training.run(out, TINY, False)
    assert asked == ["auto"]
    for name, values in shown.results.arrays.items():
        if not name.endswith("seconds"):
            np.testing.assert_array_equal(again.arrays[name], values)
    monkeypatch.setattr(training, "run_trials", None)
    training.run(out, TINY, False)


def test_tasks_of_one_folder_are_shown_together(small, monkeypatch, capsys):
    """What another call has done is there, and tasks without data are left out visibly."""
    out, _ = small
    monkeypatch.setattr(training, "METHODS", {"fedavgm": METHODS["fedavgm"]})
    settings = replace(TINY, tasks=("emnist", "iris_x50"))
    results = training.run(out, settings, True)
    assert list(results.facts["tasks"]) == ["iris_x1", "iris_x50"]
    assert "emnist is left out" in capsys.readouterr().err
    with pytest.raises(ExperimentError, match="data=FOLDER"):
        training.run(out, settings, False, tasks=("emnist",))


def test_a_model_that_is_not_finite_is_worth_nothing():
    task = TASKS["iris_x1"].made("iris_x1", None)
    judge = training.Judge(task, training.evaluations_of(task, 1))
    good = task.init(jax.random.key(0))
    bad = jax.tree.map(lambda leaf: leaf * jnp.nan, good)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), good, bad)
    found = judge(both)
    assert found["finite"].tolist() == [True, False] and found["accuracy"][1] == 0
    np.testing.assert_allclose(found["accuracy"][0], judge(good)["accuracy"], rtol=1e-6)
    assert judge(bad)["accuracy"] == 0 and not judge(bad)["finite"]


# ---- by name


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = {}

    def fake(experiment, folder, settings, progress):
        asked.update(folder=str(folder), settings=settings, run=experiment.run)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedgrad_experiments.command.reproduce", fake)
    main(
        ["reproduce", "no-tuning", "--quick", "--task", "digits,wine_x1", "--task-option", "data=x"]
    )
    # Tasks share a folder, whichever are run.
    assert asked["folder"] == "out/no-tuning-quick"
    assert asked["run"].keywords == {"tasks": ("digits", "wine_x1"), "data": "x"}
    main(["reproduce", "no-tuning", "--task-option", "data=x"])
    assert asked["folder"] == "out/no-tuning" and asked["run"].keywords["tasks"] == ()
    assert asked["settings"] == Settings()
    assert json.loads(json.dumps(asdict(asked["settings"])))["tasks"] == list(TASKS)
    with pytest.raises(SystemExit):
        main(["reproduce", "no-tuning", "--task", "wine_x2"])
    assert main(["reproduce", "no-tuning", "--task", "stackoverflow_words"]) != 0
    assert "no task 'stackoverflow_words' in it" in capsys.readouterr().err
    assert main(["reproduce", "no-tuning", "--task", "digits", "--task-option", "clients=3"]) != 0
    assert "no option 'clients'" in capsys.readouterr().err


def test_starts_are_the_same_whatever_is_asked_for():
    starts = random_starts(50)
    assert all((values > 0).all() for values in starts.values())
    assert starts[RATE].min() < 0.005 and starts[RATE].max() > 3
    np.testing.assert_array_equal(random_starts(50)[RATE], starts[RATE])
    assert [rungs(n) for n in (3, 9, 27)] == [2, 3, 4]
