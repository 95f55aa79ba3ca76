"""Random search and successive halving against trials that are run one by one."""

import json
import re
import webbrowser
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedgrad as fg
from fedgrad.reports.search_page import _chart
from fedgrad.reports.write import write_report
from fedgrad.training import search_folder

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


def test_what_is_not_said_is_as_in_training(setting, population):
    algorithm, _, evaluate = setting
    said = {"cohort_size": 10, "key": jax.random.key(0)}
    searches = []
    for more in ({}, said):
        more |= {"params": PARAMS, "progress": False, "rounds": 2, "evaluate": evaluate}
        searches.append(fg.random_search(algorithm, population, SPACE, trials=3, **more))
    assert searches[0].scores.tolist() == searches[1].scores.tolist()


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


def test_the_best_has_the_best_score_and_not_the_last_place(setting, population):
    """Who was dropped may have been better than who is left becomes."""
    algorithm, options, evaluate = setting
    # Asked once before all begins, then three at the first rung and the one that is left.
    scores = iter([9.0, 0.2, 0.1, 0.9, 0.5])
    kinds = dict(trials=fg.Trials(3, rungs=2, keep=1 / 3), rounds=6, **options)
    found = fg.random_search(
        algorithm, population, SPACE, evaluate=lambda params: {"loss": next(scores)}, **kinds
    )
    assert found.scores.tolist() == [0.2, 0.5, 0.9] and found.rounds.tolist() == [2, 6, 2]
    assert found.best == 0 and found.score == 0.2
    rates = {n: v[0] for n, v in found.tried.items()}
    one = fg.fit(algorithm.starting(rates), population, rounds=2, **options)  # as it was dropped
    np.testing.assert_allclose(found.params["w"], one.params["w"], rtol=1e-6)
    assert found.hyper["server"]["momentum"] == pytest.approx(rates["server.momentum"])


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
    # Two trials of 24 bytes.
    monkeypatch.setattr("fedgrad.training.successive_halving.TOGETHER", 60)
    grouped = fg.random_search(algorithm, population, SPACE, **kinds)
    np.testing.assert_allclose(grouped.scores, together.scores, rtol=1e-6)


def test_a_self_tuned_algorithm_is_searched_too(setting, population):
    algorithm, options, evaluate = setting
    tuned = fg.self_tuning(algorithm, ["server.momentum"])
    found = fg.random_search(
        tuned, population, SPACE, trials=2, rounds=2, evaluate=evaluate, **options
    )
    assert np.isfinite(found.scores).all()


# --- choices and grids ---------------------------------------------------------------------------


def test_a_choice_draws_each_of_its_values():
    drawn = np.asarray(fg.choice([0.1, 0.3, 1.0])(KEY, 3000))
    values, counts = np.unique(drawn, return_counts=True)
    np.testing.assert_allclose(values, [0.1, 0.3, 1.0])
    assert counts.min() > 900
    assert repr(fg.choice([1, 2])) == "fg.choice([1.0, 2.0])"


def test_a_grid_is_all_combinations(setting, population):
    algorithm, options, evaluate = setting
    space = {"server.momentum": fg.choice([0.0, 0.9]), "server.learning_rate": [0.1, 0.5, 1.0]}
    kinds = dict(rounds=3, evaluate=evaluate, **options)
    found = fg.grid_search(algorithm, population, space, **kinds)
    names = ("server.learning_rate", "server.momentum")
    pairs = list(zip(*(found.tried[name] for name in names), strict=True))
    assert pairs == [(a, b) for a in (0.1, 0.5, 1.0) for b in (0.0, 0.9)]
    expected = [alone(setting, population, found, i, 3) for i in range(6)]
    np.testing.assert_allclose(found.scores, expected, rtol=1e-5)
    assert found.best == int(np.argmin(expected))
    halved = fg.grid_search(algorithm, population, space, trials=fg.Trials(rungs=2), **kinds)
    assert sorted(halved.rounds.tolist()) == [1] * 4 + [3] * 2


# --- hyperparameters that are vectors -------------------------------------------------------------


def by_feature(learning_rate, scale):
    """SGD whose steps are scaled, each feature by its own number."""
    with_scale = optax.stateless(lambda updates, _: {"w": updates["w"] * scale})
    return optax.chain(optax.sgd(learning_rate), with_scale)


