"""FedJAX 0.0.17 with its own `federated_averaging`, on its jit backend or its pmap backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from workloads import BATCH, LR, cohort, first_weights, flatten, population, unflatten

Round = Callable[[int], np.ndarray]


def build(workload: str, backend: str = "jit", devices: int = 1, model: str = "conv") -> Round:
    """A round of `ragged` or `cnn`."""
    flags = os.environ.get("XLA_FLAGS", "")  # the one spelling that both JAX versions know
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}"
    import jax

    if not hasattr(jax, "tree_map"):  # the shim for a current JAX
        jax.tree_map = jax.tree_util.tree_map
    import fedjax

    fedjax.set_for_each_client_backend(backend)
    loss = _loss(workload, model)

    def gradient(p: Any, batch: dict[str, Any], key: Any) -> Any:
        return jax.grad(loss)(p, batch["x"], batch["y"])

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        gradient,
        fedjax.optimizers.sgd(LR[workload]),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(BATCH[workload], num_epochs=1, skip_shuffle=True),
    )
    data = population(workload)
    clients = [
        fedjax.ClientDataset(dict(zip(("x", "y"), data.client(c), strict=True)))
        for c in range(len(data.count))
    ]
    key = jax.random.PRNGKey(0)  # asked for by the interface, used by nothing here
    state = algorithm.init(unflatten(workload, first_weights(workload)))

    def play(i: int) -> np.ndarray:
        nonlocal state
        state, _ = algorithm.apply(state, [(c, clients[c], key) for c in cohort(workload, i)])
        return flatten(workload, jax.device_get(state.params))

    return play


def _loss(workload: str, model: str) -> Callable:
    if workload == "ragged":
        import softmax

        return softmax.loss
    import cnn

    return cnn.LOSSES[model]
