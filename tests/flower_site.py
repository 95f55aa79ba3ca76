"""The data of the nodes of the tests, and nodes that misbehave. Run by their processes."""

import os
import signal
import sys
import threading

import numpy as np

from fedgrad.federation.flower.connection import secured
from fedgrad.federation.flower.fleet import Fleet
from fedgrad.federation.protocol.envelope import Envelope
from fedgrad.federation.protocol.node import Node
from fedgrad.federation.protocol.node_data import Context
from fedgrad.federation.protocol.policy import Policy

FOREVER = 4  # the client whose work does not end


def client(i):
    """What client i has. All have the same shapes, and `examples` of their own number."""
    rng = np.random.default_rng(i)
    return {
        "z": rng.normal(size=3),
        "steps": np.int32(2**31 - 1 if i == FOREVER else 1),
        "large": rng.normal(size=200_000).astype(np.float32),  # more than travels in one piece
        "examples": {
            "x": rng.normal(size=(20 + 7 * i, 3)).astype(np.float32),
            "y": rng.normal(size=20 + 7 * i).astype(np.float32),
        },
    }


def data(context):
    """The data function of a node."""
    return client(context.index)


def _nan(fleet, answer):
    return Envelope("ok", {}, tuple(np.full_like(x, np.nan) for x in answer.arrays))


def _shape(fleet, answer):
    return Envelope("ok", {}, tuple(np.stack([x, x]) for x in answer.arrays))


def _dtype(fleet, answer):
    return Envelope("ok", {}, tuple(x.astype(np.float16) for x in answer.arrays))


def _less(fleet, answer):
    return Envelope("ok", {}, answer.arrays[:-1])


def _much(fleet, answer):
    return Envelope("ok", {}, (*answer.arrays, np.zeros(4_000_000)))


def _broken(fleet, answer):
    return Envelope("error", {"reason": "the disk is full"})


def _dies(fleet, answer):
    os.kill(os.getpid(), signal.SIGKILL)


def _half(fleet, answer):
    """Announce an answer, and die before any of it is sent."""
    fleet._api.PushObject = lambda request: _dies(fleet, answer)
    return answer


FAULTS = {
    "nan": _nan,
    "shape": _shape,
    "dtype": _dtype,
    "less": _less,
    "much": _much,
    "broken": _broken,
    "half": _half,
}


def misbehave(superlink, index, faults):
    """Be a node that answers every request to run something with the next fault."""
    node = Node(data, Policy(anything=True), context=Context({"partition-id": index}))
    fleet = Fleet(secured(superlink), None, 2**28)

    def handle(request):
        answer = node.handle(request)
        if request.kind == "run" and answer.kind == "ok" and faults:
            return FAULTS[faults.pop(0)](fleet, answer)
        return answer

    fleet.join()
    fleet.serve(handle, threading.Event(), lambda: None)


if __name__ == "__main__":
    misbehave(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
