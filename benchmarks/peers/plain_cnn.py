"""Hand-written JAX on `cnn`. Variants, from what one writes first to the fastest found:

loop     Python over clients and batches, one jitted step with `lax.conv`
vmapped  the whole cohort in one jit, `vmap` of `scan`, convolutions as matrix products (im2col)
dealt    one jitted client at a time on each of 2 host devices, im2col
best     the same, with the im2col and its backward pass tuned by hand
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cnn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from workloads import BATCH, LR, cohort, first_weights, flatten, population, unflatten

RATE, B = LR["cnn"], BATCH["cnn"]
Round = Callable[[int], np.ndarray]


def build(workload: str, variant: str = "best", devices: int = 2) -> Round:
    """A round of `cnn`, in the given variant."""
    assert workload == "cnn"
    if variant == "loop":
        return _loop()
    if variant == "vmapped":
        return _vmapped()
    jax.config.update("jax_num_cpu_devices", devices)
    return _dealt({"dealt": "im2col", "best": "tuned"}[variant])


def _step(model: str) -> Callable:
    def step(p: Any, batch: tuple[Any, Any]) -> tuple[Any, None]:
        gradient = jax.grad(cnn.LOSSES[model])(p, *batch)
        return jax.tree.map(lambda w, g: w - RATE * g, p, gradient), None

    return step


def _by_batch() -> tuple[np.ndarray, np.ndarray]:
    """Images and labels as (client, batch, example, ...); all clients have as many examples."""
    data = population("cnn")
    lead = (len(data.count), data.count[0] // B, B)
    return data.x.reshape(*lead, *data.x.shape[1:]), data.y.reshape(lead)


def _loop() -> Round:
    x, y = _by_batch()
    p = unflatten("cnn", first_weights("cnn"))
    step = jax.jit(_step("conv"))

    def play(i: int) -> np.ndarray:
        nonlocal p
        trained = []
        for c in cohort("cnn", i):
            q = p
            for batch in zip(x[c], y[c], strict=True):
                q, _ = step(q, batch)
            trained.append(q)
        p = jax.tree.map(lambda *q: np.mean(q, 0), *jax.device_get(trained))
        return flatten("cnn", p)

    return play


def _vmapped() -> Round:
    store = jax.device_put(_by_batch())
    p = unflatten("cnn", first_weights("cnn"))
    step = _step("im2col")

    @jax.jit
    def fed_avg(p: Any, store: Any, chosen: jax.Array) -> Any:
        x, y = (a[chosen] for a in store)
        trained = jax.vmap(lambda x, y: lax.scan(step, p, (x, y))[0])(x, y)
        return jax.tree.map(lambda q: q.mean(0), trained)

    def play(i: int) -> np.ndarray:
        nonlocal p
        p = jax.device_get(fed_avg(p, store, cohort("cnn", i)))
        return flatten("cnn", p)

    return play


def _dealt(model: str) -> Round:
    stores = [jax.device_put(_by_batch(), device) for device in jax.devices()]
    p = unflatten("cnn", first_weights("cnn"))
    step = _step(model)

    @jax.jit
    def share(p: Any, store: Any, chosen: jax.Array) -> Any:  # the sum over one device's clients
        def add(total: Any, c: jax.Array) -> tuple[Any, None]:
            trained, _ = lax.scan(step, p, tuple(a[c] for a in store))
            return jax.tree.map(jnp.add, total, trained), None

        return lax.scan(add, jax.tree.map(jnp.zeros_like, p), chosen)[0]

    def play(i: int) -> np.ndarray:
        nonlocal p
        chosen = cohort("cnn", i)
        hands = np.array_split(chosen, len(stores))
        # A call returns before its device is done, so the devices run at the same time.
        shares = [share(p, *both) for both in zip(stores, hands, strict=True)]
        p = jax.tree.map(lambda *s: sum(s) / len(chosen), *jax.device_get(shares))
        return flatten("cnn", p)

    return play
