"""Clients' data are read as they are: nobody reads a neighbor's rows, no number wraps, and what
cannot be kept is refused."""

import re
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
from fedgrad.clients import padding
from fedgrad.federation import InProcess
from fedgrad.federation.protocol.node_data import OwnData
from fedgrad.tasks import split
from fedgrad.tasks.data.dataset import DataSet, Origin
from fedgrad.tuning import gradient_cohort
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
    try:
        found = fg.store(f"{folder.name}/clients", clients)
    except fg.FederatedError:
        folder.cleanup()
        raise
    weakref.finalize(found, folder.cleanup)
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


# --- arrays that JAX would change in silence ----------------------------------------------------

ARRAYS = DataSet("arrays", {"y": ("y",)}, None, None, "", Origin(""))
SUM = fg.program(lambda x, z: jnp.sum(x["a"]) * fg.sum(z).astype(x["a"].dtype), z=fg.CLIENTS)
LINE = {"w": np.ones(2, np.float32), "b": np.zeros((), np.float32)}


def clients_with(x, others=1):
    """The last one has these numbers."""
    return [{"y": np.zeros(3, x.dtype)}] * others + [{"y": x}]


def on_nodes(x):
    nodes = fg.executors.flower(InProcess.of(clients_with(x)))
    program = fg.program(lambda c: fg.sum(c.take(0)["y"]), c=fg.CLIENTS)
    return program.on(nodes)(nodes.population().everyone)


def trained(params):
    clients = fg.population(CLEAN)
    return fg.fit(fg.fed_avg(loss), clients, params=params, rounds=1, progress=False)


# Where arrays of users come in, as functions of one array of three numbers, and where the error
# says that it is.
ENTRIES = {
    "population": (lambda x: fg.population(clients_with(x)), r"Client 1 in 'y'"),
    "cohort": (lambda x: fg.cohort(clients_with(x)), r"Client 1 in 'y'"),
    "store": (lambda x: on_disk(clients_with(x)).select([0]), r"lient 1.*y"),
    "mesh.population": (
        lambda x: fg.executors.mesh().population(clients_with(x, 7)), r"Client 7 in 'y'"
    ),
    "mesh.shard": (
        lambda x: fg.executors.mesh().shard({"y": x.repeat(8)}), r"mesh\.shard: the arrays in 'y'"
    ),
    "nodes": (on_nodes, r"(Client 1 .clients.|Node 1001): the data"),
    "Examples.of": (lambda x: fg.Examples.of({"y": x}), r"examples in 'y'"),
    "client argument": (lambda x: SUM({"a": jnp.ones(())}, x), r"the arguments in 'z'"),
    "server argument": (lambda x: SUM({"a": x}, np.ones(3)), r"the arguments in 'x\.a'"),
    "argument of a gradient": (
        lambda x: fg.grad(SUM)({"a": jnp.ones(())}, x), r"the arguments in 'z'"
    ),
    "argument of the mesh": (
        lambda x: SUM.on(fg.executors.mesh())({"a": jnp.ones(())}, x), r"the arguments in 'z'"
    ),
    "argument of the reference": (
        lambda x: SUM.on(fg.executors.reference())({"a": jnp.ones(())}, x), r"the arguments in 'z'"
    ),
    "broadcast": (
        lambda x: fg.program(lambda z: fg.sum(fg.broadcast(x)), z=fg.CLIENTS)(np.ones(3)), r"sent"
    ),
    "with_fixed": (
        lambda x: fg.with_fixed(lambda p, b, fixed: fixed["a"], {"a": x}),
        r"with_fixed: the arrays in 'a'",
    ),
    "fit": (lambda x: trained({**LINE, "w": x}), r"params= in 'w'"),
    "init": (lambda x: fg.fed_avg(loss).init({**LINE, "w": x}), r"The model in 'w'"),
    "hyperparameters": (
        lambda x: fg.fit(
            fg.fed_avg(loss).starting({"server": {"learning_rate": x}}),
            fg.population(CLEAN), params=LINE, rounds=1, progress=False,
        ), r"hyperparameters in 'server",
    ),
    "places of examples": (
        lambda x: fg.program(lambda c: c.take(x), c=fg.CLIENTS)(NUMBERED.everyone), r"indices"
    ),
}  # fmt: skip
every_entry = pytest.mark.parametrize("enter, where", ENTRIES.values(), ids=ENTRIES)
MASK = [False, True, False]


