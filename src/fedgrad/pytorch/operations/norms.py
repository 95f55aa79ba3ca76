"""Normalizations: per example, or by fixed statistics."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def _normal(x: Any, axes: tuple[int, ...], eps: float) -> Any:
    centered = x - jnp.mean(x, axes, keepdims=True)
    return centered * lax.rsqrt(jnp.mean(centered * centered, axes, keepdims=True) + eps)


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(
    x: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    axes = tuple(range(-len(normalized_shape), 0))
    return _affine(_normal(x, axes, eps), weight, bias)


def _rms_norm(
    x: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    axes = tuple(range(-len(normalized_shape), 0))
    least = jnp.finfo(x.dtype).eps if eps is None else eps
    return _affine(x * lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) + least), weight, None)


def _group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    grouped = x.reshape(x.shape[0], num_groups, x.shape[1] // num_groups, *x.shape[2:])
    normal = _normal(grouped, tuple(range(2, grouped.ndim)), eps).reshape(x.shape)
    return _affine(normal, *(_of_channels(p, x) for p in (weight, bias)))


def _instance_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    if use_input_stats:
        return _group_norm(x, x.shape[1], weight, bias, eps)
    return _batch_norm(x, weight, bias, running_mean, running_var, momentum, eps)[0]


def _batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    """Normalize by fixed statistics. Those of a batch are refused (../reading.py)."""
    mean, variance = (_of_channels(p, x) for p in (running_mean, running_var))
    normal = (x - mean) * lax.rsqrt(variance + eps)
    return (_affine(normal, *(_of_channels(p, x) for p in (weight, bias))),)


def _of_channels(param: Any, x: Any) -> Any:
    return None if param is None else param.reshape(-1, *[1] * (x.ndim - 2))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "_native_batch_norm_legit_no_training.default": _batch_norm,
    "group_norm.default": _group_norm,
    "instance_norm.default": _instance_norm,
    "layer_norm.default": _layer_norm,
    "rms_norm.default": _rms_norm,
}
