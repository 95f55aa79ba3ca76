"""Losses that a module computes itself: per example, or reduced to their mean or sum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.pytorch.operations.pointwise import absolute
from fedgrad.pytorch.operations.shapes import places_of, taken

MEAN, SUM = 1, 2  # PyTorch's codes for the reduction of losses; 0 is none


def _reduced(losses: Any, reduction: int, total: Any = None) -> Any:
    if reduction == SUM:
        return jnp.sum(losses)
    if reduction == MEAN and total is None:
        return jnp.mean(losses)
    if reduction == MEAN:
        return jnp.sum(losses) / total
    return losses


def _of_classes(
    x: Any, target: Any, weight: Any = None, reduction: int = MEAN, ignore_index: int = -100
) -> tuple[Any, Any]:
    """Return the negative log-likelihood of the target class, given log-probabilities, and the
    total weight. A mean is weighted by the weights of the classes."""
    axis = 0 if x.ndim == 1 else 1
    counts = target != ignore_index
    places = jnp.where(counts, target, 0)
    at = jnp.expand_dims(places_of(x, places, axis), axis)  # out of range: NaN
    found = -jnp.squeeze(jnp.take_along_axis(x, at, axis), axis)
    weights = jnp.ones(places.shape, x.dtype) if weight is None else taken(weight, places, 0)
    weights = jnp.where(counts, weights, 0)
    total = jnp.sum(weights)
    return _reduced(jnp.where(counts, found * weights, 0), reduction, total), total


def _squared(x: Any, target: Any, reduction: int = MEAN) -> Any:
    return _reduced(jnp.square(x - target), reduction)


def _smooth(x: Any, target: Any, reduction: int = MEAN, beta: float = 1.0) -> Any:
    far = absolute(x - target)
    if beta == 0:
        return _reduced(far, reduction)
    near = far < beta
    return _reduced(jnp.where(near, far * far / (2 * beta), far - beta / 2), reduction)


def _huber(x: Any, target: Any, reduction: int = MEAN, delta: float = 1.0) -> Any:
    far = absolute(x - target)
    near = far <= delta
    return _reduced(jnp.where(near, far * far / 2, delta * (far - delta / 2)), reduction)


def _of_logits(
    x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = MEAN
) -> Any:
    more = 1 if pos_weight is None else 1 + (pos_weight - 1) * target
    losses = (1 - target) * x + more * jax.nn.softplus(-x)
    return _reduced(losses if weight is None else losses * weight, reduction)


def _xlogy(x: Any, y: Any) -> Any:
    """Compute x * log(y), which is 0 where x is 0."""
    none = (x == 0) & ((y <= 0) | jnp.isinf(y))
    return jnp.where(none, 0, x * jnp.log(jnp.where(none, 1, y)))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "binary_cross_entropy_with_logits.default": _of_logits,
    "huber_loss.default": _huber,
    "mse_loss.default": _squared,
    "nll_loss_forward.default": _of_classes,
    "nll_loss2d_forward.default": _of_classes,
    "smooth_l1_loss.default": _smooth,
    "xlogy.Tensor": _xlogy,
}
