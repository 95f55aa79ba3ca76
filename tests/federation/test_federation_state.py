"""What clients keep between rounds stays on their nodes, and is that of their own last round."""

import gc
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.federation import InProcess, Policy
from fedgrad.federation.protocol.federation_errors import CohortMismatch, Refused
from fedgrad.federation.protocol.memory import KEPT
from fedgrad.federation.protocol.node_values import choose
from fedgrad.federation.protocol.state import begin, gather, restored, saved, scatter
from programs import normal

Z = normal(0, 4, 3)
COHORTS = [[0, 1], [1, 2], [0, 1, 3], [2, 3], [1, 3], [0, 2]]  # at first new clients, then none


@fg.program(z=fg.CLIENTS, state=fg.CLIENTS)
def variates(x, z, state):
    """As SCAFFOLD: what a client keeps changes what it sends next time."""
    direction = fg.broadcast(x) - z + state["control"]
    new = {"control": state["control"] - 0.5 * direction, "rounds": state["rounds"] + 1}
    return x - 0.3 * fg.mean(direction), new


FIRST = {"control": jnp.zeros(3), "rounds": jnp.int32(0)}


def simulated(cohorts=COHORTS):
    x, state = jnp.ones(3), jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), FIRST)
    found = []
    for clients in cohorts:
        index = jnp.asarray(clients)
        x, new = variates(x, Z[index], jax.tree.map(lambda leaf, i=index: leaf[i], state))
        state = jax.tree.map(lambda all, some, i=index: all.at[i].set(some), state, new)
        found.append(x)
    return found


def nodes(policy=None):
    transport = InProcess.of([np.asarray(z) for z in Z], policy)
    return transport, fg.executors.flower(transport, platforms=("cpu",))


def one_round(executor, x, state, clients, z=None):
    z = executor.clients(which=clients) if z is None else z
    x, new = variates.on(executor)(x, z, gather(state, z))
    return x, scatter(state, new)


def kept(transport):
    """How many arrays each node keeps."""
    return [
        sum(name.startswith(KEPT) for name in node.memory.entries)
        for node in transport.handlers.values()
    ]


def test_state_is_that_of_the_clients_own_last_round():
    transport, executor = nodes()
    x, state = jnp.ones(3), begin(FIRST, range(4))
    for clients, expected in zip(COHORTS, simulated(), strict=True):
        x, state = one_round(executor, x, state, clients)
        np.testing.assert_allclose(x, expected, rtol=1e-6)
    assert state["rounds"].shape == (4,) and state["control"].shape == (4, 3)
    total = fg.program(n=fg.CLIENTS)(lambda n: fg.sum(n)).on(executor)(state["rounds"])
    assert int(total) == sum(map(len, COHORTS))


def test_nodes_keep_one_state_each():
    transport, executor = nodes()
    x, state = jnp.ones(3), begin(FIRST, range(4))
    for clients in COHORTS:
        x, state = one_round(executor, x, state, clients)
    gc.collect()
    executor.federation.flush()
    assert kept(transport) == [2] * 4
    del state
    gc.collect()
    executor.federation.flush()
    assert kept(transport) == [0] * 4


def test_programs_are_soon_the_same():
    """A new client, one that was new the last time, and all others: each sends a program once."""
    transport, executor = nodes()
    x, state = jnp.ones(3), begin(FIRST, range(4))
    setup = []
    for _ in range(5):
        x, state = one_round(executor, x, state, [0, 1, 2, 3])
        setup.append(sum(b.setup for b in executor.report.traffic.values()))
    assert all(n > 1000 for n in setup[:3]) and setup[3:] == [0, 0]
    z = executor.clients()
    stages = len(executor.programs(variates, x, z, gather(begin(FIRST, range(4)), z)))
    assert len(executor.programs(variates, x, z, gather(state, z))) == stages
    mixed = scatter(state, gather(begin(FIRST, range(4)), executor.clients(which=[1])))
    assert len(executor.programs(variates, x, z, gather(mixed, z))) == 2 * stages


