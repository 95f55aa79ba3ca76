"""Sentences of the documentation, each above a test of what it says.

A sentence has to stand on its page (or in its docstring) as it does here, so that the two cannot
drift apart. Here is what no other test shows; numbers are compared with the results that are kept.
"""

import dataclasses
import inspect
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import fedgrad as fg
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.experiments import load
from fedgrad.experiments.no_tuning.outcome import outcomes
from fedgrad.experiments.paired import LEVEL, least_p
from fedgrad.tasks.registry import TASKS

ROOT = Path(__file__).resolve().parent.parent
SAID = []


def says(page, sentence):
    """This sentence of a page, or of the docstring of `fg.name`, is what the test is about."""
    SAID.append((page, sentence))
    return lambda test: test


def text_of(page):
    if page.startswith("fg."):
        return inspect.getdoc(getattr(fg, page.removeprefix("fg.")))
    return (ROOT / page).read_text(encoding="utf-8")


C, X, Z = fg.CLIENTS, jnp.ones(3), jnp.arange(12.0).reshape(4, 3)
PARAMS = {"w": jnp.zeros(2)}


def traffic(fun, *args):
    """(down, up, times) of each round."""
    plan = fg.plan(fg.program(fun, z=C), *args)
    return [(t.down, t.up, t.times) for t in plan.traffic]


def scanned(body, x):
    return lax.scan(lambda c, _: (body(c), None), x, None, length=10)[0]


def a_population(*sizes):
    rng = np.random.default_rng(len(sizes))
    return fg.population([{"y": rng.normal(size=(n, 2))} for n in sizes])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    params: Any


def loss(params, batch):
    return jnp.sum((batch["y"] - params["w"][None]) ** 2, axis=1)


def train(clients, algorithm=None, rounds=3, **options):
    algorithm = algorithm or fg.fed_avg(loss, client_learning_rate=0.1)
    options = {"cohort_size": 3, "key": jax.random.key(0), "progress": False, **options}
    return fg.fit(algorithm, clients, params=PARAMS, rounds=rounds, **options)


# --- programs, plans, derivatives ---------------------------------------------------------------


@says("docs/programs.md", "However many means a program takes, the number of clients is sent once;")
@says("docs/programs.md", "for a mean inside of a loop or a branch, once each time.")
@says("fg.mean", "is sent once; inside of a loop, once per iteration.")
def test_the_number_of_clients_is_sent_once_and_in_a_loop_in_every_iteration():
    def twice(x, z):
        middle = fg.mean(z)
        return fg.mean((z - fg.broadcast(middle)) ** 2), fg.mean(z**3)

    assert traffic(twice, X, Z) == [(0, 3 + 3 + 1, 1), (3, 3, 1)]

    def looped(x, z):
        return scanned(lambda c: fg.mean(fg.broadcast(c) * z), x)

    assert traffic(looped, X, Z) == [(3, 3 + 1, 10)]


@says("docs/programs.md", "each side can make it for itself, so it is never sent.")
@says("docs/programs.md", "constant up to 1,024 numbers; a [larger one](#errors) is at the server.")
@pytest.mark.parametrize("size, sent", [(1024, 0), (1025, 1025)])
def test_a_constant_is_never_sent_and_a_large_array_from_outside_is_none(size, sent):
    outside = jnp.ones(size)
    assert traffic(lambda z: fg.sum(jnp.sum(fg.broadcast(outside)) * z[0]), Z) == [(sent, 1, 1)]


@says("docs/programs.md", "and only one key is sent: a client folds its own index into it.")
def test_only_one_key_is_sent_however_many_clients_use_it():
    def noisy(key, z):
        first, second = fg.client_key(key), jax.random.fold_in(fg.client_key(key), 1)
        return fg.sum(jax.random.normal(first) + jax.random.normal(second) + z[0])

    assert traffic(noisy, jax.random.key(0), Z) == [(2, 1, 1)]  # a key is two numbers


