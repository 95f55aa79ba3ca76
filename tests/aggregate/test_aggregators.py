"""The seam for other ways to sum: laws of every aggregator, on every program and executor."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.federation import InProcess
from laws import EXECUTORS
from programs import TABLE, assert_same, class_1, normal, stateful

X, Z = normal(0, 3), normal(1, 4, 3)


def to_thirds(values):
    """Thirds of the values, in one flat array for each dtype, and a token."""
    flat = {}
    for x in [x / 3 for x in values if jnp.issubdtype(x.dtype, jnp.inexact)]:
        flat.setdefault(str(x.dtype), []).append(x.reshape(-1))
    packed = [jnp.concatenate(parts) for _, parts in sorted(flat.items())]
    exact = [x for x in values if not jnp.issubdtype(x.dtype, jnp.inexact)]
    return [*packed, *exact, jnp.int32(7)]


def from_thirds(sums, shapes):
    floating = [s for s in shapes if jnp.issubdtype(s.dtype, jnp.inexact)]
    names = sorted({str(s.dtype) for s in floating})
    rest = dict(zip(names, sums[: len(names)], strict=True))
    exact = iter(sums[len(names) : -1])
    found = []
    for s in shapes:
        if s not in floating:
            found.append(next(exact))
            continue
        size = int(np.prod(s.shape))
        found.append(3 * rest[str(s.dtype)][:size].reshape(s.shape))
        rest[str(s.dtype)] = rest[str(s.dtype)][size:]
    return found


THIRDS = fg.aggregate.Aggregator("thirds", to_thirds, from_thirds)
SCALE = 2.0**40


def to_ring(values):
    """Fixed point numbers of int64."""
    return [jnp.round(x * SCALE).astype(jnp.int64) if x.dtype == jnp.float64 else x for x in values]


def from_ring(sums, shapes):
    pairs = zip(sums, shapes, strict=True)
    return [x.astype(s.dtype) / SCALE if s.dtype == jnp.float64 else x for x, s in pairs]


def summing(name, aggregator):
    return dataclasses.replace(EXECUTORS[name], aggregator=aggregator)


RING = fg.aggregate.Aggregator("ring", to_ring, from_ring)


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize("case", TABLE, ids=lambda c: c.name)
def test_every_program_means_the_same(case, name):
    args = case.args(3)
    expected = case.program(*args)
    assert_same(case.program.on(summing(name, THIRDS))(*args), expected)


def test_plain_is_the_identity():
    plain = fg.executors.reference(aggregator=fg.aggregate.plain)
    plan, same = fg.plan(class_1, X, Z), fg.plan(class_1.on(plain), X, Z)
    assert str(plan) == str(same) and plan.traffic == same.traffic


@pytest.mark.parametrize("mode", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("program", [class_1, stateful], ids=lambda p: p.name)
def test_derivatives_are_summed_so_too_and_the_plan_shows_it(program, mode):
    gradient = fg.grad(program, mode=mode)
    ring = gradient.on(fg.executors.local(aggregator=RING))
    np.testing.assert_allclose(ring(X, Z), gradient(X, Z), rtol=1e-9, atol=1e-10)
    plain, encoded = fg.plan(gradient, X, Z), fg.plan(ring, X, Z)
    assert [t.up for t in encoded.traffic] == [t.up for t in plain.traffic]
    assert {r.dtype for r in encoded.audit().releases} <= {"int64", "int32"}
    assert encoded.audit().releases[0].source == plain.audit().releases[0].source


def test_nodes_send_what_is_encoded():
    nodes = InProcess.of([{"z": np.asarray(row)} for row in Z])
    with fg.executors.flower(nodes, aggregator=RING) as executor:
        z = executor.clients("z")
        found = fg.value_and_grad(class_1).on(executor)(X, z)
    assert_same(found, fg.value_and_grad(class_1)(X, Z), rtol=1e-9)


def test_a_decoder_that_forgets_something_is_refused():
    short = fg.aggregate.Aggregator("short", lambda xs: xs, lambda sums, shapes: sums[:-1])
    with pytest.raises(fg.PlanError, match=r"aggregator 'short' decodes .* where the sums are"):
        class_1.on(fg.executors.local(aggregator=short))(X, Z)


@pytest.mark.parametrize(
    "encode, words",
    [
        (lambda xs: None, "a list of arrays; got None"),
        (lambda xs: xs[0], "a list of arrays"),
        (lambda xs: [], "at least one array"),
        (lambda xs: [x > 0 for x in xs], "encodes .'bool'.*: .* of numbers"),
    ],
    ids=["None", "an array", "nothing", "bools"],
)
def test_what_cannot_be_summed_is_refused(encode, words):
    odd = fg.aggregate.Aggregator("odd", encode, lambda sums, shapes: sums)
    with pytest.raises(fg.PlanError, match=f"aggregator 'odd'.*{words}"):
        class_1.on(fg.executors.local(aggregator=odd))(X, Z)


def test_a_million_parameters_and_a_hundred_clients():
    @fg.program(z=fg.CLIENTS)
    def update(w, z):
        return fg.mean(fg.broadcast(w) * z)

    w, z = jnp.ones(1_000_000, jnp.float32), jnp.ones(100, jnp.float32)
    run = jax.jit(lambda w, z: update.on(fg.executors.local(aggregator=THIRDS))(w, z))
    compiled = run.lower(w, z).compile()
    np.testing.assert_allclose(compiled(w, z)[:3], 1.0, rtol=1e-5)
    assert compiled.memory_analysis().temp_size_in_bytes < 60 * w.nbytes