SCALE = np.array([1.0, 0.5, 0.1])
SCALED = fg.fed_opt(
    loss,
    server=fg.optimizer(by_feature, learning_rate=1.0, scale=jnp.asarray(SCALE)),
    client=fg.local_training(0.05, batch_size=5),
)
EQUAL = {  # searches of three trials that are equal: as many as the vector has entries
    "a grid": (fg.grid_search, [0.5, 0.5, 0.5], {}),
    "a choice": (fg.grid_search, fg.choice([0.5, 0.5, 0.5]), {}),
    "drawn": (fg.random_search, lambda key, n: jnp.full(n, 0.5), {"trials": 3}),
    "halving": (fg.grid_search, [0.5, 0.5, 0.5], {"trials": fg.Trials(rungs=2)}),
    "in a folder": (fg.grid_search, [0.5, 0.5, 0.5], {"out": True}),
}


TUNED = fg.self_tuning(SCALED, "server.scale")
EQUAL = {name: (SCALED, None, *row) for name, row in EQUAL.items()} | {
    "in parts": (SCALED, 60, *EQUAL["a grid"]),  # bytes: two trials at once
    "one by one, halving": (SCALED, 1, *EQUAL["halving"]),
    "a vector that is learned": (TUNED, None, *EQUAL["a grid"]),
}


@pytest.mark.parametrize("algorithm, together, search, values, more", EQUAL.values(), ids=EQUAL)
def test_equal_trials_have_equal_scores(
    setting, population, tmp_path, monkeypatch, search, values, more, algorithm, together
):
    """Wherever they are, and also if a hyperparameter that is not tried is a vector."""
    if together is not None:
        monkeypatch.setattr("fedgrad.training.successive_halving.TOGETHER", together)
    _, options, evaluate = setting
    space = {"server.learning_rate": values}
    kinds = dict(rounds=3, evaluate=evaluate, **options, **more)
    kinds |= {"out": tmp_path} if "out" in more else {}
    found = search(algorithm, population, space, **kinds)
    started = algorithm.starting({"server.learning_rate": 0.5})
    lengths = {int(n) for n in found.rounds}
    alone = {n: fg.fit(started, population, rounds=n, **options).params for n in lengths}
    wanted = [float(evaluate(alone[int(n)])["loss"]) for n in found.rounds]
    np.testing.assert_allclose(found.scores, wanted, rtol=1e-6)
    assert all(len(set(found.scores[found.rounds == n])) == 1 for n in lengths)
    np.testing.assert_array_equal(found.hyper["server"]["scale"], SCALE)
    if "out" in more:
        again = search(algorithm, population, space, **kinds)
        np.testing.assert_array_equal(again.scores, found.scores)


@pytest.mark.parametrize(
    "search, values",
    [
        (fg.grid_search, [1.0, 0.5, 0.1]),  # a list of values, or a vector?
        (fg.grid_search, SCALE),
        (fg.grid_search, [SCALE, 2 * SCALE]),
        (fg.random_search, fg.uniform(0, 1)),
        (fg.random_search, fg.choice([0.1, 1.0])),
        (fg.random_search, lambda key, n: jnp.ones((n, 3))),
    ],
)
def test_a_search_tries_numbers(setting, population, search, values):
    _, options, evaluate = setting
    kinds = dict(rounds=1, evaluate=evaluate, **options)
    kinds |= {"trials": 3} if search is fg.random_search else {}
    clients = Tripping(population, None)
    with pytest.raises(fg.ArgumentError, match=r"'server.scale' is float64\[3\].*a search tries"):
        search(SCALED, clients, {"server.scale": values}, **kinds)
    assert not clients.asked


# --- kept in a folder ----------------------------------------------------------------------------


class Tripping(fg.Population):
    """Clients of whom the sampling of one round is interrupted, once; it counts the rounds."""

    def __init__(self, population, trips):
        self.population, self.trips, self.asked = population, trips, 0

    def __len__(self):
        return len(self.population)

    def select(self, clients):
        self.asked += 1
        if self.asked == self.trips:
            raise KeyboardInterrupt
        return self.population.select(clients)


