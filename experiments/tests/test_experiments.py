"""Experiments: what they run is what they say, and their claims can fail."""

import itertools
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedgrad as fg
from fedgrad.core.errors import MissingExtra
from fedgrad.tasks import task as make_task
from fedgrad_experiments import (
    EXPERIMENTS,
    ExperimentError,
    Results,
    experiment,
    load,
    reproduce,
    show,
)
from fedgrad_experiments.client_weighting import training as weighting
from fedgrad_experiments.experiment import OnTask
from fedgrad_experiments.maximum import best_of, trials_to_reach
from fedgrad_experiments.results import Claim, Table, report
from fedgrad_experiments.server_optimizer import training as servers
from fedgrad_experiments.server_optimizer.outcome import outcome

# ---- the best of n trials


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_best_of_is_the_bootstrap_of_the_maximum(values):
    found = best_of(np.array(values))
    for n in range(1, len(values) + 1):
        maxima = sorted(map(max, itertools.product(values, repeat=n)))  # all equally likely
        assert found.mean[n - 1] == pytest.approx(np.mean(maxima))
        for p, quantile in ((0.1, found.low), (0.9, found.high)):
            least = next(m for m in maxima if np.mean(np.array(maxima) <= m) >= p - 1e-9)
            assert quantile[n - 1] == least


def test_best_of_agrees_with_drawing():
    rng = np.random.default_rng(0)
    values = rng.random(50)
    drawn = rng.choice(values, (20_000, 7)).max(1)
    found = best_of(values)
    assert found.mean[6] == pytest.approx(drawn.mean(), abs=0.003)
    assert found.low[6] == pytest.approx(np.quantile(drawn, 0.1), abs=0.02)
    assert found.high[6] == pytest.approx(np.quantile(drawn, 0.9), abs=0.02)


def test_trials_to_reach():
    curve = np.array([0.1, 0.5, 0.7])
    assert [trials_to_reach(curve, x) for x in (0.0, 0.5, 0.6, 0.7, 0.8)] == [1, 2, 3, 3, None]


# ---- results, tables, claims, figures


def test_results_are_read_back(tmp_path):
    arrays = {"a/b": np.arange(6.0).reshape(2, 3), "c": np.array([np.nan, np.inf])}
    kept = Results("x", {"seeds": 3}, {"curves": ["é"]}, arrays)
    kept.save(tmp_path / "new")
    again = load(tmp_path / "new")
    assert (again.experiment, again.settings, again.facts) == ("x", {"seeds": 3}, {"curves": ["é"]})
    assert set(again.arrays) == set(arrays)
    for name in arrays:
        np.testing.assert_array_equal(again.arrays[name], arrays[name])


def test_results_that_do_not_belong_together_are_refused(tmp_path):
    Results("x", {}, {}, {"a": np.zeros(3)}).save(tmp_path / "one")
    Results("x", {}, {}, {"a": np.zeros(4)}).save(tmp_path / "two")
    (tmp_path / "two" / "results.npz").replace(tmp_path / "one" / "results.npz")
    with pytest.raises(ExperimentError, match="of different runs"):
        load(tmp_path / "one")
    (tmp_path / "one" / "results.json").write_text("{")
    for folder in ("one", "two", "three"):
        with pytest.raises(ExperimentError, match=r"no readable results.*Run the experiment"):
            load(tmp_path / folder)


def test_tables_are_aligned():
    table = Table("A title", ["", "loss"], [["a long name", "1.0"], ["b", "10.25"]])
    assert table.text().splitlines() == [
        "A title",
        "              loss",
        "------------------",
        "a long name    1.0",
        "b            10.25",
    ]
    assert table.markdown().splitlines()[:3] == [
        "|  | loss |",
        "| --- | ---: |",
        "| a long name | 1.0 |",
    ]


def test_the_report_counts_what_was_tested():
    text = report([Claim("A.", True, "1 < 2"), Claim("B.", False, "2 > 1"), Claim("C.", None, "")])
    assert "[holds] A.\n    1 < 2" in text
    assert "[DOES NOT HOLD] B." in text and "[not tested] C." in text
    assert text.endswith("1 of 2 tested claims hold.")


