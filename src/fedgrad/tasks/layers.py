"""Layers of models: pure functions of dicts of float32 arrays, each next to its initializer.

Initializers are those of Keras, in which the paper's models were written.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.nn import initializers

from fedgrad.core.types import Key, Params

Layer = dict[str, jax.Array]
State = tuple[jax.Array, jax.Array]  # of an LSTM: its output and its memory
_glorot = initializers.glorot_uniform()
_orthogonal = initializers.orthogonal()


def dense_init(key: Key, inputs: int, outputs: int) -> Layer:
    """Return Glorot weights and a zero bias."""
    return {
        "kernel": _glorot(key, (inputs, outputs), jnp.float32),
        "bias": jnp.zeros(outputs, jnp.float32),
    }


def dense(layer: Layer, x: jax.Array) -> jax.Array:
    """Apply an affine map to the last axis."""
    return _shifted(x @ layer["kernel"], layer["bias"])


def conv_init(key: Key, window: int, inputs: int, outputs: int) -> Layer:
    """Return Glorot weights and a zero bias."""
    return {
        "kernel": _glorot(key, (window, window, inputs, outputs), jnp.float32),
        "bias": jnp.zeros(outputs, jnp.float32),
    }


def conv(layer: Layer, x: jax.Array, stride: int = 1, padding: str = "VALID") -> jax.Array:
    """Convolve images (example, row, column, channel), and add the bias if the layer has one."""
    out = jax.lax.conv_general_dilated(
        x, layer["kernel"], (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return _shifted(out, layer["bias"]) if "bias" in layer else out


def max_pool(x: jax.Array, window: int, stride: int, padding: int = 0) -> jax.Array:
    """Return the maximum of each window, as a maximum of shifted slices, whose derivatives are also
    fast in loops. `padding`: ignored rows and columns at the end."""
    if padding:
        edges = ((0, 0), (0, padding), (0, padding), (0, 0))
        x = jnp.pad(x, edges, constant_values=-jnp.inf)
    rows, columns = ((n - window) // stride + 1 for n in x.shape[1:3])
    largest = None
    for i in range(window):
        for j in range(window):
            here = x[:, i : i + stride * rows : stride, j : j + stride * columns : stride]
            here = here[:, :rows, :columns]
            largest = here if largest is None else jnp.maximum(largest, here)
    assert largest is not None
    return largest


def group_norm_init(channels: int) -> Layer:
    """Return a scale of one and a zero bias."""
    return {"scale": jnp.ones(channels, jnp.float32), "bias": jnp.zeros(channels, jnp.float32)}


def group_norm(layer: Layer, x: jax.Array, groups: int = 32, epsilon: float = 1e-3) -> jax.Array:
    """Normalize each example's groups of channels to mean 0 and variance 1; scale and shift."""
    n, rows, columns, channels = x.shape
    grouped = x.reshape(n, rows, columns, groups, channels // groups)
    mean = jnp.mean(grouped, (1, 2, 4), keepdims=True)
    centered = grouped - mean
    variance = jnp.mean(centered**2, (1, 2, 4), keepdims=True)
    normal = (centered * jax.lax.rsqrt(variance + epsilon)).reshape(x.shape)
    return _shifted(normal * jnp.broadcast_to(layer["scale"], x.shape), layer["bias"])


def dropout(x: jax.Array, rate: float, key: Key | None) -> jax.Array:
    """Set some values to zero and scale up the others; without a key, return all unchanged."""
    if key is None:
        return x
    kept = jax.random.bernoulli(key, jnp.float32(1 - rate), x.shape)
    return jnp.where(kept, x / (1 - rate), 0)


def embedding_init(key: Key, tokens: int, size: int) -> jax.Array:
    """Return uniform values between -0.05 and 0.05."""
    return jax.random.uniform(key, (tokens, size), jnp.float32, -0.05, 0.05)


def embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the row of each token."""
    return jnp.take(table, tokens.astype(jnp.int32), axis=0, mode="clip")


def lstm_init(key: Key, inputs: int, size: int) -> Layer:
    """Return Glorot input and orthogonal recurrent weights, and a zero bias, one to forget."""
    of_input, recurrent = jax.random.split(key)
    return {
        "input": _glorot(of_input, (inputs, 4 * size), jnp.float32),
        "recurrent": _orthogonal(recurrent, (size, 4 * size), jnp.float32),
        "bias": jnp.zeros(4 * size, jnp.float32).at[size : 2 * size].set(1),
    }


def lstm(layers: Sequence[Layer], x: jax.Array) -> jax.Array:
    """Apply stacked LSTMs along sequences (example, time, feature), in one scan."""
    first, *above = layers
    from_input = _shifted(x @ first["input"], first["bias"])  # for all times at once

    def step(states: list[State], below: jax.Array) -> tuple[list[State], jax.Array]:
        out = _lstm_cell(first, below, states[0])
        new = [out]
        for layer, state in zip(above, states[1:], strict=True):
            out = _lstm_cell(layer, _shifted(out[0] @ layer["input"], layer["bias"]), state)
            new.append(out)
        return new, out[0]

    start = [
        (zeros, zeros)
        for layer in layers
        for zeros in [jnp.zeros((len(x), len(layer["recurrent"])), x.dtype)]
    ]
    _, outputs = jax.lax.scan(step, start, jnp.swapaxes(from_input, 0, 1))
    return jnp.swapaxes(outputs, 0, 1)


def _lstm_cell(layer: Layer, from_input: jax.Array, state: State) -> State:
    output, memory = state
    gates = jnp.split(from_input + output @ layer["recurrent"], 4, axis=-1)
    into, forget, new, out = gates
    memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(into) * jnp.tanh(new)
    return jax.nn.sigmoid(out) * jnp.tanh(memory), memory


def parameters(params: Params) -> int:
    """Return the number of parameters of a model."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _shifted(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + jnp.broadcast_to(bias, x.shape)