@says("docs/plans.md", "A value is broadcast once, however often it is used;")
@says("docs/plans.md", "one that is broadcast inside of a loop is sent in every iteration.")
@says("docs/plans.md", "What is not needed for the result is removed before anything is counted.")
def test_a_value_is_broadcast_once_and_what_is_not_needed_is_not_counted():
    def rounds(x, z):
        middle = fg.mean(z * fg.broadcast(x))
        unused = fg.sum(z**5)  # noqa: F841
        return fg.mean((z - fg.broadcast(middle)) * fg.broadcast(x))

    assert traffic(rounds, X, Z) == [(3, 4, 1), (3, 3, 1)]

    def looped(x, z):
        def both(c):  # of which one is not asked for in the end
            return fg.sum(fg.broadcast(c[0]) * fg.broadcast(x) * z), c[1] + fg.sum(z**3)

        return scanned(both, (x, x))[0]

    assert traffic(looped, X, Z) == [(6, 3, 10)]


@says("docs/plans.md", "`None` inside of a `while_loop` or a `cond`, where the data decide.")
def test_how_often_a_round_happens_is_not_known_where_data_decide():
    def branch(x, z):
        return lax.cond(x[0] > 0, lambda: fg.sum(z), lambda: x)

    def looped(x, z):
        return lax.while_loop(lambda c: c[0] < 9, lambda c: c + fg.sum(z) + 1, x)

    assert [traffic(f, X, Z)[0][2] for f in (branch, looped)] == [None, None]


@says(
    "docs/derivatives.md", "so no iteration is visited again (unless `readdress=True` allows pull)"
)
@says("docs/derivatives.md", 'complex ones need `mode="reverse"`.')
def test_auto_goes_forward_through_loops_unless_it_may_ask_again():
    @fg.program(z=C)
    def descend(x, z):
        return jnp.sum(scanned(lambda c: c - fg.mean(jnp.tanh(fg.broadcast(c) - z)), x) ** 2)

    args = jnp.ones(20), jnp.ones((4, 20))
    found = fg.plan(fg.grad(descend), *args)
    assert set(found.rules) <= {"push", "local"} and found.rounds == 11
    allowed = fg.plan(fg.grad(descend, mode=fg.CostModel(readdress=True)), *args)
    assert allowed.rules == ("pull",) and allowed.rounds == 21

    size = fg.program(lambda x, z: fg.sum(jnp.sum(jnp.abs(fg.broadcast(x)) * z)), z=C)
    complex_x = jnp.full(3, 1 + 1j)
    assert jnp.iscomplexobj(fg.grad(size, mode="reverse")(complex_x, Z))
    with pytest.raises(fg.ArgumentError, match="mode='reverse'"):
        fg.grad(size)(complex_x, Z)


# --- what is compiled, who takes part, what is kept ---------------------------------------------


@says("docs/executors.md", "It is compiled once for each set of shapes and dtypes")
@says(
    "docs/memory-and-compile-time.md", "another cohort of as many clients of the same population,"
)
@says("docs/memory-and-compile-time.md", "or the cohort size, the population or the algorithm does")
def test_other_cohorts_of_a_population_compile_nothing_and_other_sizes_do():
    traced = []

    @fg.program(mine=C)
    def total(mine):
        traced.append(1)
        return fg.sum(
            mine.fold(lambda s, b, m: s + jnp.sum(jnp.where(m[:, None], b["y"], 0)), 0.0, 4)
        )

    def traces(*cohorts):
        before = len(traced)
        for cohort in cohorts:
            total(cohort)
        return len(traced) - before

    clients = a_population(3, 9, 5, 7)
    assert traces(clients.select([0, 1]), clients.select([2, 3]), clients.select([1, 1])) == 1
    assert traces(clients.select([0, 1, 2])) == 1
    assert traces(a_population(4, 8, 5, 8).select([0, 1])) == 1