@pytest.mark.parametrize("trips", [2, 5, 9, 12])
def test_an_interrupted_search_goes_on_exactly(setting, population, tmp_path, monkeypatch, trips):
    """Within a part, between parts, and at a later rung: nothing that was done is done again."""
    algorithm, options, evaluate = setting
    monkeypatch.setattr("fedgrad.training.successive_halving.TOGETHER", 100)  # two trials at once
    kinds = dict(trials=fg.Trials(6, rungs=2), rounds=6, evaluate=evaluate, **options)
    clients = Tripping(population, None)
    straight = fg.random_search(algorithm, clients, SPACE, **kinds)
    whole = clients.asked
    clients = Tripping(population, trips)
    with pytest.raises(KeyboardInterrupt) as caught:
        fg.random_search(algorithm, clients, SPACE, out=tmp_path / "search", **kinds)
    assert "run it again to go on from there" in caught.value.__notes__[0]
    found = fg.random_search(algorithm, clients, SPACE, out=tmp_path / "search", **kinds)
    for name in ("scores", "rounds", "best"):
        assert np.array_equal(getattr(found, name), getattr(straight, name)), name
    jax.tree.map(np.testing.assert_array_equal, found.params, straight.params)
    jax.tree.map(np.testing.assert_array_equal, found.hyper, straight.hyper)
    again = fg.random_search(algorithm, clients, SPACE, out=tmp_path / "search", **kinds)
    assert again.scores.tolist() == straight.scores.tolist()
    # What a run is is written with its first cohort, once in each part and each call.
    described = len(list((tmp_path / "search").glob("rung-*/part-*")))
    assert clients.asked <= whole + 9 + 3 * described


def test_what_a_search_leaves(setting, population, tmp_path):
    algorithm, options, evaluate = setting
    kinds = dict(trials=fg.Trials(4, rungs=2, keep=0.5), rounds=4, evaluate=evaluate, **options)
    found = fg.random_search(algorithm, population, SPACE, out=tmp_path, **kinds)
    kept = search_folder.read(tmp_path)
    assert kept.objective == "loss" and kept.best == found.best and not kept.maximize
    np.testing.assert_array_equal(kept.scores, found.scores)
    np.testing.assert_array_equal(kept.rounds, found.rounds)
    jax.tree.map(np.testing.assert_array_equal, dict(kept.tried), found.tried)
    assert kept.json() == found.standing.json()
    page = (tmp_path / "report.html").read_text()
    assert f"Trial {found.best} has the lowest loss" in page and '<html lang="en">' in page
    parts = [path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("rung-*/part-*")]
    assert sorted(parts) == ["rung-1/part-1", "rung-2/part-1"]
    config = json.loads((tmp_path / "rung-2/part-1/config.json").read_text())
    assert (
        sorted(config["config"]["search"]["trials"]) == np.flatnonzero(found.rounds == 4).tolist()
    )
    other = {"server.learning_rate": fg.uniform(0.1, 0.2)}
    for changes, says in (
        (
            {"space": other},
            r"another search:\n  server.learning_rate of trial 0: \S+ in the folder, 0.1\d* now"
            r".\n  server.momentum of trial 0: 0\S+ in the folder, nothing now",
        ),
        ({"rounds": 6}, r"search:\n  rounds of the rungs: \(2, 4\) in the folder, \(3, 6\) now"),
        (
            {"trials": fg.Trials(5, rungs=2, keep=0.5)},
            "search:\n  trials: 4 in the folder, 5 now.\nTo",
        ),
    ):
        clients = Tripping(population, None)
        with pytest.raises(fg.FederatedError, match=says):
            fg.random_search(
                algorithm, clients, **{"space": SPACE, "out": tmp_path, **kinds, **changes}
            )
        assert not clients.asked
    with pytest.raises(fg.FederatedError, match="is not what a search writes"):
        search_folder.read(tmp_path / "rung-1")


