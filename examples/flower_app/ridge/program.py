"""The program, and data to try it on."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import fedgrad as fg


@fg.program(z=fg.CLIENTS)
def loss(w: Any, z: Any) -> Any:
    """The mean over sites of each site's squared error, and a penalty at the server."""
    error = z["x"] @ fg.broadcast(w) - z["y"]
    return fg.mean(jnp.mean(error**2)) + 0.1 * w @ w


def data(context: Any) -> dict[str, Any]:
    """A site's data: here made up, from the number that the site's node is configured with."""
    rng = np.random.default_rng(int(context.config["partition-id"]))
    x = rng.normal(size=(32, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([1, -2, 0.5]) + np.float32(0.1) * x[:, 0]}
