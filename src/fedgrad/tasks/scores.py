"""Losses and metrics of scores: for one label, a sequence of tokens, or several tags."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of each label, from the scores along the last axis."""
    labels = labels.astype(jnp.int32)[..., None]
    chosen = jnp.take_along_axis(logits, labels, axis=-1, mode="clip")[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def is_right(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return 1 where the label scores highest, else 0."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return (best == labels.astype(jnp.int32)).astype(logits.dtype)


def in_highest(logits: jax.Array, wanted: jax.Array, k: int) -> jax.Array:
    """Return how many wanted entries (1, else 0) of each row are among its k highest scores."""
    _, highest = jax.lax.top_k(logits, k)
    return jnp.sum(jnp.take_along_axis(wanted, highest, axis=-1), axis=-1)


def binary_cross_entropy(logits: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return the binary cross-entropy of each score, for targets 1 or 0."""
    return jax.nn.softplus(logits) - logits * wanted