def test_a_search_that_differs_late_says_where(setting, population, tmp_path):
    algorithm, options, evaluate = setting
    grids = [
        {"server.learning_rate": [0.1, last], "server.momentum": [0.0, 0.5, 0.6]}
        for last in (0.3, 0.30000001)
    ]
    kinds = dict(rounds=1, evaluate=evaluate, out=tmp_path, **options)
    fg.grid_search(algorithm, population, grids[0], **kinds)
    with pytest.raises(fg.FederatedError, match=r"of trial 3: 0.3 in .*, 0.30000001 now"):
        fg.grid_search(algorithm, population, grids[1], **kinds)


def test_a_run_and_a_search_have_folders_of_their_own(setting, population, tmp_path):
    algorithm, options, evaluate = setting
    kinds = dict(trials=2, rounds=2, evaluate=evaluate, **options)
    fg.random_search(algorithm, population, SPACE, out=tmp_path, **kinds)
    for resume in (True, False):
        clients, folder = Tripping(population, None), fg.run_folder(tmp_path, resume=resume)
        with pytest.raises(fg.FederatedError, match=r"holds a search .*such as out='.*run'"):
            fg.fit(algorithm, clients, rounds=2, out=folder, **options)
        assert clients.asked <= 1  # to say what the run is
    with pytest.raises(fg.FederatedError, match=r"holds a search, not a run. Call fg.random_se"):
        fg.load(tmp_path)
    assert not (tmp_path / "config.json").exists()
    fg.fit(algorithm, population, rounds=2, out=tmp_path / "run", **options)
    with pytest.raises(fg.FederatedError, match=r"holds a run .*such as out='.*search'"):
        fg.random_search(algorithm, population, SPACE, out=tmp_path / "run", **kinds)
    assert not (tmp_path / "run/search.json").exists()


def test_more_rounds_go_on(setting, population, tmp_path):
    algorithm, options, evaluate = setting
    kinds = dict(trials=3, evaluate=evaluate, **options)
    clients = Tripping(population, None)
    for rounds in (2, 5):
        asked = clients.asked
        found = fg.random_search(algorithm, clients, SPACE, out=tmp_path, rounds=rounds, **kinds)
    assert clients.asked - asked <= 3 + 1  # and what says what the run is
    straight = fg.random_search(algorithm, population, SPACE, rounds=5, **kinds)
    np.testing.assert_array_equal(found.scores, straight.scores)
    anew = fg.run_folder(tmp_path, resume=False)
    found = fg.random_search(algorithm, population, SPACE, out=anew, rounds=2, **kinds)
    assert found.rounds.tolist() == [2, 2, 2]


def relabeled(population):
    """The same clients, of whom one has other labels."""
    cohort, labels = population.everyone, np.array(population.everyone.store["y"])
    labels[int(cohort.offset[3])] += 1
    store = {**cohort.store, "y": jnp.asarray(labels)}
    return replace(population, everyone=replace(cohort, store=store))


def test_a_search_on_other_data_is_another_search(setting, population, tmp_path):
    algorithm, options, evaluate = setting
    others, grid = relabeled(population), {"server.learning_rate": [0.1, 0.3]}
    kinds = dict(rounds=2, out=tmp_path, **options)
    fg.grid_search(algorithm, population, grid, evaluate=evaluate, **kinds)
    judged = fg.Evaluation({"loss": loss}, others)
    for clients, by, says in (
        (others, evaluate, r"\n  clients have other examples .*\n.*resume=\"other data\""),
        (population, judged, r"\n  clients of the evaluation have other examples .*\n.*other data"),
    ):
        with pytest.raises(fg.FederatedError, match=says):
            fg.grid_search(algorithm, clients, grid, evaluate=by, **kinds)
    kinds |= {"out": fg.run_folder(tmp_path, resume="other data"), "rounds": 3}
    found = fg.grid_search(algorithm, others, grid, evaluate=judged, **kinds)
    assert found.rounds.tolist() == [3, 3]


def test_a_second_search_in_a_folder_is_refused(setting, population, tmp_path):
    algorithm, options, evaluate = setting
    kinds = dict(trials=2, rounds=2, out=tmp_path, **options)

    def judged(params):
        if (tmp_path / "search.json").exists():
            with pytest.raises(fg.FederatedError, match=r"Another training writes to .*this one"):
                fg.random_search(algorithm, population, SPACE, evaluate=evaluate, **kinds)
            refused.append(True)
        return evaluate(params)

    refused = []
    fg.random_search(algorithm, population, SPACE, evaluate=judged, **kinds)
    assert refused
    again = fg.random_search(algorithm, population, SPACE, evaluate=evaluate, **kinds)
    assert again.rounds.tolist() == [2, 2]  # the folder is free


