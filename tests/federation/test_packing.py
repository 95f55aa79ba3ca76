"""Envelopes as bytes: what goes in comes out, and nothing else comes in."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from fedgrad.federation.protocol.envelope import Envelope
from fedgrad.federation.protocol.packing import MalformedEnvelope, pack, unpack

META = {
    "text": "Grüße",
    "number": -(2**62),
    "id": 2**64 - 1,
    "real": 0.1,
    "truth": True,
    "names": ["a", ""],
    "numbers": [1, 2],
    "blob": bytes(range(256)),
    "nothing": b"",
}
ARRAYS = (
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6).reshape(2, 3).T,  # not contiguous
    np.float64(1.5).reshape(()),
    np.zeros((0, 3), np.int8),
    np.array([True, False, True]),
    np.array([1 + 2j], np.complex64),
    np.array([1.5, -2.0, 3.0], ml_dtypes.bfloat16),
    np.array([0.5], ml_dtypes.float8_e4m3fn),
    np.array([np.nan, np.inf, -0.0]),
)


def test_round_trip():
    found = unpack(pack(Envelope("run", META, ARRAYS)))
    assert (found.kind, found.meta) == ("run", META)
    assert [(a.dtype, a.shape) for a in found.arrays] == [(a.dtype, a.shape) for a in ARRAYS]
    for a, b in zip(found.arrays, ARRAYS, strict=True):
        assert a.tobytes() == np.ascontiguousarray(b).tobytes()
        assert a.flags.aligned


def test_the_bytes_are_those_of_the_arrays_and_a_header():
    array = np.zeros(100_000, np.float32)
    assert array.nbytes < len(pack(Envelope("ok", {}, (array,)))) < array.nbytes + 200


def test_salt_changes_the_bytes_and_nothing_else():
    envelope = Envelope("ok", {"a": 1}, ())
    assert pack(envelope, "x") != pack(envelope, "y")
    assert unpack(pack(envelope, "x")) == envelope


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.zeros(1, ">f4")])
def test_only_numbers_travel(array):
    with pytest.raises(MalformedEnvelope):
        pack(Envelope("ok", {}, (array,)))


def forged(header, values=b""):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<4sI", b"fgE1", len(head)) + head + values


SOUND = {"kind": "ok", "meta": {}, "blobs": {}, "arrays": []}
FORGERIES = {
    "empty": b"",
    "foreign": b"PK\x03\x04" + bytes(100),
    "no header": forged(b"\xff"),
    "a list": forged([]),
    "a longer header than there is": struct.pack("<4sI", b"fgE1", 2**31) + b"{}",
    "no kind": forged({"meta": {}, "blobs": {}, "arrays": []}),
    "a kind that is no text": forged({**SOUND, "kind": 1}),
    "meta that is none": forged({**SOUND, "meta": {"a": {"b": 1}}}),
    "trailing bytes": forged(SOUND, b"x"),
    "too few bytes": forged({**SOUND, "arrays": [["float32", [2]]]}, bytes(7)),
    "a negative shape": forged({**SOUND, "arrays": [["int8", [-1, -1]]]}, b"x"),
    "a negative blob": forged({**SOUND, "blobs": {"a": -1}, "arrays": [["int8", [1]]]}),
    "objects": forged({**SOUND, "arrays": [["object", [1]]]}, bytes(8)),
    "names of other things": forged({**SOUND, "arrays": [["finfo", [1]]]}, bytes(8)),
    "structures": forged({**SOUND, "arrays": [["i4,i4", [1]]]}, bytes(8)),
    "more than any machine has": forged({**SOUND, "arrays": [["int8", [2**70]]]}),
}


@pytest.mark.parametrize("data", FORGERIES.values(), ids=FORGERIES)
def test_forgeries_are_malformed(data):
    with pytest.raises(MalformedEnvelope):
        unpack(data)
    assert unpack(forged(SOUND)) == Envelope("ok", {})  # so it is not the forging
