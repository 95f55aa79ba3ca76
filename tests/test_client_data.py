"""Clients' data are read as they are: nobody reads a neighbor's rows, no number wraps, and what
cannot be kept is refused."""

import tempfile
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import by_hand
import fedgrad as fg
from by_hand import START, as_params, loss
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.federation import InProcess
from laws import EXECUTORS, every_executor

KEY = jax.random.key(0)
CLEAN = by_hand.make_clients([7, 5, 4, 6, 9], seed=1)
# Between those who take part, and the first one: spare rows are copies of its first example.
ABSENT = (0, 2)
BAD = [
    jax.tree.map(lambda x: np.full_like(x, np.nan), c) if i in ABSENT else c
    for i, c in enumerate(CLEAN)
]
PRESENT = np.array([i for i in range(len(CLEAN)) if i not in ABSENT])


def on_disk(clients):
    folder = tempfile.TemporaryDirectory()
    weakref.finalize(found := fg.store(f"{folder.name}/clients", clients), folder.cleanup)
    return found


KINDS = {
    "in memory": fg.population,
    "on disk": on_disk,
    "on a mesh": fg.executors.mesh().population,
}


def assert_same_bits(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def run(executor, clients, fun, *arguments):
    """A program of the clients who take part; a population on a mesh has its own executor."""
    made = fg.program(fun, cohort=fg.CLIENTS).on(clients.executor or executor)
    return made(*arguments, clients.select(PRESENT))


# --- bad data of clients who take no part -------------------------------------------------------


def one_round(name, clients, executor):
    work = (
        {"batch_size": 4}
        if name == "fedsgd"
        else {"client": fg.local_training(0.1, batch_size=4, shuffle=False)}
    )
    algorithm = ALGORITHMS[name](loss, **work).on(clients.executor or executor)
    state = algorithm.init(as_params(START))
    more = []
    if algorithm.client_init is not None:
        one = algorithm.client_init(as_params(START), len(CLEAN))
        more = [jax.tree.map(lambda x: jnp.stack([x] * len(PRESENT)), one)]
    return algorithm.round(state, algorithm.hyper, clients.select(PRESENT), KEY, *more)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_no_algorithm_reads_clients_who_take_no_part(name):
    executor = EXECUTORS["local"]
    assert_same_bits(
        *[one_round(name, fg.population(clients), executor) for clients in (BAD, CLEAN)]
    )


@every_executor
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fedsgd", "fedavg"])
def test_no_executor_reads_clients_who_take_no_part(name, kind, executor):
    assert_same_bits(*[one_round(name, KINDS[kind](clients), executor) for clients in (BAD, CLEAN)])


@every_executor
@pytest.mark.parametrize("derivative", [fg.grad, fg.value_and_grad])
def test_no_derivative_reads_clients_who_take_no_part(derivative, executor):
    """Those of a user's own program too, who multiplies by the mask."""

    def mean_loss(w, cohort):
        w = fg.broadcast(w)

        def step(total, batch, mask):
            squares = (batch["x"] @ w - batch["y"]) ** 2
            return total + jnp.sum(mask.astype(float) * squares)

        whole = cohort.fold(step, jnp.zeros(()), 4)
        rows, mask = cohort.batch(2, 4)
        return fg.mean(whole + jnp.sum(mask.astype(float) * (rows["x"] @ w)))

    w = jnp.array([0.5, -1.0])
    of = derivative(fg.program(mean_loss, cohort=fg.CLIENTS)).on(executor)
    assert_same_bits(*[of(w, fg.population(c).select(PRESENT)) for c in (BAD, CLEAN)])
    assert np.isfinite(jax.tree.leaves(of(w, fg.population(BAD).select(PRESENT)))[0]).all()


@every_executor
@pytest.mark.parametrize("held_out", [None, fg.HeldOut(0.3)])
@pytest.mark.parametrize("per_client", [False, True])
def test_no_evaluation_reads_clients_who_take_no_part(per_client, held_out, executor):
    def evaluated(clients):
        made = fg.Evaluation(
            {"loss": loss}, fg.population(clients).select(PRESENT), batch_size=4,
            held_out=held_out, per_client=per_client,
        )  # fmt: skip
        with fg.executors.default(executor):
            return made(as_params(START))

    assert_same_bits(evaluated(BAD), evaluated(CLEAN))


@pytest.mark.parametrize("schedule", ["serial", "parallel"])
def test_no_hypergradient_reads_clients_who_take_no_part(schedule):
    def tuned(clients):
        clients = fg.population(clients)
        made = fg.self_tuning(
            fg.fed_avg(loss, client=fg.local_training(0.1, batch_size=4)),
            "client.learning_rate",
            schedule=schedule,
        )
        more = {name: clients.select([3, 4]) for name in made.cohorts}
        state = made.init(as_params(START))
        return made.round(state, made.hyper, clients.select([1, 3]), KEY, **more)

    assert_same_bits(tuned(BAD), tuned(CLEAN))


def test_nodes_read_only_their_own_rows():
    nodes = fg.executors.flower(InProcess.of([BAD[i] for i in PRESENT]))
    algorithm = fg.fed_sgd(loss, batch_size=4)
    state = algorithm.init(as_params(START))
    found, _ = algorithm.on(nodes).round(state, algorithm.hyper, nodes.population().everyone, KEY)
    wanted, _ = one_round("fedsgd", fg.population(CLEAN), EXECUTORS["reference"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found.params, wanted.params
    )


# --- indices ------------------------------------------------------------------------------------

CONSTANT = jnp.array([0, -1])
NUMBERED = fg.population([np.arange(5.0), 100 + np.arange(4.0), 200 + np.arange(3.0)])


@every_executor
def test_what_is_not_there_repeats_the_last_example(executor):
    @fg.program(cohort=fg.CLIENTS)
    def rows(cohort):
        return cohort.batch(2, 4)

    batch, mask = rows.on(executor)(NUMBERED.everyone)
    wanted = [[2, 3, 4, 4], [102, 103, 103, 103], [202, 202, 202, 202]]
    np.testing.assert_array_equal(batch, wanted)
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])


