"""Who has to be there: a client that cannot be asked is not left out in silence."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from fedgrad.federation.protocol.envelope import Envelope
from fedgrad.federation.protocol.federation_errors import NoAnswer
from fedgrad.federation.protocol.in_process import InProcess
from fedgrad.federation.protocol.node import Node
from fedgrad.federation.protocol.node_data import Context
from fedgrad.federation.protocol.policy import Policy

ANYTHING = Policy(anything=True, minimum_cohort=1)
DATA = [{"x": np.full((n, 2), float(i)), "y": np.zeros(n)} for i, n in enumerate((2, 3, 2))]


class Wrong:
    """A node that goes wrong when it is asked who it is, or what its data are like."""

    def __init__(self, node, when, answer):
        self.node, self.when, self.answer = node, when, answer

    def handle(self, request):
        asked = "data" if "part" in request.meta else "who"
        wrong = request.kind == "describe" and asked == self.when
        return self.answer(request) if wrong else self.node.handle(request)


def _broken(context):
    raise OSError("the disk of patient 4711 is full")


def node(i, data=None):
    load = _broken if data is _broken else lambda _: DATA[i] if data is None else data
    return Node(load, ANYTHING, context=Context({"partition-id": i}))


SAYS = Envelope("error", {"reason": "out of order"})
ABSENT = {
    "does not say who it is": (lambda: Wrong(node(1), "who", lambda r: None), "does not answer"),
    "cannot say who it is": (lambda: Wrong(node(1), "who", lambda r: SAYS), "out of order"),
    "has no data": (lambda: node(1, _broken), "OSError on the node"),
    "does not say what it has": (
        lambda: Wrong(node(1), "data", lambda r: None),
        "does not answer",
    ),
    "cannot say what it has": (
        lambda: Wrong(node(1), "data", lambda r: SAYS),
        "out of order",
    ),
    "refuses to say what it has": (
        lambda: Wrong(node(1), "data", lambda r: Envelope("refused", {"reason": "not to you"})),
        "not to you",
    ),
    "says nothing with many words": (
        lambda: Wrong(node(1), "data", lambda r: Envelope("strange", {})),
        "it replies with 'strange'",
    ),
    "says nonsense of what it has": (
        lambda: Wrong(node(1), "data", lambda r: Envelope("ok", {"structure": "nonsense"})),
        "makes no sense",
    ),
    "says half of what it has": (
        lambda: Wrong(node(1), "data", lambda r: _half(node(1).handle(r))),
        "makes no sense",
    ),
}


def _half(reply):
    return Envelope("ok", {**reply.meta, "shapes": "[[-1]]", "capacity": "Infinity"})


ASKING = {
    "clients": lambda executor, **how: executor.clients("y", **how),
    "population": lambda executor, **how: executor.population(**how).everyone,
}


def transport(absent):
    return InProcess({100: node(0), 101: ABSENT[absent][0](), 102: node(2)})


def flower(nodes, **options):
    options = {"platforms": ("cpu",), "deadline": 0.5, **options}
    return fg.executors.flower(nodes, **options)


def present(handles):
    return handles.count.clients if isinstance(handles, fg.Cohort) else handles.clients


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("ask", ASKING)
def test_who_cannot_be_asked_is_named(ask, absent):
    nodes = transport(absent)
    with pytest.raises(NoAnswer) as caught:
        ASKING[ask](flower(nodes))
    text = str(caught.value)
    assert "test_federation_present.py:" in text and "4711" not in text
    assert "101" in text or "Client 1" in text
    assert ABSENT[absent][1] in text and "missing='drop'" in text
    for missing in ("drop", "restart"):
        found = ASKING[ask](flower(nodes, missing=missing))
        assert present(found) == (0, 2)


def test_clients_that_were_not_asked_for_do_not_matter():
    nodes = transport("does not say who it is")
    assert flower(nodes).clients("x", which=[2, 0]).clients == (2, 0)
    with pytest.raises(fg.CohortError, match=r"among \[0, 2\].*got \[0, 1\].*Node 101.*not answer"):
        flower(nodes).clients("x", which=[0, 1])
    nodes = transport("does not say what it has")
    assert flower(nodes).clients("x", which=[2, 0]).clients == (2, 0)
    with pytest.raises(NoAnswer, match=r"Client 1.*does not answer"):
        flower(nodes, missing="drop").clients("x", which=[0, 1])


@pytest.mark.parametrize("ask", ASKING)
@pytest.mark.parametrize(
    "expect, words",
    [
        (4, "3 clients .* 4 are expected"),
        ([0, 3], "3 .* expected"),
        ([7, 2, 5], "5, 7 .* expected"),
    ],
    ids=str,
)
def test_fewer_than_expected_is_an_error(ask, expect, words):
    nodes = InProcess({100 + i: node(i, DATA[0]) for i in range(3)})
    for missing in ("fail", "drop"):
        with pytest.raises(NoAnswer, match=rf"present\.py:\d+: .*{words}"):
            ASKING[ask](flower(nodes, missing=missing), expect=expect)
    for enough in (3, 2, [2, 0], None):
        assert present(ASKING[ask](flower(nodes), expect=enough)) == (0, 1, 2)


@pytest.mark.parametrize("ask", ASKING)
@pytest.mark.parametrize("expect", [3, [0, 2]], ids=str)
def test_who_is_expected_is_waited_for(ask, expect):
    nodes = InProcess({100 + i: node(i, DATA[0]) for i in range(2)})
    comes = threading.Timer(0.5, lambda: nodes.handlers.update({102: node(2, DATA[0])}))
    comes.start()
    begun = time.monotonic()
    assert present(ASKING[ask](flower(nodes), expect=expect, wait=60)) == (0, 1, 2)
    assert time.monotonic() - begun < 30  # no longer than it took
    comes.join()
    begun = time.monotonic()
    with pytest.raises(NoAnswer, match=r"after 0\.3 s"):
        ASKING[ask](flower(nodes), expect=9, wait=0.3)
    assert time.monotonic() - begun >= 0.3


def test_a_node_that_comes_to_itself_is_waited_for():
    nodes = transport("cannot say who it is")
    comes = threading.Timer(0.5, lambda: nodes.handlers.update({101: node(1)}))
    comes.start()
    assert flower(nodes).population(expect=3, wait=60).everyone.count.clients == (0, 1, 2)
    comes.join()


def test_misuse():
    executor = flower(InProcess({100: node(0)}))
    for how, words in (
        ({"wait": 3}, "wait=3 .* expect="),
        ({"expect": 1, "wait": -1}, "wait=-1"),
        ({"expect": 2, "wait": float("nan")}, "wait=nan .* 0 or more"),
        ({"expect": 1, "wait": "5"}, "wait='5'"),
        ({"expect": 1, "wait": None}, "wait=None"),
        ({"expect": 1, "wait": True}, "wait=True"),
        ({"which": 1}, r"which=1 .* list their indices, as in which=\[0, 2\]"),
        ({"which": [1.7]}, r"which=\[1\.7\]"),
        ({"which": [True]}, r"which=\[True\]"),
        ({"which": "0"}, "which='0'"),
        ({"which": {0: 1}}, "which="),
        ({"which": np.array(0)}, r"which=array\(0\)"),
        ({"expect": [True]}, r"expect=\[True\]"),
        ({"expect": [0.0]}, r"expect=\[0\.0\]"),
        ({"expect": 2.0}, "expect=2.0"),
        ({"expect": "3"}, "expect='3'"),
        ({"expect": {0: 1}}, "expect="),
        ({"expect": []}, r"expect=\[\]"),
        ({"expect": -1}, "expect=-1"),
        ({"expect": 0}, "expect=0"),
        ({"expect": True}, "expect=True"),
        ({"expect": ["a"]}, r"expect=\['a'\]"),
    ):
        with pytest.raises(fg.ArgumentError, match=rf"present\.py:\d+: {words}"):
            executor.clients("x", **how)


def test_numbers_of_numpy_and_jax_are_numbers():
    executor = flower(InProcess({100 + i: node(i, DATA[0]) for i in range(3)}))
    assert executor.clients("y", expect=np.int64(3), wait=np.float32(1)).clients == (0, 1, 2)
    for some in (np.array([2, 0]), jnp.array([2, 0]), (2, np.int32(0)), range(2, -1, -2)):
        assert executor.clients("y", which=some).clients == (2, 0)
        assert executor.clients("y", expect=some).clients == (0, 1, 2)


def test_who_is_expected_need_not_be_chosen():
    """Expected is who is there; chosen is who takes part."""
    executor = flower(InProcess({100 + i: node(i, DATA[0]) for i in range(3)}))
    for expect in (3, [2], [0, 1, 2]):
        assert executor.clients("y", which=[0, 1], expect=expect).clients == (0, 1)
    with pytest.raises(NoAnswer, match="3 clients are there, 4 are expected"):
        executor.clients("y", which=[0, 1], expect=4)
    with pytest.raises(NoAnswer, match=r"Clients 3 are expected and not there, only \[0, 1, 2\]"):
        executor.clients("y", which=[0, 1], expect=[3])


@pytest.mark.parametrize("ask", ASKING)
def test_who_lacks_the_part_is_named(ask):
    """Unless it is said who is meant."""
    part = {"clients": "y", "population": "x"}[ask]
    parts = [{"x": np.zeros((2, 2)), "y": np.zeros(2)} for _ in range(3)]
    del parts[1][part]
    (other,) = parts[1]
    nodes = InProcess({100 + i: node(i, own) for i, own in enumerate(parts)})

    def asked(missing="fail", **how):
        executor = flower(nodes, missing=missing)
        found = getattr(executor, ask)(part, **how)
        return present(found.everyone if ask == "population" else found)

    with pytest.raises(NoAnswer, match=rf"Client 1: node 101 has no '{part}', only {other}\."):
        asked()
    for missing in ("drop", "restart"):
        assert asked(missing) == (0, 2)
    for expect in (2, [0, 2]):
        assert asked(expect=expect) == (0, 2)
    for expect in (3, [1]):
        with pytest.raises(NoAnswer, match="expected"):
            asked(expect=expect)
    assert flower(nodes).clients(part, which=[2]).clients == (2,)


def test_who_has_no_examples_is_named():
    nodes = InProcess({100: node(0), 101: node(1, {"x": np.zeros((0, 2))}), 102: node(2)})
    with pytest.raises(NoAnswer, match="Client 1: the arrays of the part 'x' have not one row"):
        flower(nodes).population("x")
    assert present(flower(nodes, missing="drop").population("x").everyone) == (0, 2)


def test_who_was_asked_for_is_not_left_out():
    nodes = transport("cannot say what it has")
    with pytest.raises(NoAnswer, match="Client 1: out of order") as caught:
        flower(nodes, missing="drop").clients("y", which=[0, 1])
    assert "missing='drop'" not in str(caught.value)  # which it is
