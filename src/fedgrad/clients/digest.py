"""A digest of all examples of clients: the same in memory, on disk and spread over devices.

It is a hash of the hashes of the clients, in their order. So several processes hash each their own,
and a store is hashed while it is written.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

SIZE = 16  # bytes


def bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, to be read or written."""
    return array.reshape(-1).view(np.uint8).data


def kind(name: str, dtype: Any, shape: Sequence[int]) -> str:
    """Describe a leaf of the examples: where it is in their tree, and what one row of it is."""
    return f"{name} {np.dtype(dtype).name} {tuple(shape)}"


def of_each(leaves: Iterable[np.ndarray], offsets: Any, counts: Any) -> bytes:
    """Return the digests of clients, one after another: every byte of their rows, of all leaves."""
    rows = [(bytes_of(np.ascontiguousarray(x)), x[:1].nbytes) for x in leaves]
    found = bytearray()
    for begin, count in zip(np.asarray(offsets).tolist(), np.asarray(counts).tolist(), strict=True):
        one = hashlib.blake2b(count.to_bytes(8, "little"), digest_size=SIZE)
        for content, size in rows:
            one.update(content[begin * size : (begin + count) * size])
        found += one.digest()
    return bytes(found)


def of_all(kinds: Iterable[str], clients: bytes | bytearray) -> str:
    """Return the digest of all clients, of whom each has one already."""
    whole = hashlib.blake2b("\n".join(kinds).encode(), digest_size=SIZE)
    whole.update(clients)
    return whole.hexdigest()
