"""The EMNIST CNN in JAX, with the convolution written three ways.

conv 3x3x32, relu, conv 3x3x64, relu, maxpool 2, dense 128, relu, dense 62.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Weights = dict[str, jax.Array]
Convolution = Callable[[jax.Array, jax.Array], jax.Array]
SHIFTS = [(i, j) for i in range(3) for j in range(3)]
# JAX 0.4.25, which FedJAX's pmap backend needs, has none.
_barrier = getattr(lax, "optimization_barrier", lambda x: x)


def lax_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A valid convolution: fast at top level on a CPU, very slow inside a loop (jax#12868)."""
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def im2col(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The same as one matrix product over shifted slices."""
    height, width = x.shape[1] - 2, x.shape[2] - 2
    columns = jnp.concatenate([x[:, i : i + height, j : j + width] for i, j in SHIFTS], -1)
    return columns @ kernel.reshape(-1, kernel.shape[-1])


@jax.custom_vjp
def tuned(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`im2col` in the form that XLA's CPU backend does fastest, backward pass included."""
    return _gather(x) @ kernel.reshape(-1, kernel.shape[-1])


def _gather(x: jax.Array) -> jax.Array:
    # Whole pixels gathered by constant indices: 4 ms where the concatenation of slices takes 11.
    n, height, width, channels = x.shape
    # XLA folds them; an array of numpy's would be data that a client's code captures unseen.
    corner = jnp.arange(height - 2)[:, None] * width + jnp.arange(width - 2)
    pixels = corner.reshape(-1, 1) + np.array([i * width + j for i, j in SHIFTS])
    columns = x.reshape(n, height * width, channels)[:, pixels]
    return columns.reshape(n, height - 2, width - 2, 9 * channels)


def _tuned_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple]:
    columns = _gather(x)
    return columns @ kernel.reshape(-1, kernel.shape[-1]), (columns, kernel)


def _tuned_backward(saved: tuple, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    columns, kernel = saved
    # d' c, then transposed, takes 5 ms where c' d takes 8; the barrier keeps XLA from undoing it.
    product = d.reshape(-1, d.shape[-1]).T @ columns.reshape(-1, columns.shape[-1])
    d_kernel = _barrier(product).T.reshape(kernel.shape)
    d_columns = jnp.split(d @ kernel.reshape(-1, kernel.shape[-1]).T, 9, -1)
    d_x = sum(
        jnp.pad(part, ((0, 0), (i, 2 - i), (j, 2 - j), (0, 0)))
        for part, (i, j) in zip(d_columns, SHIFTS, strict=True)
    )
    return d_x, d_kernel


tuned.defvjp(_tuned_forward, _tuned_backward)


def losses(p: Weights, x: jax.Array, y: jax.Array, convolution: Convolution) -> jax.Array:
    """The cross-entropy of each example of a batch, labels as integers."""
    x = jax.nn.relu(convolution(x, p["conv1"]) + p["bias1"])
    # Pooling first is the same function (bias and relu are monotone) on a quarter of the pixels.
    x = convolution(x, p["conv2"])
    n, height, width, channels = x.shape
    x = x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
    x = jax.nn.relu(x + p["bias2"])
    x = jax.nn.relu(x.reshape(n, -1) @ p["dense1"] + p["bias3"])
    log_p = jax.nn.log_softmax(x @ p["dense2"] + p["bias4"])
    return -jnp.take_along_axis(log_p, y[:, None], 1)[:, 0]


def loss(p: Weights, x: jax.Array, y: jax.Array, convolution: Convolution) -> jax.Array:
    """The mean over a batch."""
    return jnp.mean(losses(p, x, y, convolution))


CONVOLUTIONS: dict[str, Convolution] = {"conv": lax_conv, "im2col": im2col, "tuned": tuned}
LOSSES: dict[str, Callable] = {
    name: partial(loss, convolution=way) for name, way in CONVOLUTIONS.items()
}
PER_EXAMPLE: dict[str, Callable] = {
    name: partial(losses, convolution=way) for name, way in CONVOLUTIONS.items()
}