def test_what_is_too_small_has_no_verdict(tmp_path):
    """Neither from the quick size nor from one seed, whichever way it came out."""
    made = [Claim("A.", True, "1 < 2"), Claim("B.", False, "2 > 1"), Claim("C.", None, "")]
    some = replace(EXPERIMENTS["client-weighting"], claims=lambda results: made)
    some = replace(some, figures=lambda results: {}, tables=lambda results: [])
    quick, ours = (asdict(some.settings(size)) for size in ("quick", "default"))
    for settings, facts, decided in (
        (quick, {"size": "quick"}, False),
        ({**ours, "seeds": 1}, {"size": ""}, False),
        (ours, {"size": "default"}, True),
        (ours, {}, True),  # of an older version
    ):
        shown = show(some, Results("x", settings, facts, {}), tmp_path)
        words = ["holds", "DOES NOT HOLD"] if decided else ["too small to decide"] * 2
        assert [claim.verdict for claim in shown.claims] == [*words, "not tested"]
        assert "2 > 1" in shown.claims[1].evidence
    assert [some.size_of(one) for one in (quick, ours, {**ours, "seeds": 1})] == [
        "quick",
        "default",
        "",
    ]


def test_a_figure_follows_the_readers_theme(tmp_path):
    x = np.arange(3)
    curves = [
        fg.charts.Curve("a curve", x, x / 2, "p0", band=(x - 1, x + 1)),
        fg.charts.Curve("dots <&>", x, x[::-1], "p1", "dots"),
    ]
    chart = fg.charts.Chart("a heading", curves, "round", "a name")
    figure = fg.charts.Figure([fg.charts.alike([chart, chart]), [chart]])
    figure.save(tmp_path / "picture.svg")
    svg = (tmp_path / "picture.svg").read_text()
    assert svg == figure.svg() == figure._repr_svg_()
    root = ElementTree.fromstring(svg)
    words = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("a heading") == 3 and "dots <&>" in words  # text stays text
    # Charts of a row that are alike share the labels of their axis.
    assert words.count("a name") == 2 and words.count("2") == 2 + 3
    style = root.find("{http://www.w3.org/2000/svg}style").text
    used = {name for e in root.iter() for name in (e.get("class") or "").split()}
    assert {"fill-paper", "stroke-p0", "fill-p0", "stroke-p1", "fill-ink", "fill-quiet"} <= used
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for name in used - {"fedgrad", "curve", "grid"}:
        # Every color has a rule, also for viewers without variables, and a dark one.
        color = name.partition("-")[2]
        assert f".{name}{{" in light.split("@supports")[0] and f"--fg-{color}:#" in dark
    # What has no color of ours would be black, which is unreadable on dark paper.
    shapes = [e for e in root.iter() if e.tag.rpartition("}")[2] in ("text", "path", "rect")]
    assert all(re.search(r"\b(fill|stroke)-", e.get("class")) for e in shapes)


# ---- the registry


def test_experiments_by_name():
    assert set(EXPERIMENTS) == {"client-weighting", "server-optimizer", "no-tuning"}
    for name, one in EXPERIMENTS.items():
        assert one.name == name and one.description
        assert {"quick", "default", "full"} == set(one.sizes)
        assert one.settings() == one.sizes["default"]
    with pytest.raises(ExperimentError, match="Did you mean 'client-weighting'"):
        experiment("client-weigthing")
    with pytest.raises(ExperimentError, match="Did you mean 'quick'"):
        experiment("client-weighting").settings("quik")


def test_the_settings_are_those_of_the_paper():
    paper = dict(clients=100, cohort_size=50, alpha=1.0, beta=1.0, batch_size=10)
    rates = dict(client_learning_rate=0.01, server_learning_rate=1.0, hyper_learning_rate=0.01)
    assert asdict(experiment("client-weighting").settings()).items() >= (paper | rates).items()
    ours = experiment("server-optimizer").settings()
    assert (ours.trials, ours.server_learning_rate, ours.momentum) == (50, 1.0, 0.9)
    assert ours.hyper_learning_rate == 0.01


# ---- client weighting: its claims, on results made so that all hold, and then one does not


