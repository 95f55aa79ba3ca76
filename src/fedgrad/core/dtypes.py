"""Dtypes of what is computed here, whether or not the user lets JAX promote them by itself."""

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp


def promoting() -> AbstractContextManager[None]:
    """Let JAX promote: code of others who count on it (optax multiplies a float32 by a float64
    rate), or what is cast at once."""
    return jax.numpy_dtype_promotion("standard")


def common(*arrays: Any) -> Any:
    """The dtype that holds all of these."""
    with promoting():
        return jnp.result_type(*arrays)


def accumulator(tree: Any) -> Any:
    """What to add up many numbers like these in: nothing narrower than float32."""
    return common(jnp.float32, *jax.tree.leaves(tree))
