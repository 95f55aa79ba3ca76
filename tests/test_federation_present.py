"""Who has to be there: a client that cannot be asked is not left out in silence."""

import threading
import time

import numpy as np
import pytest

import fedgrad as fg
from fedgrad.federation.data import Context
from fedgrad.federation.envelope import Envelope
from fedgrad.federation.errors import NoAnswer
from fedgrad.federation.in_process import InProcess
from fedgrad.federation.node import Node
from fedgrad.federation.policy import Policy

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
}
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
        ({"expect": 0}, "expect=0"),
        ({"expect": True}, "expect=True"),
        ({"expect": ["a"]}, r"expect=\['a'\]"),
    ):
        with pytest.raises(fg.ArgumentError, match=words):
            executor.clients("x", **how)
