"""Nodes that fail in every way: the call ends right, or with a typed error and the reason."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.federation.protocol.envelope import Envelope
from fedgrad.federation.protocol.federation_errors import CohortMismatch, FederationError, NoAnswer
from fedgrad.federation.protocol.in_process import InProcess
from fedgrad.federation.protocol.node import Node
from fedgrad.federation.protocol.node_data import Context
from fedgrad.federation.protocol.policy import Policy
from programs import assert_same, normal, state_in_and_out, two_rounds, weighted_mean

ANYTHING = Policy(anything=True, minimum_cohort=1)
REFERENCE = fg.executors.reference()
X, Z = normal(0, 3), normal(1, 4, 3)


@dataclass
class Faulty:
    """A node whose messages of kind "run" go wrong from number `since` on."""

    node: Node
    fault: Callable[[Envelope, Callable[[], Envelope]], Envelope]
    since: int = 0
    runs: int = 0
    requests: list[Envelope] = field(default_factory=list)

    def handle(self, request: Envelope) -> Envelope:
        self.requests.append(request)
        self.runs += request.kind == "run"
        if request.kind != "run" or self.runs <= self.since:
            return self.node.handle(request)
        return self.fault(request, lambda: self.node.handle(request))


def node(i: int, data: Any, **options: Any) -> Node:
    return Node(lambda _: data, ANYTHING, context=Context({"partition-id": i}), **options)


def faulty(fault, which=1, since=0, data=None):
    """A federation of which one node (or some) is at fault."""
    data = np.asarray(Z) if data is None else data
    which = [which] if isinstance(which, int) else which
    nodes = {
        100 + i: Faulty(node(i, own), fault, since if i in which else 10**9)
        for i, own in enumerate(data)
    }
    return InProcess(nodes)


def flower(transport, **options):
    return fg.executors.flower(transport, platforms=("cpu",), **options)


def _with(change):
    """A reply whose list of arrays is changed."""

    def fault(request, answer):
        reply = answer()
        return Envelope(reply.kind, reply.meta, tuple(change(list(reply.arrays))))

    return fault


def _floats(change):
    """A reply whose floating arrays are changed."""
    return _with(lambda arrays: [change(x) if x.dtype.kind == "f" else x for x in arrays])


def _raise(request, answer):
    raise RuntimeError("out of memory")


FAULTS = {
    "silent": (lambda r, a: None, "did not answer in time"),
    "broken": (_raise, "out of memory"),
    "error": (lambda r, a: Envelope("error", {"reason": "disk full"}), "disk full"),
    "strange": (lambda r, a: Envelope("maybe", {}), "replied with 'maybe'"),
    "nan": (_floats(lambda x: np.where(np.arange(x.size).reshape(x.shape), x, np.nan)), "finite"),
    "infinite": (_floats(lambda x: x - np.inf), "not finite"),
    "shape": (_floats(lambda x: x[..., None]), r"sent float64\[3, 1\] instead of float64\[3\]"),
    "dtype": (_floats(lambda x: x.astype("f")), r"sent float32\[3\] instead of float64"),
    "too few": (_with(lambda xs: xs[1:]), r"sent \d arrays instead of"),
    "too many": (_with(lambda xs: [*xs, *xs]), r"sent \d arrays instead of"),
    "too much": (_floats(lambda x: np.zeros(10**6)), r"sent float64\[1000000\]"),
    "forgets": (lambda r, a: Envelope("unknown", {"reason": "?"}), "forgets at once"),
}
every_fault = pytest.mark.parametrize("fault", FAULTS)
others = jnp.array([0, 2, 3])
GRADIENTS = {m: fg.value_and_grad(two_rounds, mode=m) for m in ("forward", "reverse", "mixed")}


@every_fault
def test_a_fault_fails_the_call_with_its_reason(fault):
    make, reason = FAULTS[fault]
    executor = flower(faulty(make))
    with pytest.raises(NoAnswer, match=rf"test_federation_faults\.py.*Client 1 .*{reason}"):
        GRADIENTS["forward"].on(executor)(X, executor.clients())


@every_fault
@pytest.mark.parametrize("missing", ["drop", "restart"])
def test_a_dropped_client_is_in_neither_value_nor_derivative(fault, missing):
    make, _ = FAULTS[fault]
    executor = flower(faulty(make), missing=missing)
    found = GRADIENTS["reverse"].on(executor)(X, executor.clients())
    assert_same(found, GRADIENTS["mixed"].on(REFERENCE)(X, Z[others]))
    report = executor.report
    assert (report.asked, report.answered) == ({"clients": 4}, {"clients": 3})
    assert [(d.client, d.placement) for d in report.dropped] == [(1, "clients")]
    assert report.restarts == 0
    assert "client 1 (clients) dropped" in str(report)


@pytest.mark.parametrize("fault", ["silent", "error", "nan"])
@pytest.mark.parametrize("since", [1, 2, 3])
def test_a_client_lost_between_rounds(fault, since):
    """Forward is two messages, and so is the way back; the client dies before one of them."""
    make, reason = FAULTS[fault]
    executor = flower(faulty(make, since=since))
    with pytest.raises(CohortMismatch, match=f"asked again is lost.*{reason}"):
        GRADIENTS["reverse"].on(executor)(X, executor.clients())
    # To begin again with fewer would show the lost client's term: sum before minus sum after.
    executor = flower(faulty(make, since=since), missing="drop")
    with pytest.raises(CohortMismatch, match=rf"lost.*{reason}.*minus.*missing='restart'"):
        GRADIENTS["reverse"].on(executor)(X, executor.clients())
    assert executor.report.restarts == 0
    assert [d.client for d in executor.report.dropped] == []  # nothing came out without it
    executor = flower(faulty(make, since=since), missing="restart")
    found = GRADIENTS["reverse"].on(executor)(X, executor.clients())
    assert_same(found, GRADIENTS["mixed"].on(REFERENCE)(X, Z[others]))
    assert executor.report.restarts == 1
    assert executor.report.answered == {"clients": 3}


def test_nothing_is_asked_again_of_those_that_are_left_unless_it_was_asked_for():
    """The server has no second sum from which the first could be subtracted."""
    transport = faulty(FAULTS["error"][0], since=1)
    executor = flower(transport, missing="drop")
    with pytest.raises(CohortMismatch):
        GRADIENTS["reverse"].on(executor)(X, executor.clients())
    assert [handler.runs for handler in transport.handlers.values()] == [2, 2, 2, 2]


def test_several_lost_one_after_another():
    nodes = {
        i: Faulty(node(i, np.asarray(z)), FAULTS["error"][0], since)
        for i, (z, since) in enumerate(zip(Z, (1, 5, 10**9, 10**9), strict=True))
    }
    executor = flower(InProcess(nodes), missing="restart")
    found = GRADIENTS["reverse"].on(executor)(X, executor.clients())
    assert_same(found, GRADIENTS["mixed"].on(REFERENCE)(X, Z[2:]))
    assert executor.report.restarts == 2
    assert sorted(d.client for d in executor.report.dropped) == [0, 1]


def test_if_nobody_is_left_there_is_no_result():
    for since, missing in ((0, "drop"), (0, "restart"), (1, "restart")):
        transport = faulty(FAULTS["nan"][0], which=[0, 1, 2, 3], since=since)
        executor = flower(transport, missing=missing)
        with pytest.raises(NoAnswer, match="0 clients answered, at least 1"):
            GRADIENTS["reverse"].on(executor)(X, executor.clients())
    executor = flower(faulty(FAULTS["error"][0]), missing="drop", at_least=4)
    with pytest.raises(NoAnswer, match=r"3 clients answered, at least 4 have to\. Client 1"):
        GRADIENTS["mixed"].on(executor)(X, executor.clients())


def test_no_result_is_over_fewer_than_the_sites_insist_on():
    """The first message is announced to three; that only two answer, no node can see."""
    transport = faulty(FAULTS["error"][0], data=np.asarray(Z)[:3])
    for handler in transport.handlers.values():
        handler.node.policy = Policy(anything=True, minimum_cohort=3)
    executor = flower(transport, missing="drop")
    with pytest.raises(NoAnswer, match="2 clients answered, at least 3"):
        GRADIENTS["mixed"].on(executor)(X, executor.clients())


def test_what_nodes_say_of_their_data_is_not_believed():
    class Liar(Faulty):
        def handle(self, request):
            reply = self.node.handle(request)
            if "part" not in request.meta:
                return reply
            return Envelope("ok", {**reply.meta, **self.fault})

    for lie in (
        {"structure": "]["},
        {"structure": "7"},
        {"shapes": "[[1], [2]]"},
        {"dtypes": '["float99"]'},
        {"capacity": '"many"'},
        {"shapes": '[["a"]]'},
    ):
        executor = flower(InProcess({0: Liar(node(0, np.asarray(Z)), lie)}))
        for ask in (executor.clients, executor.population):
            with pytest.raises(
                FederationError, match="Client 0: what it says of its data makes no sense"
            ):
                ask()


def test_a_dropped_client_is_dropped_from_weights_too():
    counts = np.array([1.0, 5.0, 2.0, 3.0])
    nodes = {
        i: Faulty(
            node(i, {"z": np.asarray(Z[i]), "count": counts[i]}),
            FAULTS["error"][0],
            0 if i == 1 else 10**9,
        )
        for i in range(4)
    }
    executor = flower(InProcess(nodes), missing="drop")
    found = weighted_mean.on(executor)(X, executor.clients("z"), executor.clients("count"))
    squares = ((np.asarray(X) - np.asarray(Z)) ** 2).sum(1)[[0, 2, 3]]
    np.testing.assert_allclose(found, np.average(squares, weights=counts[[0, 2, 3]]))


def test_numbers_that_are_not_finite_can_be_allowed():
    f = fg.program(z=fg.CLIENTS)(lambda z: fg.sum(1 / z))
    rows = np.array([[1.0], [0.0], [2.0]])
    executor = flower(InProcess.of(list(rows)), non_finite="allow")
    assert np.isinf(f.on(executor)(executor.clients()))
    executor = flower(InProcess.of(list(rows)))
    with pytest.raises(NoAnswer, match="not finite"):
        f.on(executor)(executor.clients())


# --- late, duplicate, restarted -----------------------------------------------------------------


def test_a_late_reply_is_nobodys():
    gate = threading.Event()

    def slow(request, answer):
        if not gate.is_set():
            gate.wait(30)
        return answer()

    mean = fg.program(z=fg.CLIENTS)(lambda x, z: fg.mean(fg.broadcast(x) * z))
    executor = flower(faulty(slow, since=1))
    mean.on(executor)(X, executor.clients())  # compiled, so that the others are in time
    executor = flower(executor.federation, deadline=3, missing="drop")
    assert_same(mean.on(executor)(X, executor.clients()), (X[None] * Z[others]).mean(0))
    gate.set()  # its old answer comes now, while the next call waits for a new one
    patient = flower(executor.federation, deadline=30)
    assert_same(mean.on(patient)(2 * X, patient.clients()), (2 * X[None] * Z).mean(0))


def test_a_request_that_arrives_twice_counts_once():
    class Twice(Faulty):
        def handle(self, request):
            self.node.handle(request)
            return self.node.handle(request)

    nodes = {i: Twice(node(i, np.asarray(z)), None) for i, z in enumerate(Z)}
    executor = flower(InProcess(nodes))
    found = GRADIENTS["forward"].on(executor)(X, executor.clients())
    assert_same(found, GRADIENTS["forward"].on(REFERENCE)(X, Z))


def test_a_restarted_node_gets_its_programs_again():
    transport = InProcess.of(list(np.asarray(Z)))
    executor = flower(transport)
    program, handle = GRADIENTS["reverse"].on(executor), executor.clients()
    wanted = program(X, handle)
    transport.handlers[1001] = node(1, np.asarray(Z[1]))  # the same id, but it knows nothing
    assert_same(program(X, handle), wanted)
    assert [b.setup > 0 for _, b in sorted(executor.report.traffic.items())] == [0, 1, 0, 0]
    del transport.handlers[1002]
    transport.handlers[77] = node(2, np.asarray(Z[2]))  # another id, but it is the same client
    assert_same(program(X, handle), wanted)
    assert [b.setup > 0 for _, b in sorted(executor.report.traffic.items())] == [0, 0, 1, 0]


def test_a_client_that_is_not_connected_is_not_waited_for():
    transport = InProcess.of(list(np.asarray(Z)))
    executor = flower(transport, deadline=10**6)
    handle = executor.clients()
    del transport.handlers[1001]
    with pytest.raises(NoAnswer, match=r"Client 1 .*is not connected"):
        GRADIENTS["mixed"].on(executor)(X, handle)
    dropping = flower(executor.federation, missing="drop")
    found = GRADIENTS["mixed"].on(dropping)(X, handle)
    assert_same(found, GRADIENTS["mixed"].on(REFERENCE)(X, Z[others]))


def test_a_node_that_lost_its_state_is_a_mismatch_or_dropped():
    def own(i):
        return {"z": np.asarray(Z[i]), "state": np.zeros(3)}

    transport = InProcess.of([own(i) for i in range(4)])
    executor = flower(transport)
    _, state = state_in_and_out.on(executor)(X, *map(executor.clients, ("z", "state")))
    transport.handlers[1001] = node(1, own(1))
    with pytest.raises(CohortMismatch, match=r"Client 1 .*has lost a value"):
        state_in_and_out.on(executor)(X, executor.clients("z"), state)
    dropping = flower(executor.federation, missing="drop")
    found, after = state_in_and_out.on(dropping)(X, executor.clients("z"), state)
    rows = Z[others]
    _, local = state_in_and_out.on(REFERENCE)(X, rows, jnp.zeros((3, 3)))
    wanted, _ = state_in_and_out.on(REFERENCE)(X, rows, local)
    assert_same(found, wanted)
    assert after.clients == (0, 2, 3)
    # From now on the state is of three clients and the data of four.
    with pytest.raises(CohortMismatch, match="on different clients"):
        state_in_and_out.on(executor)(X, executor.clients("z"), after)
    state_in_and_out.on(dropping)(X, executor.clients("z"), after)
    assert dropping.report.answered == {"clients": 3}


def test_what_a_node_keeps_expires():
    now = [0.0]
    nodes = {}
    for i in range(2):
        nodes[i] = node(i, {"z": np.asarray(Z[i]), "state": np.zeros(3)})
        nodes[i].memory.clock = lambda: now[0]
    executor = flower(InProcess(nodes))
    program = state_in_and_out.on(executor)
    z, state = executor.clients("z"), executor.clients("state")
    for _ in range(3):  # what is used stays
        _, state = program(X, z, state)
        now[0] += 400
    now[0] += 601
    with pytest.raises(CohortMismatch, match="has lost a value"):
        program(X, z, state)
    assert not any(name.startswith("kept/") for n in nodes.values() for name in n.memory.entries)


# --- over-selection -----------------------------------------------------------------------------


def test_over_selection_takes_the_first_and_never_waits_for_the_others():
    slow, end = [1, 3], threading.Event()

    def waits(request, answer):
        end.wait()
        return answer()

    rows = normal(5, 6, 3)
    transport = faulty(waits, which=slow, data=[{"z": z[None]} for z in np.asarray(rows)])
    executor = flower(transport, deadline=10**6)
    population = executor.population("z", over_select=2.0)

    @fg.program(data=fg.CLIENTS)
    def f(x, data):
        z, _ = data.batch(0, 1)
        return two_rounds(x, z[0])

    for seed in range(3):
        cohort = population.sample(jax.random.key(seed), 3)
        assert len(cohort) == 3 and len(cohort.count.clients) == 6
        found = fg.value_and_grad(f, mode="reverse").on(executor)(X, cohort)
        taken = {0, 1, 2, 3, 4, 5} - {d.client for d in executor.report.dropped}
        assert not taken & set(slow)
        assert executor.report.answered == {"clients": 3}
        assert {d.reason for d in executor.report.dropped} == {"others answered first"}
        wanted = GRADIENTS["mixed"].on(REFERENCE)(X, rows[jnp.array(sorted(taken))])
        assert_same(found, wanted)
    end.set()


def test_over_selection_takes_no_more_than_it_wants():
    """An engine may hand over more answers than were enough."""

    class Generous(InProcess):
        def exchange(self, requests, deadline, enough=None):
            return super().exchange(requests, deadline)

    data = [{"z": z[None]} for z in np.asarray(Z)]
    executor = flower(Generous(faulty(None, which=[], data=data).handlers))
    mean = fg.program(data=fg.CLIENTS)(lambda data: fg.mean(data.batch(0, 1)[0]["z"][0]))
    cohort = executor.population(over_select=2.0).sample(jax.random.key(0), 2)
    found = mean.on(executor)(cohort)
    taken = [i for i in range(4) if i not in {d.client for d in executor.report.dropped}]
    assert len(taken) == 2 == executor.report.answered["clients"]
    np.testing.assert_allclose(found, Z[jnp.array(taken)].mean(0))


def test_state_of_the_clients_that_were_first_goes_with_the_cohort_they_came_from():
    executor = flower(InProcess.of([{"z": z[None]} for z in np.asarray(Z)]))
    cohort = executor.population("z", over_select=2.0).sample(jax.random.key(0), 2)

    @fg.program(data=fg.CLIENTS)
    def begin(data):
        z = data.batch(0, 1)[0][0]
        return fg.sum(z), z * 2

    @fg.program(data=fg.CLIENTS, state=fg.CLIENTS)
    def go_on(data, state):
        return fg.sum(data.batch(0, 1)[0][0]), fg.sum(state)

    first, state = begin.on(executor)(cohort)
    again, double = go_on.on(executor)(cohort, state)
    assert_same(again, first)  # the same clients, though others may be faster now
    assert_same(double, 2 * first)
    rest = [client for client in cohort.count.clients if client not in state.clients]
    other = executor.population("z").select(rest)
    with pytest.raises(CohortMismatch, match="on different clients"):
        go_on.on(executor)(other, state)


def test_over_selection_with_too_few_answers():
    transport = faulty(FAULTS["error"][0], which=[0, 1, 2])
    executor = flower(transport)
    mean = fg.program(data=fg.CLIENTS)(lambda data: fg.mean(data.batch(0, 1)[0][0]))
    cohort = executor.population(over_select=4.0).sample(jax.random.key(0), 2)
    with pytest.raises(NoAnswer, match="disk full"):
        mean.on(executor)(cohort)
    dropping = flower(executor.federation, missing="drop")
    assert float(mean.on(dropping)(cohort)) == pytest.approx(float(Z[3, 0]))
    assert dropping.report.answered == {"clients": 1}