def weighting_results(**changes):
    """Curves that have the properties of the paper; `changes` replace some of them."""
    settings = weighting.Settings(seeds=2)
    rounds = np.arange(0, 201, 5)
    part = rounds / 200

    def falling(early, end):
        return end + (2.3 - end) * np.exp(-part * early)

    curves = {
        "fixed 1": falling(20, 1.2),
        "fixed 0": falling(6, 0.9),
    }
    for schedule in ("serial", "parallel"):
        curves[f"{schedule} from 1"] = np.minimum(falling(20, 1.2), falling(8, 0.8))
        curves[f"{schedule} from 0"] = falling(8, 0.75)
    exponent = {
        "from 1": np.linspace(1, 0.4, 200),
        "from 0": np.minimum(0.009 * np.arange(200), 0.5),
    }
    exponents = {f"{s} {f}": exponent[f] for s in ("serial", "parallel") for f in exponent}
    curves |= {k: v for k, v in changes.items() if k in curves and len(v) == len(rounds)}
    exponents |= {k: v for k, v in changes.items() if k in exponents and len(v) == 200}
    loss = np.stack([np.stack([c, c + 0.01]) for c in curves.values()])
    return Results(
        "client-weighting",
        asdict(settings),
        {"curves": list(curves), "learned": list(exponents)},
        {
            "rounds": rounds,
            "loss": loss,
            "accuracy": np.full((6, 2, 40), 0.7),
            "exponent": np.stack([np.stack([e, e]) for e in exponents.values()]),
        },
    )


GOOD = weighting_results()
CURVES = dict(zip(GOOD.facts["curves"], GOOD.arrays["loss"][:, 0], strict=True))
WEIGHTING_BREAKS = {
    "starts much better": {"fixed 0": CURVES["fixed 1"] - 0.05 * (np.arange(41) > 30)},
    "ends better than weighting": {"fixed 0": CURVES["fixed 1"] + 0.2 * (np.arange(41) < 39)},
    "tracks or beats": {"serial from 1": CURVES["serial from 1"] + 0.1 * (np.arange(41) == 2)},
    "beats uniform weighting early": {
        "parallel from 0": CURVES["parallel from 0"] + 0.5 * (np.arange(41) == 4)
    },
    "beats both": {
        f"{s} from 0": CURVES[f"{s} from 0"] + 0.2 * (np.arange(41) == 40)
        for s in ("serial", "parallel")
    },
    "rises fast": {"serial from 0": 0.002 * np.arange(200)},
    "parallel schedule": {
        "parallel from 1": CURVES["parallel from 1"] * np.where(np.arange(41) == 40, 0.9, 1)
    },
}


def verdicts(results):
    claims = experiment(results.experiment).claims(results)
    return {claim.statement: claim.holds for claim in claims}


def test_claims_of_client_weighting_can_hold():
    found = verdicts(GOOD)
    assert len(found) == len(WEIGHTING_BREAKS) + 1
    assert list(found.values()) == [True] * len(WEIGHTING_BREAKS) + [None]


@pytest.mark.parametrize("broken", WEIGHTING_BREAKS)
def test_each_claim_of_client_weighting_can_fail(broken):
    found = verdicts(weighting_results(**WEIGHTING_BREAKS[broken]))
    failed = [statement for statement, holds in found.items() if holds is False]
    assert any(broken in statement for statement in failed)
    assert len(failed) <= 2, failed  # some of them say nearly the same


def test_client_weighting_is_shown(tmp_path):
    shown = show(experiment("client-weighting"), GOOD, tmp_path)
    assert set(shown.figures) == {"loss", "exponent"} and (tmp_path / "exponent.svg").exists()
    svg = (tmp_path / "loss.svg").read_text()
    for label in ("q = 1, by examples", "q = 0, uniform", "q learned from 1", "serial", "parallel"):
        assert label in svg
    (table,) = shown.tables
    assert table.header[1:5] == ["round 20", "round 50", "round 100", "round 200"]
    assert [row[0] for row in table.rows][2:] == [
        f"q learned from {q}, {s}" for s in ("serial", "parallel") for q in (1, 0)
    ]
    expected = GOOD.arrays["loss"][1, :, 40]
    assert table.rows[1][4] == f"{expected.mean():.3f} ± {expected.std():.3f}"
    assert "7 of 7 tested claims hold." in (tmp_path / "results.txt").read_text()


# ---- client weighting: a small run


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("weighting")
    settings = weighting.Settings(seeds=1, rounds=4, clients=6, cohort_size=3, eval_every=2)
    return settings, out, reproduce(experiment("client-weighting"), out, settings, progress=False)


