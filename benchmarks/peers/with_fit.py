"""fedgrad's own training loop, `fg.fit`, with everything on: log, history, progress, sampling.

Competitors take turns, so a round is started when it is asked for: `fit` waits in a callback, and
does not start rounds ahead of it, which it does otherwise. Who takes part is what the workload
says, because all competitors train on the same cohorts. FedAvgM has momentum 0: the same weights.
`tuned` is a loss with the gradient and the layout of the best hand-written JAX.
"""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cnn
import jax
import jax.numpy as jnp
import numpy as np
import softmax
from rich.console import Console
from workloads import BATCH, LR, cohort, first_weights, flatten, population, unflatten

import fedgrad as fg
from fedgrad.clients import sampling
from fedgrad.training import loop

Round = Callable[[int], np.ndarray]


def build(
    workload: str, devices: int = 1, algorithm: str = "fed_avg", tuned: bool = False
) -> Round:
    """A round of `ragged` or `cnn`."""
    jax.config.update("jax_num_cpu_devices", devices)
    loop.AHEAD = 0, 0
    sampling.positions = lambda words, i, *_: cohort(workload, i - 1).astype(np.int32)
    trained = make_algorithm(workload, algorithm, tuned)
    everyone = make_population(workload, tuned)
    laid_out = tuned and workload == "ragged"
    flat = first_weights(workload)
    asked: queue.Queue[int] = queue.Queue()
    done: queue.Queue[Any] = queue.Queue()

    def take_turns(i: int, state: Any, metrics: Any) -> None:
        done.put(state.params)
        asked.get()

    def train() -> None:
        try:
            fg.fit(
                trained,
                everyone,
                params=softmax.tuned_weights(flat) if laid_out else unflatten(workload, flat),
                rounds=10**6,
                cohort_size=len(cohort(workload, 0)),
                key=jax.random.key(0),
                callbacks=[take_turns],
                **everything_on(),
            )
        except BaseException as error:
            done.put(error)

    thread = threading.Thread(target=train, daemon=True)

    def play(i: int) -> np.ndarray:
        asked.put(i) if thread.ident else thread.start()
        params = done.get()
        if isinstance(params, BaseException):
            raise params
        host = jax.device_get(params)
        return softmax.flat_weights(host) if laid_out else flatten(workload, host)

    return play


def everything_on() -> dict[str, Any]:
    """What `fit` does besides training, with a terminal that nobody sees."""
    screen = Console(file=open("/dev/null", "w"), force_terminal=True, width=120)
    return {"out": Path(tempfile.mkdtemp()) / "run", "progress": screen}


def make_algorithm(workload: str, algorithm: str, tuned: bool = False) -> fg.Algorithm:
    """FedAvg or FedAvgM on a workload, with the loss as a user writes it."""
    # In the layout of the best hand-written JAX, an example of `ragged` is a whole batch.
    size = 1 if tuned and workload == "ragged" else BATCH[workload]
    client = fg.local_training(LR[workload], batch_size=size, shuffle=False)
    options = {"momentum": 0.0} if algorithm == "fed_avgm" else {}
    return getattr(fg, algorithm)(LOSSES[workload, tuned], client, **options)


def make_population(workload: str, tuned: bool = False) -> fg.Population:
    """All clients of a workload."""
    data = population(workload)
    clients: list[Any] = [data.client(c) for c in range(len(data.count))]
    if not tuned or workload == "cnn":
        return fg.population([{"x": x, "y": y} for x, y in clients])
    size = BATCH[workload]
    return fg.population(
        [
            softmax.tuned_data(x.reshape(-1, size, x.shape[-1]), y.reshape(-1, size))
            for x, y in clients
        ]
    )


def _ragged_loss(p: Any, batch: Any) -> jax.Array:
    log_p = jax.nn.log_softmax(batch["x"] @ p["w"] + p["b"])
    return -jnp.take_along_axis(log_p, batch["y"][:, None], 1)[:, 0]


LOSSES: dict[tuple[str, bool], Callable[[Any, Any], jax.Array]] = {
    ("ragged", False): _ragged_loss,
    ("ragged", True): lambda p, batch: softmax.tuned_loss(p, *(b[0] for b in batch))[None],
    ("cnn", False): lambda p, batch: cnn.PER_EXAMPLE["conv"](p, batch["x"], batch["y"]),
    ("cnn", True): lambda p, batch: cnn.PER_EXAMPLE["tuned"](p, batch["x"], batch["y"]),
}
