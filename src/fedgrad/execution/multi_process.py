"""Combines the values of several processes.

Under `jax.distributed` every process runs the same program. An argument that is not a global array
stands for a value that all processes have in common. JAX does not check that it is the same in all
of them; if it is not, each computes something else. This module checks it.
"""

import functools
import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import ArgumentError
from fedgrad.execution.devices import Devices


def require_equal(devices: Devices, values: dict[str, list[Any]], of: str) -> None:
    """Raise in every process if values of the same name differ between processes."""
    digests = np.stack([_digest(leaves) for leaves in values.values()])
    for name, given in zip(values, np.moveaxis(gather(devices, digests), 1, 0), strict=True):
        if (given != given[0]).any():
            raise ArgumentError.here(
                f"{of}: argument {name!r} is not the same in every process. What is at the server "
                "or is no global array has to be; of clients, give each process its own by "
                "mesh.shard(...) or mesh.population(...)."
            )


def gather(devices: Devices, x: np.ndarray) -> np.ndarray:
    """Stack the arrays of all processes, which have the same shape."""
    if len(devices.devices_of) == 1:
        return x[None]
    mesh, replicate = _one_device_each(devices)
    mine = jax.device_put(x[None], mesh.local_devices[0])
    split = jax.sharding.NamedSharding(mesh, jax.P("processes"))
    shape = (mesh.size, *x.shape)
    return np.asarray(replicate(jax.make_array_from_single_device_arrays(shape, split, [mine])))


@functools.cache
def _one_device_each(devices: Devices) -> tuple[jax.sharding.Mesh, Callable[[Any], Any]]:
    first = {d.process_index: d for d in reversed(devices.mesh.devices.reshape(-1))}
    mesh = jax.sharding.Mesh([first[p] for p in sorted(first)], ("processes",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    return mesh, jax.jit(lambda x: x, out_shardings=everywhere)


def make_global(x: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
    """Turn a value that every process has into one global array."""
    if is_key(x):
        data = make_global(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    here = set(sharding.mesh.local_devices)
    if isinstance(x, jax.Array):
        if not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        there = x.is_fully_replicated and x.sharding.device_set >= here
        if there and sharding.is_fully_replicated:
            shards = [s.data for s in x.addressable_shards if s.device in here]
            return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


# Digests of immutable arrays are cached, because a store of examples is large.
_known: dict[int, tuple[weakref.ref[Any], bytes]] = {}


def _digest(leaves: list[Any]) -> np.ndarray:
    whole = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        whole.update(_leaf_digest(leaf))
    return np.frombuffer(whole.digest(), np.uint8)


def _leaf_digest(leaf: Any) -> bytes:
    known = _known.get(id(leaf))
    if known is not None and known[0]() is leaf:
        return known[1]
    host = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    content = hashlib.blake2b(f"{host.dtype}{host.shape}".encode(), digest_size=8)
    content.update(np.ascontiguousarray(host).view(np.uint8).data)
    if isinstance(leaf, jax.Array):
        forget = functools.partial(_known.pop, id(leaf), None)
        _known[id(leaf)] = (weakref.ref(leaf, lambda _: forget()), content.digest())
    return content.digest()
