"""Operations that move, select or create numbers. Sizes may be symbolic."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

END = 2**63 - 1  # PyTorch's value for "to the end"


def _expand(x: Any, size: Sequence[Any], implicit: bool = False) -> Any:
    own = (None,) * (len(size) - x.ndim) + x.shape
    kept = [
        mine if isinstance(n, int) and n == -1 else n for n, mine in zip(size, own, strict=True)
    ]
    return jnp.broadcast_to(x, kept)


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    if start in (None, 0) and _end(end) is None and step == 1:
        return x
    return x[_along(x, dim, slice(start, _end(end), step))]


def _end(end: Any) -> Any:
    return None if isinstance(end, int) and end >= END else end


def _along(x: Any, dim: int, index: Any) -> tuple[Any, ...]:
    """Return an index into all axes for an index along one axis."""
    return (*[slice(None)] * (dim % x.ndim), index)


def _select(x: Any, dim: int, index: Any) -> Any:
    return x[_along(x, dim, index)]


def _squeeze(x: Any, dim: int | Sequence[int] | None = None) -> Any:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    ones = [d for d in dims if isinstance(x.shape[d], int) and x.shape[d] == 1]
    return jnp.squeeze(x, tuple(ones))


def _split(x: Any, size: int | Sequence[int], dim: int = 0) -> tuple[Any, ...]:
    n = x.shape[dim]
    sizes = [min(size, n - i) for i in range(0, n, size)] if isinstance(size, int) else size
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(_slice(x, dim, a, a + k) for a, k in zip(starts, sizes, strict=True))


def _unbind(x: Any, dim: int = 0) -> tuple[Any, ...]:
    return tuple(_select(x, dim, i) for i in range(x.shape[dim]))


def _repeat(x: Any, repeats: Sequence[Any]) -> Any:
    return jnp.tile(x, repeats)


def places_of(x: Any, indices: Any, dim: int) -> Any:
    """Return indices along an axis, where negative ones are out of range instead of counting from
    the end."""
    return jnp.where(indices < 0, x.shape[dim], indices)


def taken(x: Any, indices: Any, dim: int) -> Any:
    """Take elements along an axis. Where an index is out of range, which PyTorch refuses, the
    result is NaN, or for integers, which have no NaN, the smallest value (for unsigned ones the
    largest)."""
    return jnp.take(x, places_of(x, indices, dim), axis=dim)


def _gather(x: Any, dim: int, index: Any, **_: Any) -> Any:
    """Gather along one axis; the other axes are cut to the size of `index`."""
    for axis in range(x.ndim):
        if axis != dim % x.ndim:
            x = _slice(x, axis, 0, index.shape[axis])
    return jnp.take_along_axis(x, places_of(x, index, dim), dim)


def _index(x: Any, indices: Sequence[Any]) -> Any:
    at = tuple(slice(None) if i is None else i for i in indices)
    return (
        jnp.asarray(x).at[at].get(mode="fill")
    )  # NaN where there is none; JAX would take the last


_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad(x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Pad the axes. `pad` has two numbers per axis, last axis first; negative numbers crop."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    first = x.ndim - len(pairs)
    for axis, (low, high) in enumerate(pairs, first):
        if low < 0 or high < 0:
            x = _slice(x, axis, max(-low, 0), x.shape[axis] - max(-high, 0))
    widths = [(0, 0)] * first + [(max(low, 0), max(high, 0)) for low, high in pairs]
    if mode != "constant":
        return jnp.pad(x, widths, mode=_MODES[mode])
    return jnp.pad(x, widths, constant_values=value or 0)


def _pixel_shuffle(x: Any, upscale_factor: int) -> Any:
    r, (*batch, channels, rows, columns) = upscale_factor, x.shape
    x = x.reshape(*batch, channels // r**2, r, r, rows, columns)
    first = len(batch)
    order = (*range(first + 1), *(first + i for i in (3, 1, 4, 2)))
    return x.transpose(order).reshape(*batch, channels // r**2, rows * r, columns * r)


def _pixel_unshuffle(x: Any, downscale_factor: int) -> Any:
    r, (*batch, channels, rows, columns) = downscale_factor, x.shape
    x = x.reshape(*batch, channels, rows // r, r, columns // r, r)
    first = len(batch)
    order = (*range(first + 1), *(first + i for i in (2, 4, 1, 3)))
    return x.transpose(order).reshape(*batch, channels * r**2, rows // r, columns // r)


def _sizes(x: Any, output_size: Any, factors: Any) -> Iterator[tuple[int, int, int, float]]:
    """Yield (axis, size, output size, input steps per output step) for each spatial axis."""
    for i, n in enumerate(x.shape[2:]):
        if factors is None:
            yield i + 2, n, output_size[i], n / output_size[i]
        else:
            yield i + 2, n, math.floor(n * factors[i]), 1 / factors[i]


def _upsample_nearest(x: Any, output_size: Any, scale_factors: Any = None) -> Any:
    """Upsample by the nearest neighbor, one axis at a time."""
    for axis, n, out, by in _sizes(x, output_size, scale_factors):
        at = jnp.floor(jnp.arange(out, dtype=jnp.float32) * jnp.float32(by)).astype(jnp.int32)
        x = jnp.take(x, jnp.minimum(at, n - 1), axis=axis)
    return x


def _upsample_linear(
    x: Any, output_size: Any, align_corners: bool, scale_factors: Any = None
) -> Any:
    """Upsample by linear interpolation, one axis at a time."""
    for axis, n, out, by in _sizes(x, output_size, scale_factors):
        places = jnp.arange(out, dtype=x.dtype)
        if align_corners:
            at = places * ((n - 1) / max(out - 1, 1))
        else:
            at = jnp.maximum((places + 0.5) * by - 0.5, 0)
        low = jnp.minimum(jnp.floor(at).astype(jnp.int32), n - 1)
        part = (at - low).reshape(-1, *[1] * (x.ndim - 1 - axis))
        before, after = (jnp.take(x, jnp.minimum(low + k, n - 1), axis=axis) for k in (0, 1))
        x = before * (1 - part) + after * part
    return x


def _with_slice(
    x: Any, part: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Any:
    return jnp.asarray(x).at[_along(x, dim, slice(start, _end(end), step))].set(part)


def _with_selected(x: Any, part: Any, dim: int, index: int) -> Any:
    return jnp.asarray(x).at[_along(x, dim, index)].set(part)


def _arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, **_: Any) -> Any:
    start, end = (0, start) if end is None else (start, end)
    return jnp.arange(start, end, step, dtype=dtype)


def _filled(value: float) -> Callable[..., Any]:
    return lambda size, dtype=None, **_: jnp.full(size, value, dtype)


def _filled_like(value: float) -> Callable[..., Any]:
    return lambda x, dtype=None, **_: jnp.full(x.shape, value, dtype or x.dtype)


def _new_filled(value: float) -> Callable[..., Any]:
    return lambda x, size, dtype=None, **_: jnp.full(size, value, dtype or x.dtype)


def _full(size: Any, fill_value: Any, dtype: Any = None, **_: Any) -> Any:
    return jnp.full(size, fill_value, dtype)


def _view(x: Any, size: Sequence[Any]) -> Any:
    return x.reshape(size)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "_unsafe_view.default": _view,
    "arange.default": _arange,
    "arange.start": _arange,
    "arange.start_step": _arange,
    "cat.default": lambda tensors, dim=0: jnp.concatenate(tensors, dim),
    "copy.default": lambda x, other, non_blocking=False: jnp.broadcast_to(other, x.shape),
    "empty.memory_format": _filled(0),
    "empty_like.default": _filled_like(0),
    "expand.default": _expand,
    "eye.default": lambda n, dtype=None, **_: jnp.eye(n, dtype=dtype),
    "eye.m": lambda n, m, dtype=None, **_: jnp.eye(n, m, dtype=dtype),
    "fill.Tensor": lambda x, value: jnp.broadcast_to(value, x.shape),
    "flip.default": lambda x, dims: jnp.flip(x, tuple(dims)),
    "full.default": _full,
    "full_like.default": lambda x, value, dtype=None, **_: jnp.full(
        x.shape, value, dtype or x.dtype
    ),
    "gather.default": _gather,
    "index.Tensor": _index,
    "index_select.default": lambda x, dim, index: taken(x, index, dim),
    "linspace.default": lambda start, end, steps, dtype=None, **_: jnp.linspace(
        start, end, steps, dtype=dtype
    ),
    "new_empty.default": _new_filled(0),
    "new_full.default": lambda x, size, value, dtype=None, **_: jnp.full(
        size, value, dtype or x.dtype
    ),
    "new_ones.default": _new_filled(1),
    "new_zeros.default": _new_filled(0),
    "one_hot.default": lambda x, num_classes: jax.nn.one_hot(x, num_classes, dtype=jnp.int32),
    "ones.default": _filled(1),
    "ones_like.default": _filled_like(1),
    "pad.default": _pad,
    "permute.default": jnp.transpose,
    "pixel_shuffle.default": _pixel_shuffle,
    "pixel_unshuffle.default": _pixel_unshuffle,
    "repeat.default": _repeat,
    "repeat_interleave.self_int": lambda x, n, dim=None, **_: jnp.repeat(x, n, axis=dim),
    "roll.default": lambda x, shifts, dims=(): jnp.roll(x, shifts, dims or None),
    "scalar_tensor.default": lambda value, dtype=None, **_: jnp.asarray(value, dtype),
    "select.int": _select,
    "select_scatter.default": _with_selected,
    "slice.Tensor": _slice,
    "slice_scatter.default": _with_slice,
    "split.Tensor": _split,
    "split_with_sizes.default": _split,
    "squeeze.default": _squeeze,
    "squeeze.dim": _squeeze,
    "squeeze.dims": _squeeze,
    "stack.default": lambda tensors, dim=0: jnp.stack(tensors, dim),
    "sym_size.int": lambda x, dim: x.shape[dim],
    "t.default": jnp.transpose,
    "tile.default": _repeat,
    "transpose.int": jnp.swapaxes,
    "tril.default": lambda x, diagonal=0: jnp.tril(x, diagonal),
    "triu.default": lambda x, diagonal=0: jnp.triu(x, diagonal),
    "unbind.int": _unbind,
    "unsqueeze.default": jnp.expand_dims,
    "upsample_bilinear2d.vec": _upsample_linear,
    "upsample_linear1d.vec": _upsample_linear,
    "upsample_nearest1d.vec": _upsample_nearest,
    "upsample_nearest2d.vec": _upsample_nearest,
    "upsample_nearest3d.vec": _upsample_nearest,
    "view.default": _view,
    "zeros.default": _filled(0),
    "zeros_like.default": _filled_like(0),
}