def test_a_server_goes_on_from_what_it_has_saved():
    transport, executor = nodes()
    x, state = jnp.ones(3), begin(FIRST, range(4))
    for clients in COHORTS[:3]:
        x, state = one_round(executor, x, state, clients)
    text, at = json.dumps(saved(state)), x
    later = x, state
    for clients in COHORTS[3:5]:  # while it has the state that it saved, so do the nodes
        later = one_round(executor, *later, clients)
    again = fg.executors.flower(transport, platforms=("cpu",))  # as in another process
    x, back = at, restored(begin(FIRST, range(4)), json.loads(text))
    for clients, expected in zip(COHORTS[3:], simulated()[3:], strict=True):
        x, back = one_round(again, x, back, clients)
        np.testing.assert_allclose(x, expected, rtol=1e-6)


def test_another_rounds_state_is_none():
    transport, executor = nodes()
    x, state = jnp.ones(3), begin(FIRST, range(4))
    x, state = one_round(executor, x, state, [0, 1])
    text = json.dumps(saved(state))
    for _ in range(2):  # the first state is not held, and forgotten
        x, state = one_round(executor, x, state, [0, 1])
        gc.collect()
    back = restored(begin(FIRST, range(4)), json.loads(text))
    with pytest.raises(CohortMismatch, match="has lost a value"):
        one_round(executor, x, back, [0, 1])
    x, _ = one_round(executor, x, back, [2, 3])  # who has not taken part has nothing to lose
    lenient = fg.executors.flower(executor.federation, missing="drop", platforms=("cpu",))
    x, state = one_round(lenient, x, back, [0, 2])
    assert [d.client for d in lenient.report.dropped] == [0]
    assert list(json.loads(json.dumps(saved(state)))[0]) == ["0", "1", "2"]


def test_clients_that_are_dropped_keep_their_state():
    transport, executor = nodes()
    lenient = fg.executors.flower(executor.federation, missing="drop", platforms=("cpu",))
    x, state = one_round(lenient, jnp.ones(3), begin(FIRST, range(4)), [0, 1, 2])
    before, z = saved(state), executor.clients(which=[0, 1, 2])
    node = transport.handlers[1001]
    transport.handlers[1001] = type("Broken", (), {"handle": lambda self, request: None})()
    short = fg.executors.flower(
        executor.federation, missing="drop", deadline=0.5, platforms=("cpu",)
    )
    x, state = one_round(short, x, state, [0, 1, 2], z)
    after = saved(state)
    transport.handlers[1001] = node
    assert all(a["1"] == b["1"] and a["0"] != b["0"] for a, b in zip(before, after, strict=True))
    one_round(lenient, x, state, [0, 1, 2])
    assert lenient.report.dropped == []


def test_a_site_checks_what_the_state_was_made_by():
    """The server cannot have another value of the client taken for its state."""
    transport, executor = nodes(Policy(anything=True, minimum_cohort=1))

    @fg.program(z=fg.CLIENTS)
    def raw(x, z):
        return fg.mean(z) * x, {"control": z + fg.broadcast(x), "rounds": jnp.int32(z[0])}

    z = executor.clients()
    x, state = one_round(executor, jnp.ones(3), begin(FIRST, range(4)), [0, 1, 2, 3])
    _, other = raw.on(executor)(jnp.ones(3), z)
    forged = json.loads(json.dumps(saved(state)))
    for mine, theirs in zip(forged, saved(other), strict=True):
        mine |= {client: [theirs[client][0], made] for client, (_, made) in mine.items()}
    with pytest.raises(Refused, match="declares that input"):
        one_round(executor, x, restored(begin(FIRST, range(4)), forged), [0, 1])


@fg.program(z=fg.CLIENTS, state=fg.CLIENTS)
def rows(x, z, state):
    """A loop over the rows of a state, that leaves new ones."""

    def step(x, row):
        move = fg.broadcast(x) - z + row
        return x - 0.3 * fg.mean(move), row - 0.5 * move

    return jax.lax.scan(step, x, state)


