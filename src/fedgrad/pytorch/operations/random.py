"""Random operations, each with a key of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.types import Key


def mask(noise: Key, rate: float, like: Any) -> Any:
    """Return a dropout mask: 0 with probability `rate`, otherwise 1 / (1 - rate)."""
    if rate >= 1:
        return jnp.zeros(like.shape, like.dtype)
    kept = jax.random.bernoulli(noise, jnp.asarray(1 - rate, like.dtype), like.shape)
    return kept.astype(like.dtype) / (1 - rate)


def _dropout(x: Any, p: float, train: bool | None = True, *, noise: Key) -> tuple[Any, Any]:
    kept = mask(noise, p, x)
    return x * kept, kept > 0


def _bernoulli(x: Any, p: float = 0.5, *, noise: Key) -> Any:
    return jax.random.bernoulli(noise, jnp.float32(p), x.shape).astype(x.dtype)


def _rand_like(x: Any, dtype: Any = None, *, noise: Key, **_: Any) -> Any:
    return jax.random.uniform(noise, x.shape, dtype or x.dtype)


def _randn_like(x: Any, dtype: Any = None, *, noise: Key, **_: Any) -> Any:
    return jax.random.normal(noise, x.shape, dtype or x.dtype)


def _rand(size: Sequence[Any], dtype: Any = None, *, noise: Key, **_: Any) -> Any:
    return jax.random.uniform(noise, tuple(size), dtype)


def _randn(size: Sequence[Any], dtype: Any = None, *, noise: Key, **_: Any) -> Any:
    return jax.random.normal(noise, tuple(size), dtype)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "bernoulli.p": _bernoulli,
    "native_dropout.default": _dropout,
    "rand.default": _rand,
    "rand_like.default": _rand_like,
    "randn.default": _randn,
    "randn_like.default": _randn_like,
}

DRAWS = {name: lambda *_, **__: True for name in OPERATIONS}
