"""Hand-written JAX on `ragged`. Variants, from what one writes first to the fastest found:

loop        Python over clients and batches, one jitted step
padded      every client padded to the longest one possible, `vmap` of `scan`
sequential  one jit, clients one after another (blocks of 1), dynamic trip count
blocks      clients sorted by length, blocks of 10 side by side
shard_map   blocks of 5, dealt over 2 host devices by `shard_map`
dealt       the same, but as one call per device, summed in numpy: a smaller fixed cost
best        the same, on data laid out for the CPU and with the gradient by hand

All but `loop` keep every example on the device; a client is an (offset, number of batches) pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import softmax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from workloads import BATCH, LR, cohort, first_weights, flatten, population, unflatten

RATE, B = LR["ragged"], BATCH["ragged"]
COHORT = 50
Round = Callable[[int], np.ndarray]
Share = Callable[..., Any]
# variant: block size, devices, one shard_map instead of a call per device, tuned step
SCHEDULES: dict[str, tuple[int, int, bool, bool]] = {
    "sequential": (1, 1, False, False),
    "blocks": (10, 1, False, False),
    "shard_map": (5, 2, True, False),
    "dealt": (5, 2, False, False),
    "best": (5, 2, False, True),
}


def build(workload: str, variant: str = "best") -> Round:
    """A round of `ragged`, in the given variant."""
    assert workload == "ragged"
    if variant == "loop":
        return _loop()
    if variant == "padded":
        return _padded()
    block, devices, sharded, tuned = SCHEDULES[variant]
    jax.config.update("jax_num_cpu_devices", devices)
    return _blocks(block, sharded, tuned)


def _loop() -> Round:
    data, p = population("ragged"), unflatten("ragged", first_weights("ragged"))
    step = jax.jit(softmax.step)

    def play(i: int) -> np.ndarray:
        nonlocal p
        trained, weight = [], data.count[cohort("ragged", i)]
        for c in cohort("ragged", i):
            x, y = data.client(c)
            q = p
            for t in range(0, len(x), B):
                q = step(q, x[t : t + B], y[t : t + B], RATE)
            trained.append(q)
        trained = jax.device_get(trained)
        p = jax.tree.map(lambda *q: np.average(q, 0, weight).astype(np.float32), *trained)
        return flatten("ragged", p)

    return play


def _padded() -> Round:
    x, y, offset, count = _batches()
    store, longest = jax.device_put((x, y)), int(count.max())
    p = unflatten("ragged", first_weights("ragged"))

    @jax.jit
    def fed_avg(p: Any, store: Any, offset: jax.Array, count: jax.Array) -> Any:
        def local(offset: jax.Array, count: jax.Array) -> Any:
            def step(q: Any, t: jax.Array) -> tuple[Any, None]:
                rate = jnp.where(t < count, RATE, 0.0)
                return softmax.step(q, *(a[offset + t] for a in store), rate), None

            return lax.scan(step, p, jnp.arange(longest))[0]

        share = count / count.sum()
        return jax.tree.map(lambda q: jnp.tensordot(share, q, 1), jax.vmap(local)(offset, count))

    def play(i: int) -> np.ndarray:
        nonlocal p
        chosen = cohort("ragged", i)
        p = jax.device_get(fed_avg(p, store, offset[chosen], count[chosen]))
        return flatten("ragged", p)

    return play


def _share(step: Callable, block: int) -> Share:
    """One device's part of the weighted mean of the trained weights."""

    def share(p: Any, store: Any, view: jax.Array, share: jax.Array, blocks: jax.Array) -> Any:
        def add(j: jax.Array, total: Any) -> Any:
            offset, count = lax.dynamic_slice_in_dim(view, j * block, block, 1)
            weight = lax.dynamic_slice_in_dim(share, j * block, block)

            def advance(t: jax.Array, q: Any) -> Any:
                # Slices stacked, not one gather, which takes four times as long on a CPU.
                # A client that is done goes on with rate 0: no select over its weights.
                batch = [
                    jnp.stack([lax.dynamic_index_in_dim(a, o + t, 0, False) for o in offset])
                    for a in store
                ]
                rate = jnp.where(t < count, RATE, 0.0)
                return jax.vmap(lambda q, r, *b: step(q, *b, r))(q, rate, *batch)

            first = jax.tree.map(lambda w: jnp.broadcast_to(w, (block, *w.shape)), p)
            trained = lax.fori_loop(0, count.max(), advance, first)
            return jax.tree.map(lambda a, q: a + jnp.tensordot(weight, q, 1), total, trained)

        return lax.fori_loop(0, blocks, add, jax.tree.map(jnp.zeros_like, p))

    return share


