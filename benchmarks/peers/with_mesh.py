"""fedgrad on a mesh, one core for each device: devices of one process, or processes of one device.

A CPU device uses all cores that its process may use, so one device is given one core; otherwise
one device would be as fast as two.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import softmax
from workloads import LOCAL_STEPS, LR, first_weights, flatten, population, unflatten

import fedgrad as fg

Round = Callable[[int], np.ndarray]
CHUNK = 6  # as many as the executor takes by itself where a device has one core of several


def build(workload: str, clients: int, devices: int = 1, processes: int = 1) -> Round:
    """A round of the workload (`logistic`), on so many devices in so many processes."""
    cores = sorted(os.sched_getaffinity(0))[: devices * processes]
    if processes == 1:
        os.sched_setaffinity(0, cores)
        jax.config.update("jax_num_cpu_devices", devices)
        return _rounds(clients, 0, 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    others = [_Other(clients, i, processes, address, cores[i]) for i in range(1, processes)]
    play = _distributed(clients, 0, processes, address, cores[0])

    def together(i: int) -> np.ndarray:
        for other in others:
            other.play(i)
        return play(i)

    return together


class _Other:
    """Another process of the same computation; it ends when its input does."""

    def __init__(self, *arguments: Any) -> None:
        command = [sys.executable, __file__, json.dumps(arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def play(self, i: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{i}\n")
        self.process.stdin.flush()


def _distributed(clients: int, number: int, processes: int, address: str, core: int) -> Round:
    os.sched_setaffinity(0, [core])
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, number, coordinator_bind_address=address)
    return _rounds(clients, number, processes)


def _rounds(clients: int, number: int, processes: int) -> Round:
    executor = fg.executors.mesh(chunk=CHUNK)
    data = population("logistic", clients)
    own = slice(clients * number // processes, clients * (number + 1) // processes)
    x, y = data.x.reshape(clients, 100, -1)[own], data.y.reshape(clients, 100)[own]
    mine = executor.shard((x, y))
    weights: Any = unflatten("logistic", first_weights("logistic"))

    @fg.program(data=fg.CLIENTS)
    def fed_avg(weights: Any, data: Any) -> Any:
        start = fg.broadcast(weights)
        trained = jax.lax.fori_loop(
            0, LOCAL_STEPS, lambda _, w: softmax.step(w, *data, LR["logistic"]), start
        )
        delta = fg.mean(jax.tree.map(jnp.subtract, trained, start))
        return jax.tree.map(jnp.add, weights, delta)

    on_mesh = fed_avg.on(executor)

    def play(i: int) -> np.ndarray:
        nonlocal weights
        weights = on_mesh(weights, mine)
        return flatten("logistic", jax.device_get(weights))

    return play


if __name__ == "__main__":
    play_along = _distributed(*json.loads(sys.argv[1]))
    for line in sys.stdin:
        play_along(int(line))
