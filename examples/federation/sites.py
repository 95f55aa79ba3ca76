"""Sites with data of their own: numbers, their products with a secret vector, and some noise."""

from typing import Any

import numpy as np


def site(i: int) -> dict[str, Any]:
    """What site i has; each has its own number of examples."""
    rng = np.random.default_rng(i)
    x = rng.normal(size=(20 + 7 * i, 3)).astype(np.float32)
    y = x @ np.float32([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=len(x)).astype(np.float32)
    return {"x": x, "y": y.astype(np.float32)}


def data(context: Any) -> dict[str, Any]:
    """The data function of a node, which is told by its configuration which site it is."""
    return site(context.index)
