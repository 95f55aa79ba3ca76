"""Client weighting on one task: what it runs is what it says, and its claim can fail."""

from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad_experiments import Results, experiment, load, reproduce, show
from fedgrad_experiments.client_weighting.on_task import training
from fedgrad_experiments.client_weighting.on_task.outcome import JUDGED, compared, ended
from fedgrad_experiments.experiment import PAPER, OnTask

CURVES = (*training.FIXED, *training.LEARNED)


def made(seeds=10, shift=None, examples=(5, 50), task="emnist", **arrays):
    """Results without a difference, apart from the accuracy by which curves are shifted."""
    rng = np.random.default_rng(0)
    common = 0.6 + 0.05 * rng.standard_normal(seeds)
    noise = 0.004 * rng.standard_normal((len(CURVES), seeds))
    metric = common + noise - noise.mean(1, keepdims=True)
    for curve, by in (shift or {}).items():
        metric[CURVES.index(curve)] += by
    falling = np.broadcast_to([4.0, 2.0, 1.0], (4, seeds, 3)).copy()
    q = np.broadcast_to(np.array([1.0, 0.0])[:, None, None], (2, seeds, 20)).copy()
    least, most = examples
    facts = {
        "task": task,
        "about": "Made for a test",
        "metric": "accuracy",
        "examples": {"clients": 9, "least": least, "median": 7.0, "most": most},
        "curves": list(CURVES),
        "learned": list(training.LEARNED),
    }
    arrays = {
        "rounds": np.array([0, 10, 20]),
        "loss": falling,
        "metric": metric,
        "exponent": q,
        **arrays,
    }
    settings = asdict(training.Settings(OnTask(task), seeds=seeds, rounds=20))
    return Results("client-weighting", settings, facts, arrays)


def claim(results):
    (found,) = experiment("client-weighting", results.facts["task"]).claims(results)
    return found


def test_the_claim_can_hold():
    found = claim(made())
    assert (
        found.holds is True
        and "On emnist" in found.statement
        and "as on all five" in found.statement
    )
    assert "over 10 seeds" in found.evidence and "Significant" not in found.evidence
    first = compared(made(), "metric")["from 1", "fixed 1"]
    low, high = first.interval
    told = f"learned from 1 − q = 1 {100 * first.mean:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
    assert f"{told}, p {first.corrected:.2g}" in found.evidence
    assert "of other tasks" in claim(made(task="digits")).statement


@pytest.mark.parametrize(
    ("shift", "significant"),
    [
        ({"from 1": 0.02}, "learned from 1 − q = 1; learned from 1 − q = 0."),
        ({"from 0": -0.02}, "learned from 0 − q = 0; learned from 0 − q = 1."),
        ({"from 0": 0.02, "fixed 0": 0.02}, "learned from 1 − q = 0; learned from 0 − q = 1."),
    ],
)
def test_the_claim_can_fail(shift, significant):
    found = claim(made(shift=shift))
    assert found.holds is False and f"Significant: {significant}" in found.evidence
    assert claim(made(seeds=8, shift=shift)).holds is False


def test_too_few_seeds_show_nothing():
    found = claim(made(seeds=7, shift={"from 1": 0.2}))
    assert found.holds is None and "7 seeds cannot show a difference" in found.evidence
    assert found.verdict == "too small to decide"
    assert claim(made(seeds=1)).holds is None


def test_where_all_clients_count_alike_there_is_nothing_to_test():
    found = claim(made(examples=(24, 24), shift={"from 1": 0.2}))
    assert found.holds is None and "Every client has 24 examples" in found.evidence
    assert found.verdict == "not tested"


