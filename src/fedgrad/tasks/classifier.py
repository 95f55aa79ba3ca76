"""A small classifier: dense layers with relu; without hidden layers, softmax regression."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedgrad.core.types import Batch, Key, Params


def zeros(sizes: Sequence[int]) -> list[dict[str, jax.Array]]:
    """Return zero layers of these sizes: a start for softmax regression, whose loss is convex."""
    return [
        {"weights": jnp.zeros((n, m), jnp.float32), "bias": jnp.zeros(m, jnp.float32)}
        for n, m in itertools.pairwise(sizes)
    ]


def random(key: Key, sizes: Sequence[int]) -> list[dict[str, jax.Array]]:
    """Return layers with normal weights of variance 2 / inputs (He et al.) and zero biases."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        layer
        | {
            "weights": jax.random.normal(k, layer["weights"].shape, jnp.float32)
            * jnp.sqrt(2 / len(layer["weights"])).astype(jnp.float32)
        }
        for k, layer in zip(keys, zeros(sizes), strict=True)
    ]


def logits(params: Params, x: jax.Array) -> jax.Array:
    """Return the scores of the classes, one row per example."""
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(_affine(layer, x))
    return _affine(last, x)


def cross_entropy(params: Params, batch: Batch) -> jax.Array:
    """Return the loss of each example of {"x": features, "y": labels}."""
    scores = jax.nn.log_softmax(logits(params, batch["x"]))
    return -jnp.take_along_axis(scores, batch["y"][..., None], axis=-1)[..., 0]


def accuracy(params: Params, batch: Batch) -> jax.Array:
    """Return 1 for each example whose label scores highest, else 0."""
    highest = jnp.argmax(logits(params, batch["x"]), axis=-1)
    return (highest.astype(batch["y"].dtype) == batch["y"]).astype(jnp.float32)


def _affine(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    product = x @ layer["weights"]
    return product + jnp.broadcast_to(layer["bias"], product.shape)
