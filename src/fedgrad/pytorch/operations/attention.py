"""Attention, as in `torch.nn.functional.scaled_dot_product_attention`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.types import Key
from fedgrad.pytorch.operations.random import mask


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    noise: Key | None = None,
) -> Any:
    """Attend from queries (..., to, feature) to keys (..., from, feature): each output is a mean of
    values, weighted by a softmax."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (jnp.repeat(x, times, axis=-3) for x in (key, value))
    scores = query @ jnp.swapaxes(key, -1, -2)
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = jnp.arange(query.shape[-2])[:, None] >= jnp.arange(key.shape[-2])
        scores = jnp.where(seen, scores, -jnp.inf)
    if attn_mask is not None and attn_mask.dtype == bool:
        scores = jnp.where(attn_mask, scores, -jnp.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if attn_mask is not None:  # fully masked rows, such as padding, are 0 instead of NaN
        some = jnp.max(scores, -1, keepdims=True) > -jnp.inf
        weights = jnp.where(some, jax.nn.softmax(jnp.where(some, scores, 0), -1), 0)
    else:
        weights = jax.nn.softmax(scores, -1)
    if noise is not None:
        weights = weights * mask(noise, dropout_p, weights)
    return weights @ value


def _drops(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *_: Any,
    **__: Any,
) -> bool:
    return dropout_p > 0


OPERATIONS: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention.default": _attention}

DRAWS = {"scaled_dot_product_attention.default": _drops}
