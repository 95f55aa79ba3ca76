"""fedgrad on the paper's tasks: FedAvgM as a user calls it, on the local executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from paper_tasks import MOMENTUM, SERVER_RATE, workload

import fedgrad as fg


def build(name: str, devices: int = 1, **size: Any) -> Callable[[int], Callable[[], np.ndarray]]:
    """A round of the task."""
    jax.config.update("jax_num_cpu_devices", devices)
    made = workload(name, **size)
    defaults = made.task.defaults
    client = fg.local_training(defaults.client_learning_rate, batch_size=defaults.batch_size)
    algorithm = fg.fed_avgm(made.loss, client, SERVER_RATE, MOMENTUM)
    population = fg.population(made.clients)
    hyper = jax.tree.map(jnp.asarray, algorithm.hyper)
    # As `fg.fit` does: on several devices, the model is where the data are from the beginning.
    state = jax.device_put(algorithm.init(made.first_params()), population.sharding)

    def play(i: int) -> Callable[[], np.ndarray]:
        nonlocal state
        cohort = population.select(made.cohort(i))
        state, metrics = algorithm.round(state, hyper, cohort, made.key(i))
        params = jax.block_until_ready((state, metrics))[0].params
        return lambda: made.change(params)

    return play
