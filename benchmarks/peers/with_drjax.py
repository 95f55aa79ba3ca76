"""DrJAX 0.2.1: `logistic` as it is, `ragged` with every client padded to the longest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import drjax
import jax
import jax.numpy as jnp
import numpy as np
import softmax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from workloads import BATCH, LOCAL_STEPS, LR, cohort, first_weights, flatten, population, unflatten

Round = Callable[[int], np.ndarray]


def build(workload: str, clients: int | None = None, devices: int = 1) -> Round:
    """A round of `logistic` or `ragged`; DrJAX shards its clients if there are several devices."""
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = jax.make_mesh((devices,), ("clients",), (jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("clients"))
    builder = {"logistic": _logistic, "ragged": _ragged}[workload]
    with jax.set_mesh(mesh):
        play = builder(clients, sharding)

    def in_mesh(i: int) -> np.ndarray:
        with jax.set_mesh(mesh):
            return play(i)

    return in_mesh


def _logistic(clients: int | None, sharding: NamedSharding) -> Round:
    n = clients or 50
    data = population("logistic", n)
    x, y = jax.device_put((data.x.reshape(n, 100, -1), data.y.reshape(n, 100)), sharding)
    p = unflatten("logistic", first_weights("logistic"))

    def local(p: Any, x: jax.Array, y: jax.Array) -> Any:
        def step(q: Any, _: None) -> tuple[Any, None]:
            return softmax.step(q, x, y, LR["logistic"]), None

        return jax.tree.map(jnp.subtract, lax.scan(step, p, length=LOCAL_STEPS)[0], p)

    @jax.jit
    @drjax.program(placements={"clients": n})
    def fed_avg(p: Any, x: jax.Array, y: jax.Array) -> Any:
        deltas = drjax.map_fn(local, (drjax.broadcast(p), x, y))
        return jax.tree.map(jnp.add, p, drjax.reduce_mean(deltas))

    def play(i: int) -> np.ndarray:
        nonlocal p
        p = jax.device_get(fed_avg(p, x, y))
        return flatten("logistic", p)

    return play


def _ragged(clients: int | None, sharding: NamedSharding) -> Round:
    data = population("ragged", clients)
    batches, longest = data.count // BATCH["ragged"], data.count.max() // BATCH["ragged"]
    store = (data.x.reshape(-1, BATCH["ragged"], data.x.shape[-1]), data.y.reshape(-1, 10))
    store = jax.device_put(store, NamedSharding(sharding.mesh, PartitionSpec()))
    p = unflatten("ragged", first_weights("ragged"))
    size = len(cohort("ragged", 0, clients))

    def local(p: Any, offset: jax.Array, count: jax.Array, store: tuple[jax.Array, ...]) -> Any:
        def step(q: Any, t: jax.Array) -> tuple[Any, None]:
            x, y = (a[jnp.minimum(offset + t, len(a) - 1)] for a in store)
            new = softmax.step(q, x, y, LR["ragged"])
            return jax.tree.map(lambda a, b: jnp.where(t < count, a, b), new, q), None

        return jax.tree.map(jnp.subtract, lax.scan(step, p, jnp.arange(longest))[0], p)

    @jax.jit
    @drjax.program(placements={"clients": size})
    def fed_avg(p: Any, offset: jax.Array, count: jax.Array, store: tuple[jax.Array, ...]) -> Any:
        # The store is closed over, not broadcast: a broadcast would copy it for every client.
        deltas = drjax.map_fn(
            lambda q, o, c: local(q, o, c, store), (drjax.broadcast(p), offset, count)
        )
        mean = drjax.reduce_weighted_mean(deltas, count.astype(jnp.float32))
        return jax.tree.map(jnp.add, p, mean)

    def play(i: int) -> np.ndarray:
        nonlocal p
        chosen = cohort("ragged", i, clients)
        view = (data.offset[chosen] // BATCH["ragged"], batches[chosen])
        offset, count = jax.device_put(tuple(v.astype(np.int32) for v in view), sharding)
        p = jax.device_get(fed_avg(p, offset, count, store))
        return flatten("ragged", p)

    return play
