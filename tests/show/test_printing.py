"""What is printed fits on a screen: no weights, no pages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedgrad as fg
from fedgrad.show.numbers import number
from line import FIRST, line, mean_square, points

POINTS = points()
CLIENTS = fg.population(POINTS)
TUNED = fg.self_tuning(fg.fed_avgm(mean_square), "server")
RATES = np.linspace(0.01, 0.2, 7)


def train(algorithm, rounds=4, params=FIRST, **more):
    return fg.fit(algorithm, CLIENTS, params=params, rounds=rounds, progress=False, **more)


def test_a_result_is_ten_lines_at_most():
    wide = {f"m{i}": mean_square for i in range(30)}
    big = {"w": FIRST["w"], "unused": np.ones((300, 300), np.float32)}
    stop = fg.Stop("loss", lambda values: len(values) == 3 and "good enough")
    checks = {"test": fg.Evaluation(wide, CLIENTS, every=2)}
    text = str(train(TUNED, params=big, evaluate=checks, callbacks=[stop]))
    lines = text.splitlines()
    assert len(lines) == 10 and max(map(len, lines)) < 100
    assert lines[0].startswith("FedAvgM: 3 rounds in ") and "stopped: good enough" in lines[1]
    assert lines[2].split()[0] == "loss" and " → " in lines[2]
    assert lines[3].split()[0] == "eval.test.m0" and lines[-2].strip().startswith("and ")
    assert lines[-1].strip() == "model: 90,003 numbers in 2 arrays of float32"


def test_a_result_says_what_was_learned_and_of_trials_the_range():
    assert "hyper.server.learning_rate  1 → " in repr(train(TUNED))
    trials = fg.side_by_side(line(), {"rate": RATES, "noise": 0.0})
    (loss,) = [text for text in repr(train(trials)).splitlines() if "loss" in text]
    assert loss.count(" to ") == 2


def test_a_result_says_what_was_learned_before_how_clients_differ():
    each = fg.Evaluation({n: mean_square for n in "ab"}, CLIENTS, per_client=True)
    text = repr(train(TUNED, evaluate=each))
    assert "hyper.server.learning_rate" in text and "percentiles" not in text
    assert text.index("hyper.") < text.index("eval.per_client.a.")
    assert repr(TUNED).startswith("Algorithm(FedAvgM that learns server.learning_rate, server.mom")
    finds = repr(fg.self_tuning(fg.fed_avgm(mean_square)))
    assert finds.startswith("Algorithm(FedAvgM that finds its own learning rates, client.")


def test_a_result_in_a_notebook_has_curves():
    html = train(TUNED, evaluate=fg.Evaluation({"loss": mean_square}, CLIENTS))._repr_html_()
    assert html.count("<img") > 3 and "eval.loss" in html and "hyper.server.momentum" in html
    assert "monospace" in html and "FedAvgM: 4 rounds" in html
    trials = fg.side_by_side(line(), {"rate": RATES, "noise": 0.0})
    assert "trial 4" in train(trials).history._repr_html_()
    assert fg.History()._repr_html_() == ""


def test_a_history_of_many_metrics():
    history = fg.History({f"m{i}": ([1], [0.0]) for i in range(50)})
    assert repr(history).endswith("m19[1], and 30 more)")


@fg.program(z=fg.CLIENTS)
def loss(x, z):
    return fg.mean(jnp.sum(fg.broadcast(x) * z))


X, Z = jnp.ones(300), jnp.ones((5, 300))
PLAN = fg.plan(loss, X, Z)


def search():
    space = {"rate": fg.uniform(0.01, 0.2)}
    score = fg.Evaluation({"loss": mean_square}, CLIENTS)
    settings = {"params": FIRST, "cohort_size": 5, "key": jax.random.key(0), "progress": False}
    return fg.random_search(line(), CLIENTS, space, trials=3, rounds=2, evaluate=score, **settings)


PRINTED = {
    "program": (loss, "Program(loss: x, z@clients)"),
    "algorithm": (fg.fed_avg(mean_square), "Algorithm(FedAvg, client.learning_rate=0.1"),
    "schedule": (fg.fed_avg(mean_square, lambda r: 0.1 / (1 + r)), "learning_rate=a schedule"),
    "race": (fg.fed_auto(mean_square), "Algorithm(fed_auto, 15 hyperparameters)"),
    "audit": (PLAN.audit(), "round 1: sum over clients ×5"),
    "plan": (PLAN, "clients"),
    "phases": (fg.explain(fg.fed_avg(mean_square), FIRST, CLIENTS.select([0, 1]), 9), "training"),
    "explanation": (fg.explain(loss, X, Z), "differentiating loss"),
    "population": (CLIENTS, "Population(12 clients"),
    "cohort": (CLIENTS.select([0, 1]), "Cohort(2 clients"),
    "evaluation": (
        fg.Evaluation({"loss": mean_square}, CLIENTS, per_client=True),
        "Evaluation(loss of Population(12 clients",
    ),
    "a function that evaluates": (fg.Evaluation(len, every=1), "Evaluation(len, every 1 round)"),
    "local training": (
        fg.local_training(0.1, batch_size=5, steps=lambda r: 3),
        "LocalTraining(sgd(learning_rate=0.1), batch_size=5, steps=a schedule)",
    ),
    "optimizer": (fg.optimizer(optax.adam, learning_rate=0.1), "adam(learning_rate=0.1)"),
    "range": (fg.log_uniform(0.1, 1), "fg.log_uniform(0.1, 1)"),
    "task": (fg.tasks.task("synthetic"), "train: Population("),
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_is_short_and_says_what_it_is(name):
    value, words = PRINTED[name]
    text = repr(value)
    assert words in text and len(text.splitlines()) <= 40 and len(text) < 4000
    assert "<function" not in text and "Array(" not in text and "0x" not in text


def test_a_search_prints_its_best_trial():
    text = repr(search())
    assert text.startswith("Search of 3 trials") and "with rate 0." in text
    assert len(text.splitlines()) == 3 and "score: loss 0." in text


def test_a_search_without_a_best_trial_does_not_name_one():
    rates = {"client.learning_rate": [1e30]}
    test = fg.Evaluation({"loss": mean_square}, CLIENTS)
    options = {"evaluate": test, "params": FIRST, "rounds": 4, "progress": False}
    text = repr(fg.grid_search(fg.fed_avg(mean_square), CLIENTS, rates, **options))
    assert text.splitlines() == [
        "Search of 1 trial, 0 of which ended well",
        "  loss was not finite; try other ranges",
    ]


def test_a_result_says_which_model_was_best():
    test = fg.Evaluation({"loss": mean_square}, CLIENTS, every=1)
    result = train(TUNED, evaluate=test, callbacks=[fg.keep_best("eval.loss")])
    best = f"  best: eval.loss {number(result.best.value)}, of round {result.best.round}"
    assert best in str(result).splitlines()


def test_a_table_in_a_notebook_keeps_its_columns():
    for name in ("phases", "explanation"):
        html = PRINTED[name][0]._repr_html_()
        assert "white-space:pre" in html and "monospace" in html


# What is not said


def test_training_with_nothing_more_than_needed(capsys):
    result = fg.fit(fg.fed_avg(mean_square), CLIENTS, params=FIRST, rounds=3)
    said = {"cohort_size": 10, "key": jax.random.key(0)}
    same = fg.fit(fg.fed_avg(mean_square), CLIENTS, params=FIRST, rounds=3, progress=False, **said)
    assert np.array_equal(result.history["loss"], same.history["loss"])
    assert "round 3/3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("clients", "size"), [(1, 1), (9, 9), (10, 10), (50, 10), (240, 24), (700, 50), (10**6, 50)]
)
def test_how_many_take_part_if_nobody_says(clients, size):
    from fedgrad.training.cohort_schedule import usual_cohort

    assert usual_cohort(clients) == size


def test_progress_is_a_choice():
    with pytest.raises(fg.ArgumentError, match=r"progress='no': give True, False"):
        fg.fit(fg.fed_avg(mean_square), CLIENTS, params=FIRST, rounds=1, progress="no")
