"""Operations that make one number of many, or put them in relation: sums, maxima, softmax."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Axes = int | Sequence[int] | None


def axes(dim: Axes) -> int | tuple[int, ...] | None:
    """The same axes as JAX names them: None, or an empty list, is all."""
    return dim if dim is None or isinstance(dim, int) else tuple(dim) or None


def _reduced(fun: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Any, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Any:
        return fun(x if dtype is None else x.astype(dtype), axis=axes(dim), keepdims=keepdim)

    return reduced


def _whole(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dtype=None: fun(x if dtype is None else x.astype(dtype))


def _chosen(choice: Callable[..., Any]) -> Callable[..., Any]:
    """The largest or smallest, and where: of equal ones the first alone has a derivative."""

    def chosen(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        where = choice(x, axis=dim, keepdims=True)
        value = jnp.take_along_axis(x, where, dim)
        return (value, where) if keepdim else (value.squeeze(dim), where.squeeze(dim))

    return chosen


def _variance(
    x: Any, dim: Axes = None, correction: float | None = None, keepdim: bool = False
) -> Any:
    ddof = 1 if correction is None else correction
    return jnp.var(x, axis=axes(dim), ddof=ddof, keepdims=keepdim)  # type: ignore[arg-type]


def _unbiased(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The older way to say a correction of 0 or 1."""

    def reduced(x: Any, dim: Axes = None, unbiased: bool = True, keepdim: bool = False) -> Any:
        return fun(x, dim, int(unbiased), keepdim)

    return reduced


def _deviation(*args: Any, **how: Any) -> Any:
    return jnp.sqrt(_variance(*args, **how))


def _norm(x: Any, ord: Any = 2, dim: Axes = None, keepdim: bool = False, dtype: Any = None) -> Any:
    how: dict[str, Any] = {"axis": axes(dim), "keepdims": keepdim}
    if ord != 2:
        return jnp.sum(jnp.abs(x) ** ord, **how) ** (1 / ord)
    squares = jnp.sum(x * x, **how)
    some = squares > 0  # at zero the derivative is 0, not NaN
    return jnp.where(some, jnp.sqrt(jnp.where(some, squares, 1)), 0)


def _softmax(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim, dtype=None: fun(x if dtype is None else x.astype(dtype), axis=dim)


def _cumsum(x: Any, dim: int, dtype: Any = None) -> Any:
    return jnp.cumsum(x if dtype is None else x.astype(dtype), axis=dim)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "all.default": jnp.all,
    "all.dim": _reduced(jnp.all),
    "amax.default": _reduced(jnp.max),
    "amin.default": _reduced(jnp.min),
    "any.default": jnp.any,
    "any.dim": _reduced(jnp.any),
    "argmax.default": _reduced(jnp.argmax),
    "argmin.default": _reduced(jnp.argmin),
    "cumsum.default": _cumsum,
    "linalg_vector_norm.default": _norm,
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
    "softmax.int": _softmax(jax.nn.softmax),
    "std.correction": _deviation,
    "std.dim": _unbiased(_deviation),
    "sum.default": _whole(jnp.sum),
    "sum.dim_IntList": _reduced(jnp.sum),
    "var.correction": _variance,
    "var.dim": _unbiased(_variance),
}