@every_entry
@pytest.mark.parametrize("x64", [True, False])
def test_a_masked_array_is_refused(enter, where, x64):
    with jax.enable_x64(x64), pytest.raises(fg.FederatedError, match=where) as error:
        enter(np.ma.array([1, 2, 3], mask=MASK))
    assert "masked array" in str(error.value) and "x.filled(0)" in str(error.value)
    assert "test_client_data.py:" in str(error.value)


ONLY_MASKED = {
    "indices of clients": lambda x: NUMBERED.select(x),
    "divided labels": lambda x: split.iid(x, 2, np.random.default_rng(0)),
    "a divided column": lambda x: split.by_column(x),
    "divided examples": lambda x: split.divide({"y": x}, [np.array([0]), np.array([1, 2])]),
    "superclasses": lambda x: split.pachinko([0, 1, 2], x, 1, np.random.default_rng(0)),
    "columns of a task": lambda x: ARRAYS.picked({"y": x}),
    "a list of a task": lambda x: ARRAYS.picked({"y": list(x)}),
}


@pytest.mark.parametrize("enter", ONLY_MASKED.values(), ids=ONLY_MASKED)
def test_masks_are_not_dropped_on_the_way(enter):
    with pytest.raises((fg.FederatedError, ValueError), match=r"masked array.*x\.filled"):
        enter(np.ma.array([0, 1, 2], mask=MASK))


CHANGED = {  # numbers, and what is said of them
    "int64": (np.array([1, 2**33 + 5, 2]), r"8589934597 is int64, and becomes 5 as int32"),
    "negative": (np.array([1, -(2**31) - 1, 2]), r"-2147483649 is int64.*2147483647 as int32"),
    "uint64": (np.array([1, 2**32 + 7, 2], np.uint64), r"4294967303 is uint64.*7 as uint32"),
    "float64": (np.array([1, -1e300, 2]), r"-1e\+300 is float64, and becomes -inf as float32"),
    "beside NaN": (np.array([np.nan, 1e300, np.inf]), r"1e\+300 is float64.*inf as float32"),
    "complex128": (np.array([1, 1e300j, 2]), r"1e\+300 is complex128.* as complex64"),
}


@every_entry
@pytest.mark.parametrize("numbers, why", CHANGED.values(), ids=CHANGED)
def test_numbers_that_do_not_fit_32_bits_are_refused(enter, where, numbers, why):
    with jax.enable_x64(False), pytest.raises(fg.FederatedError, match=where) as error:
        enter(numbers)
    if enter is on_nodes:  # a server is not told clients' numbers
        assert not re.search(r"\d{9}|e\+300", str(error.value))
        why = rf"are {numbers.dtype} and do not fit into"
    assert re.search(why, str(error.value)), error.value
    assert "jax_enable_x64" in str(error.value) and "test_client_data.py:" in str(error.value)


KEPT = {
    "int64": np.array([1, 2**31 - 1, -(2**31)]),
    "uint64": np.array([1, 2**32 - 1], np.uint64),
    "float64": np.array([3.4028235e38, np.inf, -np.inf, np.nan, 1e-300]),
    "nothing but NaN": np.array([np.nan]),
    "complex128": np.array([1j, complex(np.inf, np.nan)]),
    "bool": np.array([True, False]),
    "float16": np.array([1.5, np.inf], np.float16),
}


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("numbers", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_fit_stay(kind, numbers, x64):
    with jax.enable_x64(x64):
        with np.errstate(under="ignore"):
            wanted = numbers.astype(jax.dtypes.canonicalize_dtype(numbers.dtype))
        clients = KINDS[kind]([numbers] * 8)
        read = fg.program(lambda c: c.take(jnp.arange(len(numbers))), c=fg.CLIENTS)
        found = read.on(clients.executor)(clients.everyone)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, [wanted] * 8)