def test_states_in_loops():
    first = jnp.stack([jnp.zeros(3), jnp.ones(3)])
    transport, executor = nodes()
    x = y = jnp.ones(3)
    simulated, state, held = jnp.stack([first] * 4), begin(first, range(4)), []
    for clients in COHORTS:
        index, z = jnp.asarray(clients), executor.clients(which=clients)
        x, new = rows(x, Z[index], simulated[index])
        simulated = simulated.at[index].set(new)
        y, new = rows.on(executor)(y, z, gather(state, z))
        state = scatter(state, new)
        np.testing.assert_allclose(y, x, rtol=1e-6)
        held.append(state)
        state = restored(begin(first, range(4)), json.loads(json.dumps(saved(state))))


def test_of_clients_that_were_not_needed_the_state_stays_as_it_was():
    transport, executor = nodes()
    cohort, state = choose(executor.clients(), [0, 2, 3], 2), begin(FIRST, range(4))  # two of them
    node, gate = transport.handlers[1002], threading.Event()
    answer = node.handle
    node.handle = lambda request: answer(request) if gate.wait(60) else None
    x, new = variates.on(executor)(jnp.ones(3), cohort, gather(state, cohort))
    state = scatter(state, new)
    assert new["control"].clients == (0, 3) and list(saved(state)[0]) == ["0", "3"]
    gate.set()
    x, state = one_round(executor, x, state, [0, 2, 3])
    assert list(saved(state)[0]) == ["0", "2", "3"]


def test_two_placements():
    held_out = fg.Placement("held_out")

    @fg.program(z=fg.CLIENTS, state=fg.CLIENTS, w=held_out)
    def both(x, z, state, w):
        new = state + fg.broadcast(x) * z
        return x - fg.mean(new) + fg.mean(fg.broadcast(x, at=held_out) * w, at=held_out), new

    transport, executor = nodes()
    x = y = jnp.ones(3)
    simulated, state = jnp.zeros((4, 3)), begin(jnp.zeros(3), range(4))
    for mine, theirs in ([[0, 1], [2, 3]], [[1, 2], [0, 3]], [[0, 2], [1]]):
        i, j = jnp.asarray(mine), jnp.asarray(theirs)
        x, new = both(x, Z[i], simulated[i], Z[j])
        simulated = simulated.at[i].set(new)
        z, w = executor.clients(which=mine), executor.clients(which=theirs)
        y, new = both.on(executor)(y, z, gather(state, z), w)
        state = scatter(state, new)
        np.testing.assert_allclose(y, x, rtol=1e-6)


def test_derivatives_by_what_clients_keep():
    gradient = fg.grad(fg.program(z=fg.CLIENTS, state=fg.CLIENTS)(_loss), mode="reverse")
    transport, executor = nodes()
    x, state = one_round(executor, jnp.ones(3), begin(FIRST, range(4)), [0, 1])
    z = executor.clients()
    found = gradient.on(executor)(x, z, gather(state, z))
    _, some = variates(jnp.ones(3), Z[:2], jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), FIRST))
    whole = jax.tree.map(lambda leaf, new: jnp.stack([*new, leaf, leaf]), FIRST, some)
    np.testing.assert_allclose(found, gradient(x, Z, whole), rtol=1e-6)


def _loss(x, z, state):
    first = fg.mean(jnp.tanh(fg.broadcast(x) * z + state["control"]))
    return fg.mean(jnp.sum((fg.broadcast(first) - z) ** 2 * (1 + state["rounds"].astype(float))))


def test_a_state_stays_of_its_kind():
    transport, executor = nodes()
    z, state = executor.clients(), begin(jnp.zeros(2), range(4))
    with pytest.raises(fg.ArgumentError, match=r"was float64\[2\] each, and is float64\[3\] after"):
        scatter(state, z)