def _blocks(block: int, sharded: bool, tuned: bool) -> Round:
    x, y, offset, count = _batches()
    stored = softmax.tuned_data(x, y) if tuned else (x, y)
    flat = first_weights("ragged")
    weights = softmax.tuned_weights(flat) if tuned else unflatten("ragged", flat)
    share = _share(softmax.tuned_step if tuned else softmax.step, block)
    run = (_by_shard_map if sharded else _by_calls)(share, stored)

    def play(i: int) -> np.ndarray:
        nonlocal weights
        chosen = cohort("ragged", i)
        weights = run(weights, *_deal(offset[chosen], count[chosen], block, jax.device_count()))
        return softmax.flat_weights(weights) if tuned else flatten("ragged", weights)

    return play


def _deal(
    offset: np.ndarray, count: np.ndarray, block: int, devices: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort by length, cut into blocks, give each block to the device with the least work so far."""
    view = np.zeros((devices, 2, COHORT), np.int32)
    share = np.zeros((devices, COHORT), np.float32)
    used, load = [0] * devices, [0] * devices
    order, total = np.argsort(-count, kind="stable").reshape(-1, block), count.sum()
    for clients, longest in zip(order, count[order[:, 0]].tolist(), strict=True):
        d = load.index(min(load))
        slots = slice(used[d] * block, (used[d] + 1) * block)
        view[d, :, slots] = offset[clients], count[clients]
        share[d, slots] = count[clients] / total
        used[d] += 1
        load[d] += longest
    return view, share, np.array(used, np.int32)


def _by_calls(share: Share, stored: tuple[np.ndarray, ...]) -> Share:
    stores = [jax.device_put(stored, device) for device in jax.devices()]
    jitted = jax.jit(share)

    def run(weights: Any, *hands: np.ndarray) -> Any:
        # A call returns before its device is done, so the devices run at the same time; plain
        # numpy arguments go to where the committed store is, without a `device_put` of their own.
        parts = [jitted(weights, store, *hand) for store, *hand in zip(stores, *hands, strict=True)]
        return jax.tree.map(lambda *part: sum(part), *jax.device_get(parts))

    return run


def _by_shard_map(share: Share, stored: tuple[np.ndarray, ...]) -> Share:
    mesh = jax.make_mesh((jax.device_count(),), ("d",), (jax.sharding.AxisType.Auto,))
    store = jax.device_put(stored, NamedSharding(mesh, PartitionSpec()))
    everywhere, dealt = PartitionSpec(), PartitionSpec("d")

    def part(weights: Any, store: Any, *hand: jax.Array) -> Any:
        return lax.psum(share(weights, store, *(h[0] for h in hand)), "d")

    jitted = jax.jit(
        jax.shard_map(
            part,
            mesh=mesh,
            in_specs=(everywhere, everywhere, dealt, dealt, dealt),
            out_specs=everywhere,
            check_vma=False,  # the loops start from unvarying zeros
        )
    )
    return lambda weights, *hands: jax.device_get(jitted(weights, store, *hands))


def _batches() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    data = population("ragged")
    x, y = data.x.reshape(-1, B, data.x.shape[-1]), data.y.reshape(-1, B)
    return x, y, (data.offset // B).astype(np.int32), (data.count // B).astype(np.int32)
