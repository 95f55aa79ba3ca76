"""Reductions, and operations along an axis: sums, maxima, softmax."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.pytorch.operations.pointwise import absolute

Axes = int | Sequence[int] | None


def axes(dim: Axes) -> int | tuple[int, ...] | None:
    """Convert PyTorch's axes to JAX's: None or an empty list means all."""
    return dim if dim is None or isinstance(dim, int) else tuple(dim) or None


def _reduced(fun: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Any, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Any:
        return fun(x if dtype is None else x.astype(dtype), axis=axes(dim), keepdims=keepdim)

    return reduced


def _whole(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dtype=None: fun(x if dtype is None else x.astype(dtype))


def _chosen(choice: Callable[..., Any]) -> Callable[..., Any]:
    """Return the largest or smallest value and its index; among ties only the first gets the
    derivative."""

    def chosen(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        where = choice(x, axis=dim, keepdims=True)
        value = jnp.take_along_axis(x, where, dim)
        return (value, where) if keepdim else (value.squeeze(dim), where.squeeze(dim))

    return chosen


def _variance(
    x: Any, dim: Axes = None, correction: float | None = None, keepdim: bool = False
) -> Any:
    biased = jnp.var(x, axis=axes(dim), keepdims=keepdim)
    count = jnp.asarray(x.size // biased.size, biased.dtype)
    return biased * (count / jnp.maximum(count - (1 if correction is None else correction), 0))


def _unbiased(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Convert the older argument `unbiased` to a correction of 0 or 1."""

    def reduced(x: Any, dim: Axes = None, unbiased: bool = True, keepdim: bool = False) -> Any:
        return fun(x, dim, int(unbiased), keepdim)

    return reduced


def _power(x: Any, exponent: float) -> Any:
    """Raise nonnegative numbers to a power, with derivative 0 at zero instead of infinity or
    NaN."""
    zero = x == 0
    other = jnp.where(zero, 1, x)
    return jnp.where(zero, 0, jnp.sqrt(other) if exponent == 0.5 else other**exponent)


def _deviation(*args: Any, **how: Any) -> Any:
    return _power(_variance(*args, **how), 0.5)


def norm(x: Any, ord: Any = 2, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Return the norm of vectors along some axes."""
    x = absolute(x) if jnp.iscomplexobj(x) else x
    how: dict[str, Any] = {"axis": axes(dim), "keepdims": keepdim}
    if ord == 2:
        return _power(jnp.sum(x * x, **how), 0.5)
    if abs(ord) == math.inf:
        return (jnp.max if ord > 0 else jnp.min)(absolute(x), **how)
    if ord == 0:
        return jnp.sum(x != 0, **how)
    if ord < 0:
        raise NotImplementedError(f"a norm of order {ord}")
    return _power(jnp.sum(_power(absolute(x), ord), **how), 1 / ord)


def _softmax(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim, dtype=None: fun(x if dtype is None else x.astype(dtype), axis=dim)


def _cumsum(x: Any, dim: int, dtype: Any = None) -> Any:
    whole = not jnp.issubdtype(x.dtype, jnp.inexact)
    dtype = jax.dtypes.canonicalize_dtype("int64") if whole and dtype is None else dtype
    return jnp.cumsum(x if dtype is None else x.astype(dtype), axis=dim)


def _sorted(x: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    where = jnp.argsort(x, axis=dim, descending=descending)
    return jnp.take_along_axis(x, where, dim), where


def _top(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    values, where = _sorted(x, dim, largest)
    return tuple(jax.lax.slice_in_dim(found, 0, k, axis=dim) for found in (values, where))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "all.default": jnp.all,
    "all.dim": _reduced(jnp.all),
    "amax.default": _reduced(jnp.max),
    "amin.default": _reduced(jnp.min),
    "any.default": jnp.any,
    "any.dim": _reduced(jnp.any),
    "argmax.default": _reduced(jnp.argmax),
    "argmin.default": _reduced(jnp.argmin),
    "argsort.default": lambda x, dim=-1, descending=False: _sorted(x, dim, descending)[1],
    "cumsum.default": _cumsum,
    "linalg_vector_norm.default": norm,
    "log_softmax.int": _softmax(jax.nn.log_softmax),
    "logsumexp.default": _reduced(jax.scipy.special.logsumexp),
    "max.default": jnp.max,
    "max.dim": _chosen(jnp.argmax),
    "mean.default": _whole(jnp.mean),
    "mean.dim": _reduced(jnp.mean),
    "min.default": jnp.min,
    "min.dim": _chosen(jnp.argmin),
    "prod.default": _whole(jnp.prod),
    "prod.dim_int": _reduced(jnp.prod),
    "sort.default": _sorted,
    "softmax.int": _softmax(jax.nn.softmax),
    "std.correction": _deviation,
    "std.dim": _unbiased(_deviation),
    "sum.default": _whole(jnp.sum),
    "sum.dim_IntList": _reduced(jnp.sum),
    "topk.default": _top,
    "var.correction": _variance,
    "var.dim": _unbiased(_variance),
}
