"""A new task: copy this to src/fedgrad/tasks/, and add a line to `TASKS` in registry.py.

Outside of the library it needs no registration: `fedgrad train mymodule:skeleton`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedgrad as fg


def skeleton(clients: int = 20, seed: int = 0) -> fg.tasks.Task:
    """Return linear regression, with another shift of the target at each client.

    Args:
      clients: how many there are.
      seed: of the examples, which are generated.

    Returns:
      An `fg.tasks.Task`, whose parts are checked when it is made.
    """
    rng = np.random.default_rng(seed)
    slope = rng.normal(size=5)

    def examples(count: int) -> dict[str, np.ndarray]:
        x = rng.normal(size=(count, 5)).astype(np.float32)
        noise = 0.1 * rng.normal(size=count) + 0.3 * rng.normal()
        return {"x": x, "y": (x @ slope + noise).astype(np.float32)}

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jnp.zeros(5, jnp.float32), "b": jnp.zeros((), jnp.float32)}

    def squared_error(params: Any, batch: Any) -> jax.Array:
        """One number per example."""
        return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2

    return fg.tasks.Task(
        name="skeleton",
        train=fg.population([examples(int(n)) for n in rng.integers(5, 50, clients)]),
        test=fg.population([examples(20) for _ in range(clients)]),
        init=init,
        loss=squared_error,
        defaults=fg.tasks.Defaults(cohort_size=5, batch_size=5, rounds=20),
    )