@pytest.mark.parametrize(("curve", "kind"), [("fixed 1", "examples"), ("fixed 0", "uniform")])
def test_fixed_exponents_are_the_usual_weightings(small_run, curve, kind):
    settings, _, shown = small_run
    task = make_task("synthetic", clients=6, seed=0)
    usual = fg.fed_avg(
        task.loss, fg.local_training(0.01, batch_size=10, shuffle=False), weighting=kind
    )
    params = task.init(jax.random.key(0))
    store = jax.tree.map(lambda x: x[: task.train.counts.sum()], task.train.everyone.store)
    for rounds, index in ((2, 1), (4, 2)):
        result = fg.fit(
            usual, task.train, params=params, rounds=rounds, cohort_size=3,
            key=jax.random.key(0), progress=False,
        )  # fmt: skip
        arrays, facts = shown.results.arrays, shown.results.facts
        found = arrays["loss"][facts["curves"].index(curve), 0, index]
        assert found == pytest.approx(float(task.loss(result.params, store).mean()), rel=1e-5)


def test_the_small_run_has_the_shape_that_it_says(small_run):
    settings, out, shown = small_run
    arrays = shown.results.arrays
    np.testing.assert_array_equal(arrays["rounds"], [0, 2, 4])
    assert arrays["loss"].shape == (6, 1, 3) and arrays["exponent"].shape == (4, 1, 4)
    np.testing.assert_allclose(arrays["loss"][:, :, 0], np.log(10))
    # Every learned one starts where it should; Adam's first step is its learning rate. The
    # parallel schedule has no derivative in its first round.
    np.testing.assert_allclose(arrays["exponent"][:, 0, 0], [1, 0, 1, 0])
    np.testing.assert_allclose(np.abs(np.diff(arrays["exponent"][:2, 0, :2])), 0.01, rtol=1e-3)
    np.testing.assert_allclose(np.diff(arrays["exponent"][2:, 0, :2]), 0, atol=1e-7)
    np.testing.assert_allclose(np.abs(np.diff(arrays["exponent"][2:, 0, 1:3])), 0.01, rtol=1e-3)
    assert set(shown.results.facts["versions"]) >= {"fedgrad", "jax"}
    assert shown.results.settings == asdict(settings)
    assert (out / "results.txt").read_text().strip() == shown.text()


def test_a_run_that_is_done_is_not_run_again(small_run, monkeypatch):
    settings, out, shown = small_run

    def refuse(*args):
        pytest.fail("a model was evaluated")

    monkeypatch.setattr(fg.Evaluation, "__call__", refuse)
    again = weighting.run(out, settings, False)
    for name, array in shown.results.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], array)


def test_stored_results_draw_the_same_figures(small_run, tmp_path):
    _, out, shown = small_run
    again = show(experiment("client-weighting"), load(out), tmp_path)
    assert again.text() == shown.text()
    for name in ("loss.svg", "exponent.svg"):
        assert (tmp_path / name).read_text() == (out / name).read_text()


# ---- server optimizer: its claims


def server_results(trials=50, **changes):
    """Accuracies that rise evenly over trials: learned ones are all near the best."""
    settings = servers.Settings(trials=trials, seeds=trials)
    arrays = {"rounds": np.array([100, 200])}
    for on in settings.tasks:
        arrays[f"{on.name}/first loss"] = np.full(trials, 2.0)
        for initialization, kind in itertools.product(servers.INITIALIZATIONS, servers.KINDS):
            accuracy = np.linspace(0.1, 0.8, trials)
            loss = np.ones(trials)
            if kind != "fixed":
                accuracy = np.linspace(0.6, 0.85, trials) + 0.001 * (kind == "validation")
            elif initialization == servers.DEFAULT:
                loss[:3] = np.nan, np.inf, 2.1
            values = {"accuracy": accuracy, "loss": loss, "rejected": np.zeros(trials, int)}
            values |= dict.fromkeys(servers.LEARN, np.full(trials, 0.5))
            for metric, last in values.items():
                key = servers.key(on.name, initialization, kind, metric)
                last = changes.get(key, last)
                arrays[key] = np.stack([np.zeros(trials), last], axis=1)
            for name in servers.LEARN:
                arrays[f"{on.name}/{initialization}/{name}"] = np.full(trials, 0.9)
    facts = {
        "tasks": [on.name for on in settings.tasks],
        "initializations": list(servers.INITIALIZATIONS),
        "kinds": list(servers.KINDS),
    }
    return Results("server-optimizer", asdict(settings), facts, arrays)


