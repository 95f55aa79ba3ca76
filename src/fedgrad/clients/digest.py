"""A digest of all examples of clients: the same in memory, on disk and sharded over devices.

It is a hash of the hashes of the clients, in their order. Several processes can therefore hash
their own clients, and a store is hashed while it is written.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

SIZE = 16  # bytes


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous array, readable and writable."""
    return array.reshape(-1).view(np.uint8).data


def kind(name: str, dtype: Any, shape: Sequence[int]) -> str:
    """Describe a leaf of the examples: its path in the tree, its dtype and the shape of a row."""
    return f"{name} {np.dtype(dtype).name} {tuple(shape)}"


def of_each(leaves: Iterable[np.ndarray], offsets: Any, counts: Any) -> bytes:
    """Return the concatenated digests of clients: of every byte of their rows, of all leaves."""
    rows = [(bytes_of(np.ascontiguousarray(x)), x[:1].nbytes) for x in leaves]
    found = bytearray()
    for begin, count in zip(np.asarray(offsets).tolist(), np.asarray(counts).tolist(), strict=True):
        one = hashlib.blake2b(count.to_bytes(8, "little"), digest_size=SIZE)
        for content, size in rows:
            one.update(content[begin * size : (begin + count) * size])
        found += one.digest()
    return bytes(found)


def of_all(kinds: Iterable[str], clients: bytes | bytearray) -> str:
    """Return the digest of all clients from the digests of each."""
    whole = hashlib.blake2b("\n".join(kinds).encode(), digest_size=SIZE)
    whole.update(clients)
    return whole.hexdigest()
