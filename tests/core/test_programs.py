"""Laws that hold for every program of the table."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from programs import TABLE, Case, Moved, assert_same, forgetting, permuted

N = 5
every_case = pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)


@functools.cache
def arguments(case: Case):
    return case.args(N)


@functools.cache
def expected(case: Case):
    """The result in plain JAX."""
    return case.centralized(*arguments(case))


@functools.cache
def observed(case: Case):
    """The result of the reference executor, and what it has moved."""
    moved = Moved()
    result = case.program.on(fg.executors.reference(observe=moved))(*arguments(case))
    return result, moved.messages


@every_case
def test_table_says_what_the_result_is(case):
    leaves = jax.tree.leaves(expected(case))
    assert case.scalar == (len(leaves) == 1 and leaves[0].shape == ())
    assert all(leaves[i].shape[0] == N for i in case.client_outputs)
    outputs = fg.plan(case.program, *arguments(case)).graph.outputs
    placed = tuple(i for i, v in enumerate(outputs) if v.at not in ("server", "anywhere"))
    assert placed == case.client_outputs


@every_case
def test_reference_equals_centralized(case):
    assert_same(observed(case)[0], expected(case))


@every_case
def test_local_equals_centralized(case):
    assert_same(case.program(*arguments(case)), expected(case))


@pytest.mark.parametrize("chunk", [1, 2, N])
@every_case
def test_chunked_equals_unchunked(case, chunk):
    chunked = case.program.on(fg.executors.local(chunk=chunk))
    assert_same(chunked(*arguments(case)), expected(case))


@pytest.mark.parametrize("case", [c for c in TABLE if c.symmetric], ids=lambda case: case.name)
def test_permuting_clients_changes_nothing(case):
    args = arguments(case)
    sizes = fg.plan(case.program, *args).clients
    orders = {at: np.random.default_rng(0).permutation(n) for at, n in sizes.items()}
    assert all((order != np.arange(len(order))).any() for order in orders.values())
    order = orders[next(iter(orders))]
    leaves, tree = jax.tree.flatten(expected(case))
    wanted = [x[order] if i in case.client_outputs else x for i, x in enumerate(leaves)]
    found = case.program(*permuted(case.program, args, orders))
    assert_same(found, jax.tree.unflatten(tree, wanted))


@every_case
def test_plan_counts_what_the_reference_moves(case):
    plan = fg.plan(case.program, *arguments(case))
    messages = observed(case)[1]
    for placement, clients in plan.clients.items():
        certain, possible = collections.Counter(), set()
        for t in plan.traffic:
            if t.placement == placement:
                record = (t.down, t.down_bytes, t.up, t.up_bytes)
                possible.add(record)
                certain[record] += t.times or 0
        for client in range(clients):
            seen = collections.Counter(messages.get((placement, client), []))
            if case.decided:
                assert set(seen) <= possible and seen >= certain
            else:
                assert seen == certain
    assert {client for client, _ in messages} <= set(plan.clients)


@every_case
def test_number_of_rounds(case):
    plan = fg.plan(case.program, *arguments(case))
    assert plan.rounds == case.rounds
    if len(plan.clients) == 1 and not case.decided:  # then each message of a client is a round
        assert {len(sent) for sent in observed(case)[1].values()} == {case.rounds}


@every_case
def test_shapes_are_enough_for_a_plan(case):
    args = arguments(case)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    assert fg.plan(case.program, *shapes).traffic == fg.plan(case.program, *args).traffic


@every_case
def test_recomputing_clients_remember_nothing(case):
    memory = forgetting(case.program, *arguments(case)).client_memory
    assert case.carries == any(memory.values())
    moved = Moved()
    reference = fg.executors.reference(observe=moved, recompute=True)
    found = case.program.on(reference)(*arguments(case))
    assert_same(found, expected(case))


@every_case
def test_under_jit_and_vmap(case):
    args = list(arguments(case))
    first = case.server_argnums[0]
    many = jax.tree.map(lambda x: jnp.stack([x, x + 0.25]), args[first])

    def run(x):
        return case.program(*args[:first], x, *args[first + 1 :])

    def plain(x):
        return case.centralized(*args[:first], x, *args[first + 1 :])

    one = [plain(jax.tree.map(lambda x, i=i: x[i], many)) for i in (0, 1)]
    wanted = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one)
    assert_same(jax.jit(jax.vmap(run))(many), wanted)


def functional(outputs):
    """A scalar that depends on every leaf of a result."""
    return sum(jnp.sum(jnp.sin(x) * (i + 1)) for i, x in enumerate(jax.tree.leaves(outputs)))


@every_case
def test_jax_differentiates_through_a_call(case):
    args = arguments(case)

    def derivative(f):
        def of_server(*server):
            full = list(args)
            for position, value in zip(case.server_argnums, server, strict=True):
                full[position] = value
            return functional(f(*full))

        take = jax.grad if case.reverse else jax.jacfwd
        positions = tuple(range(len(case.server_argnums)))
        return jax.jit(take(of_server, positions))(*(args[i] for i in case.server_argnums))

    if case.name.startswith("custom_") and case.name.endswith("_around"):
        with pytest.raises(fg.PlanError, match=r"custom derivative"):
            derivative(case.program)
        return
    found = derivative(case.program)
    assert all(jnp.any(x != 0) for x in jax.tree.leaves(found))
    assert_same(found, derivative(case.centralized), rtol=1e-8)
