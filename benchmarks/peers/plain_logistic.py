"""Hand-written JAX on `logistic`. Variants, from what one writes first to the fastest found:

scan, fori, unrolled  `vmap` over the clients of ten steps in one jit, the loop written three ways
dealt                 blocks of 5 clients one after another, half of them on each host device
best                  the same, on data laid out for the CPU and with the gradient by hand

A block's examples (120 kB) stay in the cache for its ten steps; under `vmap` of everything, all
clients' examples pass through the cache ten times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import softmax
from jax import lax
from workloads import LOCAL_STEPS, LR, Population, first_weights, flatten, population, unflatten

RATE = LR["logistic"]
BLOCK = 5  # 1 and 25 are both about a quarter slower with 500 clients
Round = Callable[[int], np.ndarray]


def build(workload: str, clients: int, variant: str = "best", devices: int = 2) -> Round:
    """A round of `logistic`, in the given variant."""
    assert workload == "logistic"
    data = population("logistic", clients)
    if variant in LOOPS:
        return _vmapped(data, LOOPS[variant])
    jax.config.update("jax_num_cpu_devices", devices)
    return _dealt(data, tuned=variant == "best")


def _scan(step: Callable, p: Any) -> Any:
    return lax.scan(lambda p, _: (step(p), None), p, length=LOCAL_STEPS)[0]


def _fori(step: Callable, p: Any) -> Any:
    return lax.fori_loop(0, LOCAL_STEPS, lambda _, p: step(p), p)


def _unrolled(step: Callable, p: Any) -> Any:
    for _ in range(LOCAL_STEPS):
        p = step(p)
    return p


LOOPS: dict[str, Callable] = {"scan": _scan, "fori": _fori, "unrolled": _unrolled}


def _vmapped(data: Population, loop: Callable) -> Round:
    x, y = jax.device_put(_by_client(data))
    p = jax.device_put(unflatten("logistic", first_weights("logistic")))

    @jax.jit
    def fed_avg(p: Any, x: jax.Array, y: jax.Array) -> Any:
        def delta(x: jax.Array, y: jax.Array) -> Any:
            new = loop(lambda q: softmax.step(q, x, y, RATE), p)
            return jax.tree.map(jnp.subtract, new, p)

        return jax.tree.map(lambda w, d: w + d.mean(0), p, jax.vmap(delta)(x, y))

    def play(i: int) -> np.ndarray:
        nonlocal p
        p = fed_avg(p, x, y)
        return flatten("logistic", jax.device_get(p))

    return play


def _dealt(data: Population, tuned: bool) -> Round:
    x, y = _by_client(data)
    stored = softmax.tuned_data(x, y) if tuned else (x, y)
    flat = first_weights("logistic")
    weights = softmax.tuned_weights(flat) if tuned else unflatten("logistic", flat)
    step = softmax.tuned_step if tuned else softmax.step
    halves = np.array_split(np.arange(len(x)), jax.device_count())
    hands = [
        jax.device_put(tuple(a[half].reshape(-1, BLOCK, *a.shape[1:]) for a in stored), device)
        for device, half in zip(jax.devices(), halves, strict=True)
    ]

    @jax.jit
    def share(p: Any, hand: tuple[jax.Array, ...]) -> Any:  # of the mean, from one device
        def local(*client: jax.Array) -> Any:
            return _fori(lambda q: step(q, *client, RATE), p)

        def add(total: Any, block: tuple[jax.Array, ...]) -> tuple[Any, None]:
            return jax.tree.map(lambda a, q: a + q.sum(0), total, jax.vmap(local)(*block)), None

        total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, p), hand)
        return jax.tree.map(lambda t: t / len(x), total)

    def play(i: int) -> np.ndarray:
        nonlocal weights
        # Two calls that run at the same time: a call returns before its device is done. The data
        # are committed to a device and the weights are not, so the weights go where the data are.
        shares = jax.device_get([share(weights, hand) for hand in hands])
        weights = jax.tree.map(lambda *s: sum(s), *shares)
        return softmax.flat_weights(weights) if tuned else flatten("logistic", weights)

    return play


def _by_client(data: Population) -> tuple[np.ndarray, np.ndarray]:
    clients = len(data.count)
    return data.x.reshape(clients, 100, -1), data.y.reshape(clients, 100)