RANDOM_CLIENT = "default server, random client"
SERVER_BREAKS = {
    "the best of all learned": {
        servers.key("digits", RANDOM_CLIENT, "learned", "accuracy"): np.full(50, 0.799)
    },
    "at least matches": {
        servers.key("synthetic", servers.DEFAULT, "learned", "accuracy"): np.full(50, 0.4)
    },
    "about a tenth": {
        servers.key("digits", "random server, random client", "learned", "accuracy"): np.append(
            np.full(49, 0.6), 0.85
        )
    },
    "no learned one does": {
        servers.key("digits", servers.DEFAULT, "learned", "loss"): np.append(np.ones(49), np.nan)
    },
}


def test_claims_of_server_optimizer_can_hold():
    assert list(verdicts(server_results()).values()) == [True] * 5 + [None]


@pytest.mark.parametrize("broken", SERVER_BREAKS)
def test_each_claim_of_server_optimizer_can_fail(broken):
    found = verdicts(server_results(**SERVER_BREAKS[broken]))
    failed = [statement for statement, holds in found.items() if holds is False]
    assert any(broken in statement for statement in failed)
    assert len(failed) <= 2, failed


def test_nothing_is_claimed_about_divergence_where_nothing_diverges():
    fine = {
        servers.key(t, servers.DEFAULT, "fixed", "loss"): np.ones(50)
        for t in ("digits", "synthetic")
    }
    found = verdicts(server_results(**fine))
    assert next(holds for claim, holds in found.items() if "no learned one" in claim) is None


def test_outcomes_of_trials_that_diverge():
    results = server_results()
    ended = outcome(results, "digits", servers.DEFAULT, "fixed")
    assert ended.diverged.tolist() == [True] * 3 + [False] * 47
    np.testing.assert_array_equal(ended.accuracy[:2], 0)  # not finite: predicts nothing
    assert ended.accuracy[2] > 0.1


def test_server_optimizer_is_tabulated():
    tables = experiment("server-optimizer").tables(server_results())
    assert len(tables) == 3 and len(tables[0].rows) == 16
    assert tables[2].rows[0] == ["digits, accuracy", "50", "80.0", "85.0", "+5.0", "", "", ""]
    by_row = {row[0]: row for row in tables[0].rows}
    assert by_row[f"{RANDOM_CLIENT}: fixed"][1] == "80.0"
    assert by_row[f"{servers.DEFAULT}: fixed"][4] == "3 of 50"
    assert int(by_row[f"{RANDOM_CLIENT}: learned"][5]) <= 5


def test_server_optimizer_is_drawn():
    results = server_results()
    figures = experiment("server-optimizer").figures(results)
    assert list(figures) == [
        "best-of-n", "trial-by-trial", "trajectories-digits", "trajectories-synthetic"
    ]  # fmt: skip
    assert {sum(map(len, figure.rows)) for figure in figures.values()} == {8}
    learned, _, fixed = figures["best-of-n"].rows[0][1].curves  # digits, random client
    for kind, line in (("fixed", fixed), ("learned", learned)):
        expected = outcome(results, "digits", RANDOM_CLIENT, kind).best.mean
        np.testing.assert_allclose(line.y, expected)
        assert line.name == kind
    dots = figures["trial-by-trial"].rows[0][1].curves[0]
    np.testing.assert_allclose(dots.x, np.linspace(0.1, 0.8, 50))
    np.testing.assert_allclose(dots.y, np.linspace(0.6, 0.85, 50))
    trial = figures["trajectories-digits"].rows[0][0].curves[0]
    np.testing.assert_allclose(trial.x, [0, 100, 200])
    np.testing.assert_allclose(trial.y, [0.9, 0.0, 0.5])


# ---- server optimizer: a small run


COMPARED = ("fixed", "learned")  # with the guard it is the same in a few rounds


@pytest.fixture(scope="module")
def server_run(tmp_path_factory):
    small = OnTask("digits", {"clients": 12, "hidden": 3}, cohort_size=3)
    settings = servers.Settings((small,), COMPARED, trials=2, seeds=2, rounds=3, eval_every=2)
    return settings, servers.run(tmp_path_factory.mktemp("servers"), settings, progress=False)