def test_a_seed_that_diverges_counts_and_is_told():
    results = made()
    results.arrays["loss"][2, 3, -1], results.arrays["loss"][0, 1, -1] = np.nan, 4.5
    results.arrays["metric"][2, 3] = np.nan
    np.testing.assert_array_equal(np.flatnonzero(ended(results, "metric", "from 1") == 0), [3])
    assert len(compared(results, "metric")["from 1", "fixed 1"].differences) == 10
    assert len(compared(results, "loss")["from 1", "fixed 1"].differences) == 9
    assert "Diverged: 1 of q = 1, by examples, 1 of q learned from 1." in claim(results).evidence
    one = tables_of(results)[0]
    assert [row[-1] for row in one.rows] == ["1 of 10", "0 of 10", "1 of 10", "0 of 10"]
    assert not any("nan" in cell for table in tables_of(results) for r in table.rows for cell in r)


def tables_of(results):
    return experiment("client-weighting", results.facts["task"]).tables(results)


def test_tables_say_what_was_compared():
    results = made(shift={"fixed 0": 0.05})
    how, metric, loss = tables_of(results)
    values = results.arrays["metric"][0]
    assert how.rows[0][:2] == [
        "q = 1, by examples",
        f"{100 * values.mean():.2f} % ± {100 * values.std():.2f}",
    ]
    assert how.rows[2][3] == "1.00 (1.00 to 1.00)" and "Made for a test" in how.title
    assert [row[0] for row in metric.rows] == [row[0] for row in loss.rows]
    assert len(metric.rows) == len(JUDGED) + 1 and metric.rows[-1][0] == "q = 0 − q = 1"
    difference = results.arrays["metric"][1] - results.arrays["metric"][0]
    assert metric.rows[-1][1] == f"{100 * difference.mean():+.2f}"
    assert metric.rows[-1][3:6] == ["10 of 10", "0.002", ""]  # for scale: not one of those judged
    assert loss.rows[0][1:5] == ["+0.0000", "+0.0000 to +0.0000", "0 of 10", "1.000"]


def test_figures_show_every_seed(tmp_path):
    results = made(seeds=9)
    shown = show(experiment("client-weighting", "emnist"), results, tmp_path)
    assert set(shown.figures) == {"loss-and-exponent", "differences"}
    (row,) = shown.figures["differences"].rows
    assert [len(chart.curves[0].x) for chart in row] == [9] * 5
    expected = 100 * (results.arrays["metric"][2] - results.arrays["metric"][0])
    np.testing.assert_allclose(row[0].curves[0].y, expected)
    for low, high in (chart.curves[1].band for chart in row):
        assert low[0] < high[0]
    assert len({chart.y_axis for chart in row}) == 1  # on one scale
    svg = (tmp_path / "differences.svg").read_text()
    assert "learned from 1 − q = 1" in svg and "mean, with its 95 % interval" in svg


# ---- a small run


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("on-task")
    on = OnTask("synthetic", {"clients": 6}, cohort_size=3)
    settings = training.Settings(on, seeds=2, rounds=4, eval_every=3, eval_clients=2)
    one = experiment("client-weighting", "synthetic", {"clients": 6})
    return settings, out, reproduce(one, out, settings, progress=False)


@pytest.mark.parametrize(("curve", "kind"), [("fixed 1", "examples"), ("fixed 0", "uniform")])
def test_fixed_exponents_are_the_usual_weightings(small_run, curve, kind):
    settings, _, shown = small_run
    task = settings.on.make()
    usual = fg.fed_avg(task.loss, fg.local_training(0.01, batch_size=10), weighting=kind)
    test = jax.tree.map(lambda x: x[: task.test.counts.sum()], task.test.everyone.store)
    for seed in range(settings.seeds):
        result = fg.fit(
            usual, task.train, params=task.init(jax.random.key(seed)), rounds=4, cohort_size=3,
            key=jax.random.key(seed), progress=False,
        )  # fmt: skip
        accuracy = float(task.metrics["accuracy"](result.params, test).mean())
        found = shown.results.arrays["metric"][CURVES.index(curve), seed]
        assert found == pytest.approx(accuracy, abs=1e-6)