# --- what is wrong -------------------------------------------------------------------------------


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
        ({"trials": fg.Trials()}, "How many trials are drawn"),
        ({"space": ["server.learning_rate"]}, "something to try, by name"),
        ({"space": {"server.learning_rate": [0.1, 1]}}, r"fg.choice\(\[0.1, 1.0\]\)"),
        ({"space": {"server.learning_rate": lambda round: 0.1}}, "called with .key, number of"),
        (
            {"space": {"server.learning_rate": lambda key, n: jnp.zeros(n + 1)}},
            r"float64\[3\], and not one finite number for each of 2",
        ),
        (
            {"space": {"server.learning_rate": lambda key, n: jnp.full(n, jnp.nan)}},
            "not one finite number",
        ),
        ({"evaluate": None}, "evaluate= takes a function"),
        ({"evaluate": lambda params: {"acc": 1.0}}, "gives no metric 'loss'. Known: acc"),
        ({"evaluate": lambda params: 1.0}, "Give metrics by name"),
        ({"evaluate": loss}, "takes other arguments"),
        ({"params": None}, "params= is the model"),
        ({"algorithm": fg.fed_avg}, "Call it: fg.fed_avg"),
        ({"trial": 3}, r"random_search\(\) has no argument 'trial'. Did you mean 'trials'"),
        ({"cohortsize": 3}, "Did you mean 'cohort_size'"),
        (
            {
                "algorithm": fg.self_tuning(
                    fg.fed_avgm(loss), {"server.learning_rate": fg.log(1e-3, 1)}
                )
            }
            | {"space": {"server.learning_rate": fg.uniform(0.5, 3)}, "trials": 9},
            "outside of its bounds, 0.001 to 1",
        ),
    ],
)
def test_errors(setting, population, change, says):
    algorithm, options, evaluate = setting
    kinds = {"space": SPACE, "trials": 2, "rounds": 1, "evaluate": evaluate, **options, **change}
    clients = Tripping(population, None)
    with pytest.raises(fg.ArgumentError, match=says):
        fg.random_search(kinds.pop("algorithm", algorithm), clients, **kinds)
    assert not clients.asked  # nobody trained


@pytest.mark.parametrize(
    "change, says",
    [
        ({"space": {"server.momentum": fg.uniform(0, 1)}}, r"uniform\(0, 1\).*can be counted"),
        ({"space": {"server.momentum": []}}, "give the values to choose from"),
        ({"space": {"server.momentun": [0.1]}}, "Did you mean 'server.momentum'"),
        ({"trials": 3}, "this grid has 2"),
        ({"trials": fg.Trials(3)}, "this grid has 2"),
        ({"trials": fg.Trials(objective="los")}, "Did you mean 'loss'"),
    ],
)
def test_grids_that_make_no_sense(setting, population, change, says):
    algorithm, options, evaluate = setting
    kinds = {"space": {"server.momentum": [0.1, 0.2]}, "rounds": 1, "evaluate": evaluate}
    clients = Tripping(population, None)
    with pytest.raises(fg.ArgumentError, match=says):
        fg.grid_search(algorithm, clients, **{**kinds, **options, **change})
    assert not clients.asked