@pytest.mark.parametrize(
    "name", sorted(ENTRIES.keys() - {"hyperparameters", "fit", "places of examples"})
)
def test_with_x64_large_numbers_are_taken(name):
    enter, _ = ENTRIES[name]
    enter(np.array([1.0, 1e300, 2.0]))


class Nullable:
    """A column as pandas has it where values are missing: its dtype is one of pandas."""

    class dtype:
        kind = "i"

    shape = (3,)

    def __array__(self, dtype=None, copy=None):
        return np.array([1, None, 3], object)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_with_missing_values_are_refused(kind):
    with pytest.raises(fg.FederatedError, match=r"test_client_data.py:.*object"):
        KINDS[kind]([{"y": Nullable()}] * 8)


# --- more examples than 32 bits can count -------------------------------------------------------

HUGE = np.zeros((1_100_000_000, 0), np.float32)  # of no numbers: it takes no memory


@pytest.mark.parametrize("kind", ["in memory", "on a mesh"])
def test_more_examples_than_32_bits_are_refused(kind):
    """1,100,000,000 of the last client would begin at -2,094,967,296."""
    with pytest.raises(fg.CohortError, match=r"test_client_data.py:.*32 bits can count"):
        KINDS[kind]([HUGE] * 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_with_more_examples_than_32_bits_is_refused(kind):
    more = np.zeros((2**31, 0), np.float32)
    with pytest.raises(fg.CohortError, match=r"test_client_data.py:.*Client 3 has 2,147,483,648"):
        KINDS[kind]([HUGE[:1]] * 3 + [more] + [HUGE[:1]] * 4)


def test_the_rows_that_fill_up_a_last_batch_count_too(monkeypatch):
    monkeypatch.setattr(padding, "MOST", 9)
    read = (
        lambda x: fg.population([x]),
        fg.Examples.of,
        lambda x: OwnData(lambda _: x, None).rows("", 0, len(x)),
    )
    for reader in read:
        reader(np.zeros(4))
        with pytest.raises(fg.CohortError, match=r"test_client_data.py:.* 10 rows.*32 bits"):
            reader(np.zeros(5))


def test_more_steps_than_32_bits_are_refused():
    """2,000 batches, 2,000,000 times: as an int32 that is negative, and nothing was trained."""

    @fg.program(c=fg.CLIENTS)
    def steps(c):
        return fg.sum(c.fold(lambda i, batch, mask: i + 1, jnp.int32(0), 1, epochs=2_000_000))

    with pytest.raises(fg.ArgumentError, match=r"test_client_data.py:.*4,000,000,000 steps"):
        steps(fg.cohort([HUGE[:2000]]))


def test_a_gradient_cohort_of_more_examples_than_32_bits_has_some(monkeypatch):
    """Nodes, say: each has fewer, all together have more."""
    monkeypatch.setattr(gradient_cohort, "client_loss", lambda *_: jnp.float32(2.0))
    zeros, counts = np.zeros(3, np.int32), np.full(3, 10**9, np.int32)
    clients = fg.Cohort(HUGE[:1], zeros, counts, np.arange(3, dtype=np.int32), 10**9)
    with jax.enable_x64(False):
        total, (known, _) = gradient_cohort.GradientCohort().program(loss)(LINE, None, clients)
    assert total == 2.0 and known


@pytest.mark.parametrize("count", [10, 2**24 + 3, 10**8 + 7, 2**30 - 1])
@pytest.mark.parametrize("fraction", [0.1, 0.2, 1 / 3, 0.5, 0.9])
def test_there_is_room_for_all_that_is_held_out(count, fraction):
    """However it is rounded."""
    rule = fg.HeldOut(fraction)
    train, held = rule.split(fg.Examples(HUGE, jnp.int32(0), jnp.int32(count), count))
    assert 0 < int(held.count) <= held.capacity <= count
    assert int(train.count) + int(held.count) == count


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
