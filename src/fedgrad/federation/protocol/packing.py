"""Envelopes as bytes: a JSON header, then the raw values, each exactly as long as announced.

There is one buffer per message, not one per array. An engine that sends each array with two
requests of its own (as Flower does) then needs only two in all, and dtypes that numpy's file format
does not support (bfloat16) are sent like any other.
"""

import json
import math
import struct
from typing import Any

import ml_dtypes
import numpy as np

from fedgrad.federation.protocol.envelope import Envelope, Meta
from fedgrad.federation.protocol.federation_errors import FederationError

_PREFIX = struct.Struct("<4sI")
_MAGIC = b"fgE1"
_SCALARS = (str, int, float, bool)


class MalformedEnvelope(FederationError):
    """The bytes received are not an envelope."""


def pack(envelope: Envelope, salt: str = "") -> bytes:
    """Return an envelope as bytes; the salt makes equal envelopes of different senders differ."""
    arrays = [np.ascontiguousarray(a).reshape(np.shape(a)) for a in envelope.arrays]
    for array in arrays:
        _dtype(str(array.dtype))
    blobs = {name: value for name, value in envelope.meta.items() if isinstance(value, bytes)}
    header = {
        "kind": envelope.kind,
        "meta": {name: value for name, value in envelope.meta.items() if name not in blobs},
        "blobs": {name: len(value) for name, value in blobs.items()},
        "arrays": [[str(a.dtype), list(a.shape)] for a in arrays],
    }
    if salt:
        header["salt"] = salt
    head = json.dumps(header, separators=(",", ":")).encode()
    # Every dtype has a flat view as bytes, also with no elements; not every one has a memoryview.
    values = [a.reshape(-1).view(np.uint8).data if a.size else b"" for a in arrays]
    return b"".join([_PREFIX.pack(_MAGIC, len(head)), head, *blobs.values(), *values])


def unpack(data: bytes) -> Envelope:
    """Return the envelope that was packed. The bytes are not trusted, and nothing is executed."""
    if len(data) < _PREFIX.size:
        raise MalformedEnvelope("The message is empty.")
    magic, head = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise MalformedEnvelope("The message was not packed by this version of fedgrad.")
    start = _PREFIX.size + head
    try:
        header = json.loads(data[_PREFIX.size : start])
        kind, meta = header["kind"], header["meta"]
        blobs = [(name, int(size)) for name, size in header["blobs"].items()]
        shapes = [(_dtype(d), tuple(int(n) for n in shape)) for d, shape in header["arrays"]]
        sound = isinstance(kind, str) and all(_is_meta(value) for value in meta.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedEnvelope(f"The header of the message is malformed: {error!r}.") from None
    sizes = [size for _, size in blobs] + [_bytes(dtype, shape) for dtype, shape in shapes]
    if not sound or any(size < 0 for size in sizes) or start + sum(sizes) != len(data):
        raise MalformedEnvelope(
            f"The message announces {start + sum(sizes)} bytes and has {len(data)}."
        )
    contents: dict[str, Meta] = dict(meta)
    for name, size in blobs:
        contents[name] = data[start : start + size]
        start += size
    arrays = []
    for dtype, shape in shapes:
        size = _bytes(dtype, shape)
        values = np.frombuffer(data, np.uint8, size, start)
        # Copied because the bytes may start at any offset, and computations need them aligned.
        arrays.append(values.copy().view(dtype).reshape(shape))
        start += size
    return Envelope(kind, contents, tuple(arrays))


def _dtype(name: Any) -> np.dtype[Any]:
    extended = isinstance(name, str) and hasattr(ml_dtypes, name)
    dtype = np.dtype(getattr(ml_dtypes, name) if extended else str(name))
    if dtype.name != name or dtype.hasobject or not (extended or dtype.kind in "biufc"):
        raise MalformedEnvelope(f"Arrays of {name} do not travel, only numbers and booleans do.")
    return dtype


def _bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return -1 if any(n < 0 for n in shape) else dtype.itemsize * math.prod(shape)


def _is_meta(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(v, str) for v in value) or all(isinstance(v, int) for v in value)
    return isinstance(value, _SCALARS)
