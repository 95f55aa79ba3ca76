"""Examples that are held out: the same ones for everybody, never trained on, on every executor."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from by_hand import CLIENTS, POPULATION, START, as_params, as_vector, loss
from fedgrad.federation import InProcess
from laws import every_executor

KEY = jax.random.key(0)


def view(count, capacity=None):
    return fg.Examples.of({"x": jnp.arange(100 + count)[:count]})


def slope_of(rule):
    """The gradient that hypergradients are made of."""
    return fg.grad(fg.GradientCohort("fresh", held_out=rule).program(loss), has_aux=True)


def read(examples, size):
    batch, mask = examples.batch(0, size)
    return np.asarray(batch["x"])[np.asarray(mask)].tolist()


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 10, 53])
def test_every_example_is_in_one_of_both_parts(count, fraction):
    train, held = fg.HeldOut(fraction).split(view(count))
    ours, theirs = read(train, count), read(held, count)
    assert sorted(ours + theirs) == list(range(count))
    assert len(theirs) == min(int(count * fraction + 0.5), count - 1) and len(ours) >= 1
    assert int(held.count) <= held.capacity


def test_by_a_seed_and_not_the_first_or_last():
    parts = [read(fg.HeldOut(seed=s).split(view(50))[1], 50) for s in (0, 0, 1)]
    assert parts[0] == parts[1] != parts[2]
    assert set(parts[0]) not in ({*range(10)}, {*range(40, 50)})


def test_reading_by_batches_shuffled_and_by_index_agree():
    train, _ = fg.HeldOut().split(view(23))

    def add(seen, batch, mask):
        return seen + jnp.sum(jnp.where(mask, 2.0 ** batch["x"].astype(float), 0))

    expected = sum(2.0**x for x in read(train, 23))
    for key in (None, KEY):
        assert float(train.fold(add, jnp.zeros(()), 5, key=key)) == expected


@every_executor
def test_training_without_them_is_training_on_the_others(executor):
    rule = fg.HeldOut(0.3, seed=4)
    kept = []
    for client in CLIENTS:
        train, _ = rule.split(fg.Examples.of(client))
        places = np.asarray(train.take(jnp.arange(int(train.count)))["y"])
        rows, _ = train.batch(0, int(train.count))
        assert len(places) == int(train.count)
        kept.append(jax.tree.map(np.asarray, rows))
    work = fg.local_training(0.3, batch_size=10, shuffle=False)
    algorithm = fg.fed_avg(loss, work).on(executor)
    state = algorithm.init(as_params(START))
    by_rule, _ = fg.holding_out(algorithm, rule).round(
        state, algorithm.hyper, POPULATION.everyone, KEY
    )
    by_hand, _ = algorithm.round(state, algorithm.hyper, fg.population(kept).everyone, KEY)
    np.testing.assert_allclose(
        as_vector(by_rule.params), as_vector(by_hand.params), rtol=1e-12, atol=1e-14
    )


@every_executor
def test_an_evaluation_and_a_hypergradient_are_of_them_alone(executor):
    rule = fg.HeldOut(0.4)
    held = []
    for client in CLIENTS:
        _, rows = rule.split(fg.Examples.of(client))
        if int(rows.count):
            held.append(jax.tree.map(np.asarray, rows.batch(0, int(rows.count))[0]))
    params, alone = as_params(START), fg.population(held)
    ours = fg.Evaluation({"loss": loss}, POPULATION, held_out=rule).on(executor)
    theirs = fg.Evaluation({"loss": loss}, alone)
    np.testing.assert_allclose(ours(params)["loss"], theirs(params)["loss"], rtol=1e-12)
    slopes = [
        slope_of(r)(params, None, clients.everyone)[0]
        for r, clients in ((rule, POPULATION), (None, alone))
    ]
    np.testing.assert_allclose(as_vector(slopes[0]), as_vector(slopes[1]), rtol=1e-12)


def test_a_client_with_one_example_trains_and_judges_nothing():
    clients = [{"x": np.ones((n, 2)), "y": np.ones(n)} for n in (1, 1, 6)]
    population = fg.population(clients)
    slope = slope_of(fg.HeldOut())
    found, _ = slope(as_params(START), None, population.everyone)
    alone, _ = slope(as_params(START), None, population.select([2]))
    np.testing.assert_allclose(as_vector(found), as_vector(alone), rtol=1e-12)
    assert np.all(np.isfinite(as_vector(found)))


# --- nobody has any -----------------------------------------------------------------------------

RULE = fg.HeldOut()
SIZES = (2, 1, 6, 9)  # the first two clients hold out nothing
SOME = fg.population([{"x": np.ones((n, 2)), "y": np.arange(n) % 2.0} for n in SIZES])
NOBODY = fg.population([{"x": np.ones((2, 2)), "y": np.ones(2)}] * 3)
AVGM = fg.fed_avgm(loss, fg.local_training(0.3, batch_size=10, shuffle=False))
JUDGES = {
    "fresh": (NOBODY, fg.GradientCohort("fresh", held_out=RULE)),
    "same": (NOBODY, fg.GradientCohort("same", held_out=RULE)),
    "others": (SOME, fg.GradientCohort(NOBODY, held_out=RULE)),
}


@pytest.mark.parametrize("clients, judges", JUDGES.values(), ids=JUDGES)
@pytest.mark.parametrize("around", [lambda a: a, fg.averaged, fg.holding_out])
def test_examples_that_no_client_holds_out_judge_nothing(clients, judges, around):
    tuned = around(fg.self_tuning(AVGM, "server", gradient_from=judges))
    settings = {"params": as_params(START), "rounds": 3, "cohort_size": 2, "progress": False}
    message = r"fg.GradientCohort.* none of the 3 clients holds out .* at most 2 each"
    with pytest.raises(fg.ArgumentError, match=message):
        fg.fit(tuned, clients, **settings)
    with pytest.raises(fg.ArgumentError, match=message):
        fg.grid_search(
            tuned,
            clients,
            {"server.momentum": [0.1, 0.2]},
            evaluate=fg.Evaluation({"loss": loss}, SOME),
            **settings,
        )


def test_an_evaluation_of_examples_that_no_client_holds_out_is_refused():
    with pytest.raises(fg.ArgumentError, match=r"fg.Evaluation.* none of the 3 clients holds out"):
        fg.Evaluation({"loss": loss}, NOBODY, held_out=RULE)
    # Of the clients of one call it is not known beforehand, and said.
    one = fg.Evaluation({"loss": loss}, NOBODY.everyone, held_out=RULE)
    assert np.isnan(one(as_params(START))["loss"])


@every_executor
@pytest.mark.parametrize("guard", [None, 1000.0, "paired"])
@pytest.mark.parametrize("schedule", ["serial", "parallel"])
def test_a_cohort_holding_out_examples_moves_no_hyperparameter(schedule, guard, executor):
    """Adam would move on by its momentum, a guard would take the loss of nobody for a good one."""
    judges = fg.GradientCohort("fresh", held_out=RULE)
    tuned = fg.self_tuning(AVGM, "server", gradient_from=judges, schedule=schedule, guard=guard).on(
        executor
    )
    state, train = tuned.init(as_params(START)), SOME.select([1, 2])
    for _ in range(2):
        state, _ = tuned.round(state, tuned.hyper, train, KEY, SOME.select([2, 3]))
    new, metrics = tuned.round(state, tuned.hyper, train, KEY, SOME.select([0, 1]))
    jax.tree.map(np.testing.assert_array_equal, new.learned, state.learned)
    jax.tree.map(np.testing.assert_array_equal, new.optimizer, state.optimizer)
    assert np.isnan(metrics.gradient_loss) and int(metrics.rejected) == 0
    assert all(np.isnan(slope) for slope in metrics.hypergradient.values())
    assert np.any(as_vector(new.params) != as_vector(state.params)), "the model trains on"
    if guard is not None and schedule == "parallel":  # nobody has seen that model to be good
        jax.tree.map(np.testing.assert_array_equal, new.fallback, state.fallback)
    if guard == "paired":
        jax.tree.map(np.testing.assert_array_equal, new.proven.learned, state.proven.learned)
    after, metrics = tuned.round(new, tuned.hyper, train, KEY, SOME.select([2, 3]))
    assert np.isfinite(metrics.gradient_loss) and int(metrics.rejected) == 0
    assert any(np.any(after.learned[name] != new.learned[name]) for name in new.learned), (
        "it learns on"
    )


def test_on_nodes_nobody_knows_beforehand_and_no_step_is_taken():
    judges = fg.GradientCohort("same", held_out=RULE)
    tuned = fg.self_tuning(AVGM, "server", gradient_from=judges)
    clients = [{"x": np.ones((2, 2)), "y": np.ones(2)}] * 3
    settings = {"params": as_params(START), "rounds": 3, "cohort_size": 2, "progress": False}
    with fg.executors.flower(InProcess.of(clients), platforms=("cpu",)) as nodes:
        history = fg.fit(tuned, nodes.population(), **settings).history
    assert np.isnan(history["gradient_loss"]).all() and not history["rejected"].any()
    for values in history.under("hyper").values():
        assert len(set(values.tolist())) == 1


@every_executor
def test_a_cohort_without_examples_has_no_training_loss(executor):
    """A loss of 0 would be the best of all: a node may have no examples."""
    everyone = SOME.everyone
    nobody = dataclasses.replace(everyone, count=jnp.zeros_like(everyone.count))
    algorithm = AVGM.on(executor)
    state = algorithm.init(as_params(START))
    new, metrics = algorithm.round(state, algorithm.hyper, nobody, KEY)
    assert np.isnan(metrics.loss)
    np.testing.assert_array_equal(as_vector(new.params), as_vector(state.params))


def test_on_nodes_the_rule_is_applied_where_the_examples_are():
    algorithm = fg.holding_out(fg.fed_avg(loss, fg.local_training(0.3, batch_size=10)))
    settings = {"params": as_params(START), "rounds": 3, "cohort_size": 3, "key": KEY}
    here = fg.fit(algorithm, POPULATION, progress=False, **settings)
    with fg.executors.flower(InProcess.of(CLIENTS), platforms=("cpu",)) as nodes:
        there = fg.fit(algorithm, nodes.population(), progress=False, **settings)
    np.testing.assert_allclose(as_vector(here.params), as_vector(there.params), rtol=1e-9)


@pytest.mark.parametrize(
    "arrays", [{}, {"x": 1.0}, {"a": np.ones(()), "x": np.ones(3)}, {"x": np.ones(3), "y": [1, 2]}]
)
def test_arrays_without_rows_or_with_other_ones_are_no_examples(arrays):
    arrays = jax.tree.map(np.asarray, arrays, is_leaf=lambda x: isinstance(x, list))
    with pytest.raises(fg.FederatedError, match="one row for each"):
        fg.Examples.of(arrays)


def test_nothing_of_nothing():
    examples = fg.Examples({"x": jnp.arange(8)}, jnp.int32(3), jnp.int32(0), 4)
    train, held = fg.HeldOut().split(examples)
    assert int(train.count) == int(held.count) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: fg.holding_out(fg.fed_avg(loss), 0.2),
        lambda: fg.GradientCohort(held_out=0.2),
        lambda: fg.Evaluation({"loss": loss}, POPULATION, held_out=0.2),
    ],
)
def test_a_number_is_not_a_rule(make):
    with pytest.raises(fg.FederatedError, match=r"held_out=fg.HeldOut\(0.2\)"):
        make()


@pytest.mark.parametrize("fraction", [0, 1, 0.0, 1.0, -0.2, "a fifth"])
def test_a_fraction_is_between_0_and_1(fraction):
    with pytest.raises(fg.FederatedError, match="give a part between 0 and 1"):
        fg.HeldOut(fraction)


def test_holding_out_again_holds_out_the_same():
    train, held = fg.HeldOut().split(view(23))
    again, others = fg.HeldOut().split(train)
    assert read(again, 23) == read(train, 23) and read(others, 23) == read(held, 23)
    for rule, examples in ((fg.HeldOut(0.3), train), (fg.HeldOut(), held)):
        with pytest.raises(fg.FederatedError, match="Hold out once"):
            rule.split(examples)