@says("docs/training.md", "depend on `key`, the number of the round, the number of clients and")
@says("fg.fit", "runs of different algorithms with one key see the same clients in the same")
def test_the_clients_of_a_round_depend_on_nothing_else():
    clients = a_population(*range(3, 15))
    seen = []

    @fg.program(cohort=C)
    def who(state, hyper, cohort, key):
        mine = fg.sum(jnp.sum(cohort.take(jnp.arange(1))["y"]))
        return state, fg.Metrics(loss=mine, extra={"key": jax.random.uniform(key)})

    base = fg.fed_avg(loss)
    for rate, rounds in ((0.1, 4), (0.3, 6)):
        own = fg.Algorithm(base.init, who, {**base.hyper, "more": rate}, loss)
        seen.append(train(clients, own, rounds).history)
    for name in ("loss", "key"):
        np.testing.assert_array_equal(seen[0][name], seen[1][name][:4])
    few, more = (clients.sample(jax.random.key(0), n, round=2) for n in (3, 4))
    assert not np.array_equal(few.index, more.index)


@says("docs/training.md", "are these arrays, of the rounds that are under way (at most 9)")
def test_at_most_nine_rounds_are_under_way(tmp_path):
    rng = np.random.default_rng(0)
    fg.store(tmp_path / "clients", ({"y": rng.normal(size=(n, 2))} for n in range(1, 9)))
    clients, drawn, ahead = fg.stored(tmp_path / "clients"), [], []
    make = type(clients)._cohort

    def counted(self, loaded):
        drawn.append(1)
        return make(self, loaded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(clients), "_cohort", counted)
        train(clients, rounds=60, callbacks=[lambda r, *_: ahead.append(len(drawn) - r + 1)])
    assert max(ahead) <= 9


@says("docs/training.md", "More `rounds` than before continue a finished run; what was evaluated")
def test_a_run_that_is_extended_keeps_what_was_evaluated_at_its_end(tmp_path):
    clients = a_population(*range(3, 9))
    evaluate = fg.Evaluation({"loss": loss}, clients, every=2)
    train(clients, rounds=3, evaluate=evaluate, out=tmp_path)
    longer = train(clients, rounds=6, evaluate=evaluate, out=tmp_path).history
    straight = train(clients, rounds=6, evaluate=evaluate).history
    np.testing.assert_array_equal(longer["loss"], straight["loss"])
    assert list(longer.rounds("eval.loss")) == [0, 2, 3, 4, 6]
    assert list(straight.rounds("eval.loss")) == [0, 2, 4, 6]


@says(
    "docs/mesh.md", "give all processes the same folder: the first one writes it, and all of them"
)
def test_of_several_processes_the_first_writes_and_all_resume(tmp_path, monkeypatch):
    clients = a_population(*range(3, 9))
    train(clients, rounds=2, out=tmp_path / "run")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()}
    found = train(clients, rounds=4, out=tmp_path / "run")
    assert found.rounds == 4 and len(found.history["loss"]) == 4
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").iterdir()} == before


# --- algorithms, federation ---------------------------------------------------------------------


@says("docs/self-tuning.md", "Of a [schedule](algorithms.md#schedules), a factor is learned.")
def test_of_a_schedule_a_factor_is_learned():
    algorithm = fg.fed_avg(loss, fg.local_training(optax.cosine_decay_schedule(0.1, 20)))
    learned = fg.self_tuning(algorithm, ["client.learning_rate"])
    assert "client.learning_rate.factor" in fg.hyper.paths(learned.hyper)


@says(
    "docs/algorithms.md", "`batch_size` and `epochs` are keywords of every one with local training"
)
def test_the_usual_keywords_are_those_of_every_algorithm():
    for name, make in ALGORITHMS.items():
        missing = {"client_learning_rate", "batch_size", "epochs"} - {
            *inspect.signature(make).parameters
        }
        assert not missing or name == "fedsgd", name


