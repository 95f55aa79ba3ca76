"""DrJAX 0.2.1: `logistic` as it is, `ragged` with every client padded to the longest.

A placed value is an array with a leading client axis, and `map_fn` is a `vmap` over it: there is no
way to say "in blocks" or "as long as this client", so padding is what a user of DrJAX does. The
model is the user's; `tuned` gives DrJAX the same hand-laid-out one as plain JAX.
"""

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


def build(
    workload: str, clients: int | None = None, devices: int = 1, tuned: bool = False
) -> Round:
    """A round of `logistic` or `ragged`; DrJAX shards its clients if there are several devices."""
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = jax.make_mesh((devices,), ("clients",), (jax.sharding.AxisType.Auto,))
    builder = {"logistic": _logistic, "ragged": _ragged}[workload]
    flat = first_weights(workload)
    weights = softmax.tuned_weights(flat) if tuned else unflatten(workload, flat)
    with jax.set_mesh(mesh):
        fed_avg = builder(clients, mesh, tuned)

    def play(i: int) -> np.ndarray:
        nonlocal weights
        with jax.set_mesh(mesh):
            weights = jax.device_get(fed_avg(weights, i))
        return softmax.flat_weights(weights) if tuned else flatten(workload, weights)

    return play


def _logistic(clients: int | None, mesh: jax.sharding.Mesh, tuned: bool) -> Callable:
    n = clients or 50
    data = population("logistic", n)
    stored = _stored(data.x.reshape(n, 100, -1), data.y.reshape(n, 100), tuned)
    stored = jax.device_put(stored, NamedSharding(mesh, PartitionSpec("clients")))
    sgd = softmax.tuned_step if tuned else softmax.step

    def local(p: Any, *examples: jax.Array) -> Any:
        def step(q: Any, _: None) -> tuple[Any, None]:
            return sgd(q, *examples, LR["logistic"]), None

        return jax.tree.map(jnp.subtract, lax.scan(step, p, length=LOCAL_STEPS)[0], p)

    @jax.jit
    @drjax.program(placements={"clients": n})
    def fed_avg(p: Any, stored: tuple[jax.Array, ...]) -> Any:
        deltas = drjax.map_fn(local, (drjax.broadcast(p), *stored))
        return jax.tree.map(jnp.add, p, drjax.reduce_mean(deltas))

    return lambda p, i: fed_avg(p, stored)


def _ragged(clients: int | None, mesh: jax.sharding.Mesh, tuned: bool) -> Callable:
    data, b = population("ragged", clients), BATCH["ragged"]
    offsets, counts = ((a // b).astype(np.int32) for a in (data.offset, data.count))
    stored = _stored(data.x.reshape(-1, b, data.x.shape[-1]), data.y.reshape(-1, b), tuned)
    stored = jax.device_put(stored, NamedSharding(mesh, PartitionSpec()))
    longest, size = int(counts.max()), len(cohort("ragged", 0, clients))
    sgd = softmax.tuned_step if tuned else softmax.step

    def local(p: Any, offset: jax.Array, count: jax.Array, stored: tuple[jax.Array, ...]) -> Any:
        def step(q: Any, t: jax.Array) -> tuple[Any, None]:
            batch = (a[offset + t] for a in stored)
            return sgd(q, *batch, jnp.where(t < count, LR["ragged"], 0.0)), None

        return jax.tree.map(jnp.subtract, lax.scan(step, p, jnp.arange(longest))[0], p)

    @jax.jit
    @drjax.program(placements={"clients": size})
    def fed_avg(p: Any, stored: Any, offset: jax.Array, count: jax.Array) -> Any:
        # The store is closed over, not broadcast: a broadcast would copy it for every client.
        deltas = drjax.map_fn(
            lambda q, o, c: local(q, o, c, stored), (drjax.broadcast(p), offset, count)
        )
        # Weights as a tree of the same structure: DrJAX multiplies leaf by leaf.
        weight = jax.tree.map(lambda _: count.astype(jnp.float32), deltas)
        mean = drjax.reduce_weighted_mean(deltas, weight)
        return jax.tree.map(jnp.add, p, mean)

    def play(p: Any, i: int) -> Any:
        chosen = cohort("ragged", i, clients)
        return fed_avg(p, stored, offsets[chosen], counts[chosen])

    return play


def _stored(x: np.ndarray, y: np.ndarray, tuned: bool) -> tuple[np.ndarray, ...]:
    return softmax.tuned_data(x, y) if tuned else (x, y)
