"""Pooling by shifted slices, whose derivatives are fast in loops over clients, too.

tasks/layers.py does the same. PyTorch's pools differ in where windows begin and end, and among
equal maxima only the first one gets the derivative.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fedgrad.pytorch.operations.convolution import Sizes, each


def _ends(
    space: Sequence[int], window: Sizes, stride: Sizes, padding: Sizes, gaps: Sizes, ceil: bool
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yield (window, stride, dilation, padding before, padding after, windows) for each axis."""
    axes = len(space)
    stride = stride if isinstance(stride, int) or stride else window
    for n, k, s, p, d in zip(
        space, each(window, axes), each(stride, axes), each(padding, axes), each(gaps, axes),
        strict=True,
    ):  # fmt: skip
        free = n + 2 * p - d * (k - 1) - 1
        places = (-(-free // s) if ceil else free // s) + 1
        if ceil and (places - 1) * s >= n + p:  # a window must begin within the image
            places -= 1
        after = max((places - 1) * s + d * (k - 1) + 1 - n - p, 0)
        yield k, s, d, p, after, places


def _windows(x: Any, ends: Sequence[tuple[int, ...]], fill: float) -> Iterator[Any]:
    """Yield slices of the last axes, one for each position inside a window."""
    edges = [(0, 0)] * (x.ndim - len(ends)) + [(before, after) for *_, before, after, _ in ends]
    if any(map(any, edges)):
        x = jnp.pad(x, edges, constant_values=fill)
    for at in itertools.product(*(range(k) for k, *_ in ends)):
        yield x[
            (
                ...,
                *(
                    slice(i * d, i * d + (places - 1) * s + 1, s)
                    for i, (_, s, d, _, _, places) in zip(at, ends, strict=True)
                ),
            )
        ]


def _max_pool(axes: int) -> Callable[..., Any]:
    def pool(
        x: Any,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
    ) -> Any:
        ends = [*_ends(x.shape[-axes:], kernel_size, stride, padding, dilation, ceil_mode)]
        return functools.reduce(_first_largest, _windows(x, ends, -jnp.inf))

    return pool


def _first_largest(a: Any, b: Any) -> Any:
    return jnp.where((b <= a) | (a != a), a, b)  # NaN propagates


def _avg_pool(axes: int) -> Callable[..., Any]:
    def pool(
        x: Any,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        space = x.shape[-axes:]
        ends = [*_ends(space, kernel_size, stride, padding, 1, ceil_mode)]
        total = functools.reduce(jnp.add, _windows(x, ends, 0))
        counts = [_count(n, end, count_include_pad) for n, end in zip(space, ends, strict=True)]
        size = functools.reduce(np.multiply.outer, counts)
        if divisor_override or (size == size.flat[0]).all():  # a scalar: captures no array
            return total / (divisor_override or float(size.flat[0]))
        return total / jnp.asarray(size, x.dtype)

    return pool


def _count(n: int, end: tuple[int, ...], with_padding: bool) -> Any:
    """Return the number of elements that count in each window along one axis."""
    window, stride, _, before, _, places = end
    starts = np.arange(places) * stride - before
    low, high = (-before, n + before) if with_padding else (0, n)
    return np.minimum(starts + window, high) - np.maximum(starts, low)


def _adaptive(axes: int, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pool that covers each axis separately by `output_size` windows, as equal as
    possible."""

    def pool(x: Any, output_size: Sizes) -> Any:
        for axis, wanted in reversed([*zip(range(-axes, 0), each(output_size, axes), strict=True)]):
            n = x.shape[axis]
            bounds = [(i * n // wanted, -(-(i + 1) * n // wanted)) for i in range(wanted)]
            slices = [lax.slice_in_dim(x, low, high, axis=axis) for low, high in bounds]
            parts = [fun(part, axis=axis, keepdims=True) for part in slices]
            x = jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]
        return x

    return pool


def _first_of_largest(x: Any, axis: int, keepdims: bool) -> Any:
    """Return the maximum along an axis. The last axis is reduced first, so that among equal maxima
    the first in row-major order gets the derivative."""
    first = jnp.argmax(x, axis, keepdims=True)
    places = jnp.arange(x.shape[axis]).reshape(-1, *[1] * (-1 - axis))
    return jnp.sum(jnp.where(places == first, x, 0), axis, keepdims=keepdims)


def _adaptive_max(axes: int) -> Callable[..., Any]:
    pool = _adaptive(axes, _first_of_largest)
    return lambda x, output_size: (pool(x, output_size),)  # the indices are not returned


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{f"max_pool{n}d.default": _max_pool(n) for n in (1, 2, 3)},
    **{f"avg_pool{n}d.default": _avg_pool(n) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d.default": _adaptive(n, jnp.mean) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d.default": _adaptive_max(n) for n in (1, 2, 3)},
}