@says("docs/no-tuning.md", "a client gets two models for each candidate that races, the")
def test_a_client_gets_two_models_for_each_candidate():
    rng, large = np.random.default_rng(0), {"w": jnp.zeros(100)}
    cohort = fg.cohort([{"y": rng.normal(size=(n, 100))} for n in (5, 9)])
    raced, alone = fg.explain(fg.fed_auto(loss), large, cohort, rounds=200).phases
    assert [phase.plan.scalars[0] // 100 for phase in (raced, alone)] == [2 * 3, 1]


@says(
    "docs/federation.md", "Sums are added in the order of the cohort, not in the order of arrival,"
)
def test_the_order_of_arrival_changes_no_digit():
    class Slow:
        def __init__(self, node, seconds):
            self.node, self.seconds = node, seconds

        def handle(self, request):
            time.sleep(self.seconds)
            return self.node.handle(request)

    rng = np.random.default_rng(0)
    data = [np.float64(10) ** rng.uniform(-12, 12, size=3) for _ in range(6)]
    total = fg.program(lambda x, z: fg.sum(fg.broadcast(x) * z), z=C)
    found = []
    for order in (1, -1):
        nodes = fg.federation.InProcess.of(data)
        for place, name in enumerate(list(nodes.handlers)[::order]):
            nodes.handlers[name] = Slow(nodes.handlers[name], 0.03 * place)
        flower = fg.executors.flower(nodes)
        found.append(np.asarray(total.on(flower)(X, flower.clients())))
    np.testing.assert_array_equal(*found)


# --- numbers ------------------------------------------------------------------------------------


def rows(page):
    """The rows of all tables of a page, cell by cell."""
    lines = text_of(page).splitlines()
    return [[c.strip() for c in x.strip("|").split("|")] for x in lines if x.startswith("|")]


def test_the_table_of_the_readme_is_what_was_measured():
    results = load(ROOT / "docs" / "results" / "no-tuning")
    order = ("digits", "synthetic", "emnist", "shakespeare", "tags", "cifar100", "words")
    found = [outcomes(results, task) for task in order]

    def fixed(of):
        return max(of["fedavgm"].best, of["fedadam"].best)

    measured = {
        "FedAvgM from a random start, median of 50": [of["fedavgm"].median for of in found],
        "the best of 75 such trainings, with FedAdam's": [fixed(of) for of in found],
        "`fed_auto`, worst tenth of 20 seeds": [of["auto"].worst for of in found],
        "`fed_auto`, median": [of["auto"].median for of in found],
    }
    told = {row[0]: row[1:] for row in rows("README.md")}
    for name, values in measured.items():
        assert told[name] == [f"{100 * value:.1f}" for value in values]


@says(
    "docs/federation.md", "takes 0.23 s by fedgrad's resident node and 4.6 s by Flower's public API"
)
@says("docs/operating-a-federation.md", "(20 times less; 30 times with 4 kB, 8 times with 10 MB;")
def test_the_speed_of_a_federation_is_what_was_measured():
    results = json.loads((ROOT / "benchmarks" / "results" / "results.json").read_text())
    node, socket = (results["flower"]["data"]["seconds"][who] for who in ("resident", "socket"))
    seconds = [f"{who['400 kB']['median']:.2g}" for who in (node, socket)]
    times = [socket[size]["median"] / node[size]["median"] for size in ("400 kB", "4 kB", "10 MB")]
    assert seconds == ["0.23", "4.6"] and [round(t) for t in times] == [20, 30, 8]


def test_the_table_of_the_papers_models_is_what_was_measured():
    results = json.loads((ROOT / "benchmarks" / "results" / "results.json").read_text())
    told = {row[0].strip("`"): row for row in rows("docs/experiments.md") if len(row) == 7}
    for name, one in results["paper_models"]["data"].items():
        assert told[name][3] == f"{one['rounds']} x {one['cohort']}"
        assert told[name][4] == f"{one['before']:.2f} → {one['after']:.2f}"


def test_the_tables_of_settings_are_the_settings():
    """Of a policy, and of the tasks."""
    policy, told = fg.federation.Policy(), {row[0]: row for row in rows("docs/federation.md")}
    sizes = {"256 MiB": 2**28, "2²⁶": 2**26, "1 GiB": 2**30, "2": 2, "none": 0, "no": 0}
    for name in ("minimum_cohort", "maximum_bytes", "maximum_size", "maximum_memory", "anything"):
        assert sizes[told[f"`{name}`"][2]] == getattr(policy, name), name
    assert not policy.programs and not policy.operators

    for names, *_, options in (row for row in rows("docs/tasks.md") if "seed=0" in row[-1]):
        listed = dict(option.split("=") for option in re.findall(r"`(.*?)`", options))
        for name in re.findall(r"`(.*?)`", names):
            known = inspect.signature(TASKS[name]).parameters.values()
            assert {o.name for o in known} == set(listed)
            for option in known:
                value = json.loads(listed[option.name].replace("None", "null"))
                assert value == option.default, (name, option.name)


# What each algorithm sends, and receives, more than FedAvg with the same weighting: floats.
MORE = {
    "feddyn": (1, 1),
    "fedexp": (0, 1),
    "fednova": (0, 1),
    "fedprox": (1, 0),
    "perfedavg": (1, 0),
    "scaffold": (2, 2),  # a model
    "fedsgd": (-3, 0),  # it has no learning rate at clients, and no key
}


@says("docs/algorithms.md", "from how much clients disagree; one more float up")
@says("docs/algorithms.md", "product of two successive updates; no extra traffic")
@says("docs/algorithms.md", "(https://arxiv.org/abs/2007.07481)); one more float up")
@says("docs/algorithms.md", "one more model down and up |")
@says("docs/algorithms.md", "one more float down and up (where clients do not count alike, a model")
@says("fg.fed_dyn", "sends one number more than in FedAvg, the number of all clients;")
@says("fg.fed_exp", "at the price of one more number from each.")
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_what_algorithms_send_more_than_fed_avg(weighting):
    cohort = a_population(5, 6, 7).everyone

    def sent(make):
        algorithm = make(loss, weighting=weighting)
        args = algorithm.init(PARAMS), algorithm.hyper, cohort, jax.random.key(0)
        own = {}
        if algorithm.client_init is not None:
            one = algorithm.client_init(PARAMS, 3)
            every = jax.tree.map(lambda x: jnp.broadcast_to(x, (3, *jnp.shape(x))), one)
            own = {"client_state": every}
        (found,) = fg.plan(algorithm.round, *args, **own).traffic
        return np.array([found.down, found.up])

    plain = sent(fg.fed_avg)
    # The mean is not the sum that FedDyn needs, which is of a model, and of how many they are.
    model = {"feddyn": (0, 2 + 1)} if weighting == "examples" else {}
    for name, make in ALGORITHMS.items():
        expected = np.array(MORE.get(name, (0, 0))) + model.get(name, (0, 0))
        np.testing.assert_array_equal(sent(make) - plain, expected, err_msg=name)


@says("fg.averaged", "The model after round t counts t (t + 1) ... (t + `power` - 1),")
@says("docs/no-tuning.md", "t (t + 1) ... (t + 6), which grows like t^7,")
@pytest.mark.parametrize("power", [0, 1, 2.5, 7])
def test_how_much_a_model_counts_in_the_average(power):
    """Of models that are unit vectors, the average is the weights."""
    rounds, clients = 6, fg.population([{"y": np.zeros((2, 1))}])

    @fg.program(cohort=fg.CLIENTS)
    def round(state, hyper, cohort, key):
        seen = state.params["n"]
        unit = (jnp.arange(float(rounds)) == seen[:1]).astype(float)
        return State({"n": seen + 1, "w": unit}), fg.Metrics()

    start = {"n": jnp.zeros(1), "w": jnp.zeros(rounds)}
    own = fg.Algorithm(lambda params, hyper: State(params), round, {}, loss)
    result = fg.fit(fg.averaged(own, power), clients, params=start, rounds=rounds, progress=False)
    weights = [math.gamma(t + power) / math.gamma(t) for t in range(1, rounds + 1)]
    if power == 7:
        assert weights == [math.prod(range(t, t + 7)) for t in range(1, rounds + 1)]
    expected = np.array(weights) / np.sum(weights)
    np.testing.assert_allclose(result.params["w"], expected, rtol=1e-12)
    assert (
        power <= 1 or abs(expected[-1] / (6**power / sum(t**power for t in range(1, 7))) - 1) > 0.01
    )


@says("docs/self-tuning.md", "discount 1 and is exact, for hyperparameters that stay as they are:")
@says(
    "docs/self-tuning.md", "At a corner, where a round has one derivative to each side, it is that"
)
@says("fg.Horizon", "exact, unless one of them is at a corner")
@pytest.mark.parametrize("rate, exact", [(0.9, True), (1.0, False), (1.1, True)])
def test_an_infinite_horizon_is_exact(rate, exact):
    """By finite differences; tests/test_horizon.py has every server, and that one side."""
    dog = fg.optimizer(optax.contrib.dog, learning_rate=rate, init_step=("distance", 0.1))
    algorithm = fg.fed_opt(loss, server=dog, client=fg.local_training(0.1, shuffle=False))
    clients, name, key = a_population(5, 6, 7), "server.learning_rate", jax.random.key(0)
    far, judged = {"w": jnp.full(2, 3.0)}, fg.GradientCohort("same").program(loss)

    def after(rate):
        state, hyper = algorithm.init(far), fg.hyper.replace(algorithm.hyper, {name: rate})
        for _ in range(3):
            state, _ = algorithm.round(state, hyper, clients.everyone, key)
        return float(judged(state.params, None, clients.everyone)[0])

    options = {"optimizer": optax.set_to_zero(), "gradient_from": "same", "schedule": "serial"}
    tuned = fg.self_tuning(algorithm, name, horizon=math.inf, **options)
    state = tuned.init(far)
    for _ in range(3):
        state, metrics = tuned.round(state, tuned.hyper, clients.everyone, key)
    expected = (after(rate + 1e-5) - after(rate - 1e-5)) / 2e-5
    assert np.isclose(metrics.hypergradient[name], expected, rtol=1e-6, atol=0) == exact


@says("docs/algorithms.md", "schedule or a factor that asks for more is refused before anything")
@says("docs/algorithms.md", "in a round that is called with it, the model and the loss are NaN.")
def test_more_work_than_there_is_room_for():
    """tests/test_algorithms.py has every way to ask for it."""
    algorithm = fg.fed_avg(loss, fg.local_training(epochs=lambda t: 1 + t % 3))
    more, clients = algorithm.starting({"epochs": 4}), a_population(5, 6, 7)
    with pytest.raises(fg.ArgumentError, match=r"'epochs' asks for 4, but .* at most 3"):
        train(clients, more)
    args = algorithm.init(PARAMS), more.hyper, clients.everyone, jax.random.key(0)
    state, metrics = algorithm.round(*args)
    assert np.isnan(state.params["w"]).all() and np.isnan(metrics.loss)


@says("docs/experiments.md", "- **Fewer than eight seeds** can never give that, so with them it is")
def test_fewer_than_eight_seeds_decide_nothing():
    assert [least_p(n, 4) < LEVEL for n in (7, 8)] == [False, True]


# Last, when all of them are known.
@pytest.mark.parametrize("page, sentence", SAID)
def test_the_sentence_is_there(page, sentence):
    assert " ".join(sentence.split()) in " ".join(text_of(page).split()), f"{page}: {sentence}"
