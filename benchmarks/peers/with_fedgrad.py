"""fedgrad on all workloads: the program as a user writes it, on the local executor.

`tuned` takes the same hand-made model step as the best hand-written JAX; without it the model is
the plain one, differentiated by `jax.grad`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cnn
import jax
import jax.numpy as jnp
import numpy as np
import softmax
from workloads import (
    BATCH,
    LOCAL_STEPS,
    LR,
    cohort,
    first_weights,
    flatten,
    population,
    unflatten,
)

import fedgrad as fg

Round = Callable[[int], np.ndarray]


def build(
    workload: str,
    clients: int = 0,
    devices: int = 1,
    tuned: bool = False,
    chunk: int | None = None,
    model: str = "conv",
) -> Round:
    """A round of the workload."""
    jax.config.update("jax_num_cpu_devices", devices)
    executor = fg.executors.local(chunk=chunk)
    if workload == "logistic":
        return _logistic(executor, clients, tuned)
    if workload == "ragged":
        return _ragged(executor, tuned)
    return _cnn(executor, model)


def _logistic(executor: fg.executors.Executor, clients: int, tuned: bool) -> Round:
    data = population("logistic", clients)
    x, y = data.x.reshape(clients, 100, -1), data.y.reshape(clients, 100)
    step = softmax.tuned_step if tuned else softmax.step
    flat = first_weights("logistic")
    weights: Any = softmax.tuned_weights(flat) if tuned else unflatten("logistic", flat)
    stacked = softmax.tuned_data(x, y) if tuned else (x, y)

    @fg.program(data=fg.CLIENTS)
    def fed_avg(weights: Any, data: Any) -> Any:
        start = fg.broadcast(weights)
        trained = jax.lax.fori_loop(
            0, LOCAL_STEPS, lambda _, w: step(w, *data, LR["logistic"]), start
        )
        delta = fg.mean(jax.tree.map(jnp.subtract, trained, start))
        return jax.tree.map(jnp.add, weights, delta)

    # As with DrJAX, the clients' data are dealt over the devices once, not in every round.
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), (jax.sharding.AxisType.Auto,))
    clients_axis = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
    stacked = jax.device_put(stacked, clients_axis)
    return _rounds(fed_avg.on(executor), weights, lambda i: stacked, tuned, "logistic")


def _ragged(executor: fg.executors.Executor, tuned: bool) -> Round:
    batch, rate = BATCH["ragged"], LR["ragged"]
    data = population("ragged")
    flat = first_weights("ragged")
    weights: Any = softmax.tuned_weights(flat) if tuned else unflatten("ragged", flat)
    examples = [data.client(c) for c in range(len(data.count))]
    if tuned:  # an example is a whole batch, laid out as the tuned step wants it
        examples = [
            softmax.tuned_data(x.reshape(-1, batch, x.shape[-1]), y.reshape(-1, batch))
            for x, y in examples
        ]
    everyone = fg.population(examples)

    def natural(w: Any, rows: Any, mask: jax.Array) -> Any:
        return softmax.step(w, *rows, rate)  # every batch is full: this workload has no rest

    def by_hand(w: Any, rows: Any, mask: jax.Array) -> Any:
        return softmax.tuned_step(w, *(r[0] for r in rows), rate)

    @fg.program(data=fg.CLIENTS)
    def fed_avg(weights: Any, data: fg.Examples) -> Any:
        start = fg.broadcast(weights)
        step, size = (by_hand, 1) if tuned else (natural, batch)
        return fg.mean(data.fold(step, start, size), weights=data.count)

    return _rounds(
        fed_avg.on(executor),
        weights,
        lambda i: everyone.select(cohort("ragged", i)),
        tuned,
        "ragged",
    )


def _cnn(executor: fg.executors.Executor, model: str) -> Round:
    data = population("cnn")
    everyone = fg.population([data.client(c) for c in range(len(data.count))])

    def step(w: Any, rows: Any, mask: jax.Array) -> Any:
        gradient = jax.grad(cnn.LOSSES[model])(w, *rows)
        return jax.tree.map(lambda a, g: a - LR["cnn"] * g, w, gradient)

    @fg.program(data=fg.CLIENTS)
    def fed_avg(weights: Any, data: fg.Examples) -> Any:
        return fg.mean(data.fold(step, fg.broadcast(weights), BATCH["cnn"]))

    weights = unflatten("cnn", first_weights("cnn"))
    return _rounds(
        fed_avg.on(executor), weights, lambda i: everyone.select(cohort("cnn", i)), False, "cnn"
    )


def _rounds(
    program: fg.Program, weights: Any, data: Callable[[int], Any], tuned: bool, workload: str
) -> Round:
    def play(i: int) -> np.ndarray:
        nonlocal weights
        weights = program(weights, data(i))
        host = jax.device_get(weights)
        return softmax.flat_weights(host) if tuned else flatten(workload, host)

    return play
