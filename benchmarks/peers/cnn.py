"""The EMNIST CNN in JAX: with `lax.conv`, and with convolutions as matrix products (im2col).

conv 3x3x32, relu, conv 3x3x64, relu, maxpool 2, dense 128, relu, dense 62.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

Weights = dict[str, jax.Array]
Convolution = Callable[[jax.Array, jax.Array], jax.Array]


def lax_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A valid convolution: fast at top level on a CPU, very slow inside a loop (jax#12868)."""
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def im2col(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The same as one matrix product over shifted slices."""
    height, width = x.shape[1] - 2, x.shape[2] - 2
    shifts = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    columns = jnp.concatenate(shifts, -1)
    return columns @ kernel.reshape(-1, kernel.shape[-1])


def loss(p: Weights, x: jax.Array, y: jax.Array, convolution: Convolution) -> jax.Array:
    """The mean cross-entropy of a batch, labels as integers."""
    x = jax.nn.relu(convolution(x, p["conv1"]) + p["bias1"])
    x = jax.nn.relu(convolution(x, p["conv2"]) + p["bias2"])
    n, height, width, channels = x.shape
    x = x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
    x = jax.nn.relu(x.reshape(n, -1) @ p["dense1"] + p["bias3"])
    log_p = jax.nn.log_softmax(x @ p["dense2"] + p["bias4"])
    return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], 1))


LOSSES: dict[str, Callable] = {
    "conv": partial(loss, convolution=lax_conv),
    "im2col": partial(loss, convolution=im2col),
}