@pytest.mark.parametrize(
    "options, says",
    [
        ({"rungs": 0}, "rungs=0: give a whole number"),
        ({"rungs": 3, "keep": 1.0}, "keep a part between 0 and 1"),
        ({"keep": 0.5}, "at each of several rungs"),
        ({"objective": 3}, "name a metric"),
        ({"rung": 3}, "Did you mean 'rungs'"),
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
    with pytest.raises(fg.ArgumentError, match="two finite numbers"):
        fg.uniform("0", "1")
    for wrong in ([], "ab", [0.1, float("nan")], [True], 3j):
        with pytest.raises(fg.ArgumentError, match="finite numbers"):
            fg.choice(wrong)
    values = np.asarray(fg.log_uniform(1e-3, 10)(KEY, 20_000))
    assert np.median(values) == pytest.approx(0.1, rel=0.05)


# --- its report ----------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path):
    """A search of five trials, of which one has diverged."""
    standing = search_folder.Standing(
        "accuracy",
        True,
        {"a": np.array([0.001, 0.01, 0.1, 1.0, 10.0]), "b <i>": np.arange(5.0)},
        np.array([0.1, 0.5, 0.875, 0.4, np.nan]),
        np.array([3, 3, 9, 9, 3]),
        2,
        (3, 9),
    )
    search_folder.SearchFolder.of(tmp_path, {}).write(standing)
    return tmp_path, standing


def test_the_report_of_a_search(kept):
    folder, standing = kept
    assert write_report(folder) == folder / "report.html"
    page = (folder / "report.html").read_text()
    assert f"jax {jax.__version__}" in page
    assert "5 trials · 2 rungs, up to 9 rounds" in page
    assert "Trial 2 has the highest accuracy, 87.5 %: a 0.1, b &lt;i&gt; 2." in page
    assert page.count('class="plot"') == 2 and "1 diverged" in page and "<i>" not in page
    rows = [re.sub("<[^>]*>", " ", row).split() for row in page.split("<tr>")[2:]]
    assert [row[0] for row in rows] == ["2", "1", "3", "0", "4"]  # from the best to the worst
    assert rows[0][:6] == ["2", "87.5", "%", "0.1", "2", "9"] and "diverged" in rows[-1]


def test_what_is_drawn_by_its_magnitude_is_shown_so(setting, population, tmp_path):
    """Also over less than two decades, and from what the folder says; as before of an old one."""
    narrow = {"server.learning_rate": fg.log_uniform(0.1, 1.0), "server.momentum": fg.uniform(0, 1)}
    algorithm, options, evaluate = setting
    options = {**options, "evaluate": evaluate, "trials": 4, "rounds": 1, "out": tmp_path}
    found = fg.random_search(algorithm, population, narrow, **options)
    assert found.standing.logarithmic == {"server.learning_rate": True, "server.momentum": False}
    kept = search_folder.read(tmp_path)
    rate, momentum = (_chart(kept, name).x_axis for name in narrow)
    assert rate.logarithmic and not momentum.logarithmic
    path = tmp_path / "search.json"
    old = json.loads(path.read_text())
    del old["logarithmic"]
    path.write_text(json.dumps(old))
    assert search_folder.read(tmp_path).logarithmic == {}


def test_the_report_of_a_search_that_is_going_on(kept):
    folder, standing = kept
    begun = replace(standing, scores=np.full(5, np.nan), rounds=np.zeros(5, int), best=0)
    search_folder.SearchFolder.of(folder, {}).write(begun)
    assert '<html lang="en" data-live>' in (folder / "report.html").read_text()  # it is followed
    page = write_report(folder).read_text()
    assert "data-live>" not in page  # nobody knows whether it goes on
    assert "So far no trial is done yet." in page and "not yet" in page and "Scores" not in page
    rung = replace(standing, rounds=np.full(5, 3))
    search_folder.SearchFolder.of(folder, {}).write(rung)
    assert "It is not over yet." in write_report(folder).read_text()


def test_the_report_of_a_search_is_opened_once_and_can_be_left_out(
    setting, population, tmp_path, monkeypatch
):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    algorithm, options, evaluate = setting
    kinds = dict(trials=2, rounds=2, evaluate=evaluate, **options)
    for name, more in (("a", {"open": True}), ("b", {"report": False})):
        folder = fg.run_folder(tmp_path / name, **more)
        fg.random_search(algorithm, population, SPACE, out=folder, **kinds)
    assert opened == [(tmp_path / "a" / "report.html").as_uri()]
    assert not (tmp_path / "b" / "report.html").exists()


def test_a_report_that_fails_does_not_end_a_search(kept, monkeypatch):
    def fail(folder, standing, open):
        raise ZeroDivisionError

    folder, standing = kept
    monkeypatch.setattr(search_folder, "_reports", [fail])
    with pytest.warns(RuntimeWarning, match="training goes on: ZeroDivisionError"):
        search_folder.SearchFolder.of(folder, {}).write(standing)