def test_the_small_run_has_the_shape_that_it_says(small_run):
    settings, out, shown = small_run
    arrays, facts = shown.results.arrays, shown.results.facts
    np.testing.assert_array_equal(arrays["rounds"], [0, 3, 4])
    assert arrays["loss"].shape == (4, 2, 3) and arrays["metric"].shape == (4, 2)
    np.testing.assert_allclose(arrays["loss"][:, :, 0], np.log(10), rtol=1e-6)
    assert arrays["exponent"].shape == (2, 2, 4)
    np.testing.assert_allclose(arrays["exponent"][:, :, 0], [[1, 1], [0, 0]])
    # In the second round there is no derivative yet; Adam's first step is its learning rate.
    np.testing.assert_allclose(np.abs(np.diff(arrays["exponent"][:, :, 1:3])), 0.01, rtol=1e-3)
    assert (arrays["metric"][:, 0] != arrays["metric"][:, 1]).any()  # seeds differ
    counts = settings.on.make().train.counts
    assert facts["examples"] == {
        "clients": 6, "least": counts.min(), "median": np.median(counts), "most": counts.max()
    }  # fmt: skip
    assert (facts["task"], facts["metric"]) == ("synthetic", "accuracy")
    (only,) = shown.claims
    assert only.holds is None and "2 seeds cannot show" in only.evidence
    assert (out / "results.txt").read_text().strip() == shown.text()


def test_a_run_that_is_done_is_not_run_again(small_run, monkeypatch):
    settings, out, shown = small_run

    def refuse(*args, **more):
        pytest.fail("a model was trained")

    monkeypatch.setattr(fg, "fit", refuse)
    again = training.run(out, settings, False)
    for name, array in shown.results.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], array)


def test_stored_results_draw_the_same_figures(small_run, tmp_path):
    _, out, shown = small_run
    stored = load(out)
    again = show(experiment(stored.experiment, stored.facts["task"]), stored, tmp_path)
    assert again.text() == shown.text()
    for name in shown.figures:
        assert (tmp_path / f"{name}.svg").read_text() == (out / f"{name}.svg").read_text()


def bare():
    """A task with a loss and nothing else, whose clients have one example each."""

    def loss(params, batch):
        return (batch["x"] @ params["w"] - batch["y"]) ** 2

    rng = np.random.default_rng(0)
    clients = [
        {"x": rng.normal(size=(1, 2)).astype(np.float32), "y": np.ones(1, np.float32)}
        for _ in range(4)
    ]
    return fg.tasks.Task(fg.population(clients), lambda key: {"w": jnp.zeros(2, jnp.float32)}, loss)


def test_a_task_of_ones_own_needs_no_metrics(tmp_path):
    name = f"{__name__}:bare"
    one = experiment("client-weighting", name)
    settings = replace(one.settings("quick"), seeds=1, rounds=2)
    shown = reproduce(one, tmp_path, settings, progress=False)
    assert shown.results.facts["metric"] == "loss" and shown.results.facts["task"] == name
    (only,) = shown.claims
    assert only.holds is None and "Every client has 1 examples" in only.evidence
    # All clients alike: q = 1 and q = 0 are the same weights.
    np.testing.assert_allclose(*shown.results.arrays["metric"][:2], rtol=1e-6)


def test_the_papers_numbers_are_a_size():
    paper = experiment("client-weighting", "emnist").settings("paper")
    assert (paper.on.cohort_size, paper.rounds, paper.server_learning_rate) == (50, 1500, 1.0)
    assert paper.on.options == {"size": "paper"} and paper.hyper_learning_rate == 0.01
    for task in (*PAPER, "synthetic", "digits"):
        sizes = experiment("client-weighting", task).sizes
        assert set(sizes) == {"quick", "default", "full", "paper"}
        assert sizes["default"].seeds >= 10 or task == "cifar100"
