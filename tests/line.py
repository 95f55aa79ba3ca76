"""An algorithm that is not one of ours: a line through the clients' points, by gradient steps.

Its state has what a checkpoint must not lose: a typed key, an integer, a weakly typed number and a
bfloat16. `python tests/line.py FOLDER ROUNDS DEVICES` trains it, slowly, for tests that interrupt.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedgrad as fg
from fedgrad.algorithms.algorithm import Algorithm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Line:
    params: Any
    steps: Any
    key: Any
    weak: Any
    half: Any


def line(batch_size=4, metrics=lambda metrics: metrics):
    """Gradient steps on the mean square error, with noise."""

    @fg.program(cohort=fg.CLIENTS)
    def line_round(state, hyper, cohort, key):
        w = fg.broadcast(state.params["w"])

        def add(total, batch, mask):
            error = jnp.where(mask, batch["x"] @ w - batch["y"], 0)
            return total[0] + error @ batch["x"], total[1] + jnp.sum(error**2)

        zero = jnp.zeros_like(w), jnp.zeros((), w.dtype)
        slope, squares = fg.sum(cohort.fold(add, zero, batch_size))
        count = fg.sum(cohort.count).astype(w.dtype)
        noise = jax.random.normal(jax.random.fold_in(state.key, state.steps), w.shape, w.dtype)
        noise = noise + jax.random.normal(key, w.shape, w.dtype)
        with jax.numpy_dtype_promotion("standard"):  # what is learned has a dtype of its own
            new = state.params["w"] - hyper["rate"] * slope / count + hyper["noise"] * noise
        next_state = Line(
            {**state.params, "w": new.astype(w.dtype)},
            state.steps + 1,
            jax.random.fold_in(state.key, 7),
            state.weak * 1.5,
            (state.half * 1.01).astype(state.half.dtype),
        )
        return next_state, metrics(fg.Metrics(loss=squares / count, extra={"steps": state.steps}))

    def init(params, hyper=None):
        half = jnp.ones(3, jnp.bfloat16)
        return Line(params, jnp.int32(0), jax.random.key(5), jnp.asarray(1.0), half)

    return Algorithm(init, line_round, {"rate": 0.1, "noise": 0.01}, mean_square)


def mean_square(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def points(clients=12, seed=0):
    """Clients with 2 to 9 points each, as a list of dicts."""
    random = np.random.default_rng(seed)
    slope = random.normal(size=3)

    def client():
        x = random.normal(size=(int(random.integers(2, 10)), 3)).astype(np.float32)
        return {"x": x, "y": (x @ slope + 0.1 * random.normal(size=len(x))).astype(np.float32)}

    return [client() for _ in range(clients)]


FIRST = {"w": np.zeros(3, np.float32)}


if __name__ == "__main__":
    folder, rounds, devices = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jax.config.update("jax_num_cpu_devices", devices)

    clients = fg.population(points())
    try:
        fg.fit(
            line(),
            clients,
            params=FIRST,
            rounds=rounds,
            cohort_size=5,
            key=jax.random.key(3),
            evaluate=fg.Evaluation({"loss": mean_square}, clients, every=7),
            out=fg.run_folder(folder, every=3),
            callbacks=[lambda round, state, metrics: time.sleep(0.01)],
        )
    except KeyboardInterrupt as interrupt:
        print("interrupted:", *interrupt.__notes__)
        sys.exit(130)