@every_executor
@pytest.mark.parametrize("size", [3, 8])
def test_a_start_below_0_stays_within_the_client(size, executor):
    """Where it is known only when it runs; also beyond all examples."""

    @fg.program(cohort=fg.CLIENTS)
    def rows(start, cohort):
        return cohort.batch(fg.broadcast(start), size)

    batch, _ = rows.on(executor)(-2, NUMBERED.everyone)
    wanted = np.asarray(rows.on(executor)(0, NUMBERED.everyone)[0])
    np.testing.assert_array_equal(batch, wanted)
    batch, mask = rows.on(executor)(10**6, NUMBERED.everyone)
    np.testing.assert_array_equal(batch, [[4] * size, [103] * size, [202] * size])
    assert not np.any(mask)


@pytest.mark.parametrize(
    "read",
    {
        "batch": lambda c: c.batch(-2, 3)[0],
        "batch of numpy": lambda c: c.batch(np.int64(-2), 3)[0],
        "take": lambda c: c.take(-1),
        "take of numpy": lambda c: c.take(np.array([0, -1])),
        "take of a constant": lambda c: c.take(CONSTANT),
        "index": lambda c: c.index(-1),
        "shuffled": lambda c: c.shuffled(jax.random.key(0), np.array([-1])),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_negative_index_is_refused(read):
    program = fg.program(lambda cohort: read[1](cohort), cohort=fg.CLIENTS)
    with pytest.raises(fg.ArgumentError, match=r"test_client_data.py:.*-[12].*from 0"):
        program(NUMBERED.everyone)


@pytest.mark.parametrize(
    "read",
    {
        "a batch of nobody": lambda c: c.batch(0, 0),
        "a batch of fewer": lambda c: c.batch(0, -3),
        "batches of none": lambda c: c.fold(lambda s, b, m: s + 1, 0, 0),
        "batches of fewer": lambda c: c.fold(lambda s, b, m: s + 1, 0, -2),
        "negative epochs": lambda c: c.fold(lambda s, b, m: s + 1, 0, 2, epochs=-1),
        "half an epoch": lambda c: c.fold(lambda s, b, m: s + 1, 0, 2, epochs=1.5),
        "negative steps": lambda c: c.fold(lambda s, b, m: s + 1, 0, 2, steps=-1),
        "half a step": lambda c: c.fold(lambda s, b, m: s + 1, 0, 2, steps=1.5),
    }.items(),
    ids=lambda item: item[0],
)
def test_sizes_that_are_none_are_refused(read):
    program = fg.program(lambda cohort: read[1](cohort), cohort=fg.CLIENTS)
    with pytest.raises(fg.ArgumentError, match=r"test_client_data.py:.*give a whole number"):
        program(NUMBERED.everyone)


@pytest.mark.parametrize("name", ["epochs", "steps"])
def test_more_than_the_most_is_not_less(name):
    """Refused where it is known; else the result is NaN."""

    def counted(amount, cohort):
        found = cohort.fold(lambda n, b, m: n + 1.0, 0.0, 100, **{name: amount}, most=3)
        return fg.sum(found)

    with pytest.raises(fg.ArgumentError, match=rf"test_client_data.py:.*{name}=4, but most=3"):
        fg.program(lambda cohort: counted(4, cohort), cohort=fg.CLIENTS)(NUMBERED.everyone)
    program = fg.program(
        lambda amount, cohort: counted(fg.broadcast(amount), cohort), cohort=fg.CLIENTS
    )
    for amount, expected in ((3, 3.0), (4, np.nan)):
        found = program(jnp.int32(amount), NUMBERED.everyone)
        np.testing.assert_equal(float(found), expected * len(NUMBERED))
