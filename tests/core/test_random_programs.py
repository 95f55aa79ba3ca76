"""The laws on programs that nobody thought of.

A program is a list of steps on two growing lists of vectors, one of the server and one of the
clients. Read with fg.broadcast, fg.sum and fg.mean it is a federated program; read with numpy's
broadcasting, sums and means it works on all clients' vectors at once.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import fedgrad as fg
from programs import Moved, assert_same, forgetting

N, MATRIX = 3, jnp.array([[0.2, -0.7], [0.9, 0.4]])
X, Z = jnp.array([0.4, -0.3]), jnp.array([[0.5, 1.0], [-0.8, 0.3], [0.1, -0.6]])


@dataclasses.dataclass(frozen=True)
class Words:
    """How a program says what crosses between server and clients."""

    broadcast: object
    sum: object
    mean: object
    weighted: object


FEDERATED = Words(fg.broadcast, fg.sum, fg.mean, lambda x, w: fg.mean(x, weights=w[..., 0] ** 2))
STACKED = Words(
    lambda x: jnp.broadcast_to(x, (N, *x.shape)),
    lambda x: x.sum(0),
    lambda x: x.mean(0),
    lambda x, w: (x * w[:, :1] ** 2).sum(0) / (w[:, 0] ** 2).sum(),
)

# name: (where its operands are, where its result is, what it does)
STEPS = {
    "broadcast": ("s", "c", lambda words, a: words.broadcast(a)),
    "sum": ("c", "s", lambda words, a: jnp.tanh(words.sum(a))),
    "mean": ("c", "s", lambda words, a: words.mean(a)),
    "weighted": ("cc", "s", lambda words, a, b: words.weighted(a, b + 2)),
    "add at server": ("ss", "s", lambda words, a, b: a + b),
    "mul at server": ("ss", "s", lambda words, a, b: a * b),
    "sin at server": ("s", "s", lambda words, a: jnp.sin(a)),
    "dot at server": ("s", "s", lambda words, a: a @ MATRIX),
    "add at client": ("cc", "c", lambda words, a, b: a + b),
    "mul at client": ("cc", "c", lambda words, a, b: a * b),
    "cos at client": ("c", "c", lambda words, a: jnp.cos(a)),
    "dot at client": ("c", "c", lambda words, a: a @ MATRIX),
}

# Operands are counted from the end of their list, so that long chains of rounds are likely.
steps = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 2), st.integers(0, 2)),
    min_size=2,
    max_size=12,
)
back_and_forth = [["broadcast", "mul at client", "sum"], ["broadcast", "cos at client", "mean"]]
chains = st.lists(
    st.sampled_from(back_and_forth),
    min_size=0,
    max_size=3,
).map(lambda parts: [(name, 0, 1) for part in parts for name in part])
scripts = st.builds(lambda a, b, c: a + b + c, chains, steps, chains)


# Control flow around communication: (which, script, other script), also inside of itself. A cond
# is decided by what the server knows before everything, or by its latest value.
LOOPS = ["scan", "cond by start", "cond by latest"]
flows = st.recursive(
    st.builds(lambda a, b: a + b, st.sampled_from([[], [("broadcast", 0, 1)]]), steps),
    lambda inner: st.builds(
        lambda before, loop, after: [*before, loop, *after],
        inner,
        st.tuples(st.sampled_from(LOOPS), inner, inner),
        st.sampled_from([[], [("broadcast", 0, 1), ("mul at client", 0, 1), ("sum", 0, 1)]]),
    ),
    max_leaves=6,
)


def controlled(words, flow, start, state):
    """A loop of a script; over all clients at once, in plain Python."""
    which, *scripts = flow
    bodies = [lambda state, script=script: read(words, script, *state, start) for script in scripts]
    if which == "scan" and words is FEDERATED:
        return jax.lax.scan(lambda c, _: (bodies[0](c), None), state, None, length=2)[0]
    if which == "scan":
        return bodies[0](bodies[0](state))
    taken = jnp.sum(start if which == "cond by start" else state[0]) > 0.05
    if words is FEDERATED:
        return jax.lax.cond(taken, *bodies, state)
    return jax.tree.map(lambda a, b: jnp.where(taken, a, b), *[body(state) for body in bodies])


def read(words, script, x, z, start=None):
    start = x if start is None else start
    values = {"s": [x], "c": [z]}
    for name, i, j in script:
        if name in LOOPS:
            state = values["s"][-1], values["c"][-1]
            found = controlled(words, (name, i, j), start, state)
            for at, value in zip("sc", found, strict=True):
                values[at].append(value)
            continue
        operands, result, fun = STEPS[name]
        chosen = [
            values[at][max(-len(values[at]), -1 - back)]
            for at, back in zip(operands, (i, j), strict=False)
        ]
        values[result].append(fun(words, *chosen))
    return values["s"][-1], values["c"][-1]


def federated(script, loop):
    @fg.program(z=fg.CLIENTS)
    def program(x, z):
        if not loop:
            return read(FEDERATED, script, x, z)
        body = lambda carry, _: (read(FEDERATED, script, *carry), fg.sum(carry[1]))
        return jax.lax.scan(body, (x, z), None, length=2)

    return program


def stacked(script, loop, x, z):
    if not loop:
        return read(STACKED, script, x, z)
    rows = []
    for _ in range(2):
        rows.append(z.sum(0))
        x, z = read(STACKED, script, x, z)
    return (x, z), jnp.stack(rows)


@given(scripts, st.booleans(), st.permutations(range(N)))
def test_meaning_traffic_and_permutation(script, loop, order):
    program, moved = federated(script, loop), Moved()
    run = program.on(fg.executors.reference(observe=moved))
    found = run(X, Z)
    assert_same(found, stacked(script, loop, X, Z))

    plan = fg.plan(program, X, Z)
    counted = collections.Counter()
    for t in plan.traffic:
        counted[t.down, t.down_bytes, t.up, t.up_bytes] += t.times
    for client in range(N):
        assert collections.Counter(moved.messages.get(("clients", client), [])) == counted
    assert plan.rounds == counted.total()
    assert plan.audit().only_sums

    order = np.array(order)
    server, client = found[0] if loop else found
    assert_same(jax.tree.leaves(run(X, Z[order]))[:2], [server, client[order]])


@given(scripts, st.booleans())
def test_recomputing_changes_only_messages(script, loop):
    program = federated(script, loop)
    found = program.on(fg.executors.reference(recompute=True))(X, Z)
    assert_same(found, stacked(script, loop, X, Z))
    once, twice = fg.plan(program, X, Z), forgetting(program, X, Z)
    assert once.rounds == twice.rounds
    assert [t.up for t in once.traffic] == [t.up for t in twice.traffic]
    assert all(a.down <= b.down for a, b in zip(once.traffic, twice.traffic, strict=True))
    if not loop:
        assert twice.client_memory == {"clients": 0}


@settings(max_examples=8)
@given(scripts, st.booleans(), st.sampled_from([None, 1, 2]))
def test_local_and_its_derivative(script, loop, chunk):
    program = federated(script, loop).on(fg.executors.local(chunk=chunk))

    def scalar(f):
        return lambda x: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(x)))

    def plain(x):
        return stacked(script, loop, x, Z)

    found = jax.jit(lambda x: (program(x, Z), jax.grad(scalar(lambda x: program(x, Z)))(x)))(X)
    wanted = jax.jit(lambda x: (plain(x), jax.grad(scalar(plain))(x)))(X)
    assert_same(found, wanted, rtol=1e-7)


AGAIN, FORGETFUL = (fg.CostModel(readdress=True, client_memory=memory) for memory in (None, 0))
MODES = ["forward", "reverse", "mixed", AGAIN, FORGETFUL]


@settings(max_examples=20)
@given(scripts, st.booleans(), st.sampled_from(MODES), st.sampled_from([0, 1]))
def test_derivatives(script, loop, mode, argnum):
    if argnum and mode == "forward":
        mode = "reverse"  # every client has its own derivative, which is not pushed forward
    if loop and mode == FORGETFUL:
        mode = AGAIN  # what clients carry from one iteration to the next they have to keep
    program = federated(script, loop)

    @fg.program(z=fg.CLIENTS)
    def number(x, z):
        server, client = program(x, z)[0] if loop else program(x, z)
        return jnp.sum(jnp.sin(server)) + fg.sum(jnp.sum(jnp.cos(client)))

    def plain(x, z):
        server, client = stacked(script, loop, x, z)[0] if loop else stacked(script, loop, x, z)
        return jnp.sum(jnp.sin(server)) + jnp.sum(jnp.cos(client))

    found = fg.value_and_grad(number, argnum, mode)(X, Z)
    assert_same(found, jax.jit(jax.value_and_grad(plain, argnum))(X, Z), rtol=1e-7)


@settings(max_examples=8)
@given(flows, st.booleans(), st.sampled_from(["forward", "reverse", "mixed"]), st.booleans())
def test_derivatives_of_control_flow(script, loop, mode, other_side):
    x = -X if other_side else X

    def number(words, x, z):
        server, client = read(words, [("scan", script, [])] if loop else script, x, z)
        return jnp.sum(jnp.sin(server)) + jnp.sum(words.sum(jnp.cos(client)))

    program = fg.program(z=fg.CLIENTS)(lambda x, z: number(FEDERATED, x, z))
    try:
        fg.plan(program, x, Z)
    except fg.PlacementError:  # a cond that nobody but clients would run, by what the server knows
        reject()
    found = fg.value_and_grad(program, mode=mode)(x, Z)
    plain = jax.value_and_grad(lambda x: number(STACKED, x, Z))
    assert_same(found, jax.jit(plain)(x), rtol=1e-7)