def test_a_task_that_cannot_be_made_is_found_out_first(tmp_path, monkeypatch):
    """Not after an hour of training on the one before it."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr(servers, "how_many_together", lambda *_: pytest.fail("it has begun"))
    tasks = (OnTask("synthetic", {"clients": 4}, 2), OnTask("digits"))
    settings = replace(EXPERIMENTS["server-optimizer"].settings("quick"), tasks=tasks)
    with pytest.raises(MissingExtra, match=r"pip install 'fedgrad\[tasks\]'"):
        servers.run(tmp_path, settings, False)


def test_starts_are_drawn_as_the_paper_says():
    settings = servers.Settings(trials=4000, seeds=3)
    task = make_task("digits", clients=12)
    drawn = servers.starts(settings, task)
    both = drawn["random server, random client"]
    for name in ("server.learning_rate", "client.learning_rate"):
        logs = np.log10(both[name])
        assert -3 <= logs.min() < -2.99 and 0.99 < logs.max() <= 1
        np.testing.assert_allclose(np.quantile(logs, [0.25, 0.5, 0.75]), [-2, -1, 0], atol=0.1)
    np.testing.assert_allclose(
        np.quantile(both["server.momentum"], [0.25, 0.75]), [0.25, 0.75], atol=0.05
    )
    assert (
        abs(np.corrcoef(np.log(both["server.learning_rate"]), both["server.momentum"])[0, 1]) < 0.05
    )
    only_client = drawn[RANDOM_CLIENT]
    np.testing.assert_array_equal(only_client["client.learning_rate"], both["client.learning_rate"])
    assert set(only_client["server.learning_rate"]) == {np.float32(1.0)}
    assert set(only_client["server.momentum"]) == {np.float32(0.9)}
    assert drawn["random server, default client"]["client.learning_rate"][0] == np.float32(0.1)
    assert {len(v) for v in drawn[servers.DEFAULT].values()} == {3}


@pytest.mark.parametrize("kind", COMPARED)
def test_a_trial_is_what_it_would_be_alone(server_run, kind):
    settings, results = server_run
    (on,) = settings.tasks
    task = make_task(on.name, **on.options)
    alone = servers.algorithms(settings, task)[kind]
    starts = servers.starts(settings, task)
    for initialization, trial, seed in (
        ("random server, random client", 1, 0),
        (servers.DEFAULT, 1, 1),
    ):
        hyper = {name: float(v[trial]) for name, v in starts[initialization].items()}
        result = fg.fit(
            alone.starting(hyper), task.train, params=task.init(jax.random.key(seed)), rounds=3,
            cohort_size=3, key=jax.random.key(seed), progress=False,
        )  # fmt: skip
        store = jax.tree.map(lambda x: x[: task.test.counts.sum()], task.test.everyone.store)
        accuracy = task.metrics["accuracy"](result.params, store).mean()
        key = servers.key("digits", initialization, kind, "accuracy")
        assert results.arrays[key][trial, -1] == pytest.approx(float(accuracy), abs=1e-6)
        if kind != "fixed":
            rates = results.arrays[servers.key("digits", initialization, kind, servers.LEARN[0])]
            expected = result.history[f"hyper.{servers.LEARN[0]}"]
            np.testing.assert_allclose(rates[trial], expected[[1, 2]], rtol=1e-4)


def test_results_are_in_the_rounds_that_they_say(server_run):
    _, results = server_run
    np.testing.assert_array_equal(results.arrays["rounds"], [2, 3])
    for initialization, kind in itertools.product(servers.INITIALIZATIONS, COMPARED):
        for metric in ("loss", "accuracy", *(servers.LEARN if kind == "learned" else ())):
            values = results.arrays[servers.key("digits", initialization, kind, metric)]
            assert values.shape == (2, 2)  # trials x evaluations


def test_only_one_kind_has_a_guard():
    task = make_task("digits", clients=12, hidden=3)
    kinds = servers.algorithms(servers.Settings(), task)
    assert tuple(kinds) == servers.Settings().kinds
    states = {kind: a.init(task.init(jax.random.key(0))) for kind, a in kinds.items()}
    assert states["learned"].fallback is None and states["guarded"].fallback is not None
    assert set(kinds["learned"].cohorts) == {
        "gradient_cohort"
    }  # fresh clients say what the loss is
    assert kinds["learned"].cohorts["gradient_cohort"] is None
