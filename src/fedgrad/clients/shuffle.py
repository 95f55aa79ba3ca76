"""A random permutation that is evaluated position by position.

The cost for a client depends on its own number of examples; sorting random numbers would cost as
much for every client as for the largest.
"""

import jax
import jax.numpy as jnp

from fedgrad.core.types import Key

ROUNDS = 16


def permuted(key: Key, count: jax.Array, places: jax.Array) -> jax.Array:
    """Return the images of these places under a random permutation of 0 ... count - 1.

    "Swap or not" (Hoang, Morris and Rogaway 2012): in each round a random pivot pairs every place
    with another, and each pair is swapped or not by a coin that is a function of the pair.
    """
    pivots, salts = jax.random.bits(key, (2, ROUNDS), jnp.uint32)
    size = jnp.asarray(count).astype(jnp.uint32)
    here = jnp.clip(places, 0, count - 1).astype(jnp.uint32)
    for pivot, salt in zip(pivots % size, salts, strict=True):
        other = jnp.where(here <= pivot, pivot - here, pivot + size - here)
        here = jnp.where(_coin(jnp.maximum(here, other) ^ salt), other, here)
    return here.astype(jnp.int32)


def _coin(x: jax.Array) -> jax.Array:
    """Return one bit that depends on all bits of x, mixed as in MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)) & 1 == 1
