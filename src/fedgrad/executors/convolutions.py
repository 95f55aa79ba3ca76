"""Convolutions as matrix products.

XLA on CPU runs a convolution inside of a loop on one thread and slowly (jax-ml/jax#12868), and a
vectorised one over clients with kernels of their own becomes a grouped convolution, which is slower
still. Client stages are loops. So there a convolution is computed as one matrix product over
shifted slices, in whichever of three ways moves the least:

- by window: every tap of a small kernel is one slice of the image;
- by output: every place of a small output is one slice; so is the gradient by a kernel;
- by sum: the product comes first and is then added up where it belongs; so is the gradient by the
  image, also of a strided convolution, without multiplying the zeros between its strides.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedgrad.core.primitives import jax_primitives
from fedgrad.executors.rewrite import Rules

MAX_SLICES = 64  # with more, the copies cost more than XLA's convolution
MOVE = 32  # writing and reading an intermediate number takes as long as so many multiplications

Sizes = tuple[int, ...]


def default_rules() -> Rules:
    """The rules that make convolutions fast on this backend: none where XLA's own are fast."""
    if jax.default_backend() != "cpu":
        return {}
    return {jax_primitives.conv_general_dilated_p: as_matmul}


def as_matmul(params: dict[str, Any], inputs: Sequence[Any]) -> list[Any] | None:
    """The rule for `lax.conv_general_dilated`; None where it would take too many slices."""
    conv = _read(params, *inputs)
    if conv is None:
        return None
    by_window, by_output = math.prod(conv.window), math.prod(conv.places)
    if min(by_window, by_output) > MAX_SLICES:
        return None
    if by_output < by_window:
        out = _by_output(conv)
    elif _sum_is_cheaper(conv):
        out = _by_sum(conv)
    else:
        out = _by_window(conv)
    return [_write(conv, params, out)]


@dataclass(frozen=True)
class _Conv:
    """A convolution with its dimensions in order; groups of batch or features come first."""

    x: Any  # (group, batch, *space, feature)
    kernel: Any  # (group, *window, feature, out feature)
    places: Sizes  # spatial shape of the output
    strides: Sizes
    padding: tuple[tuple[int, int], ...]
    spread: Sizes  # dilation of x
    gaps: Sizes  # dilation of the kernel
    dtype: Any
    precision: Any

    @property
    def space(self) -> Sizes:
        return self.x.shape[2:-1]

    @property
    def window(self) -> Sizes:
        return self.kernel.shape[1:-2]

    def dot(self, a: Any, b: Any, contract: tuple[Sizes, Sizes]) -> Any:
        return lax.dot_general(
            a,
            b,
            (contract, ((0,), (0,))),
            precision=self.precision,
            preferred_element_type=_accumulator(self.dtype),
        )


def _by_window(conv: _Conv) -> Any:
    """(taps of) x @ kernel: contracts over (tap, feature)."""
    x = _padded(conv, conv.x)
    spans = [(n - 1) * s + 1 for n, s in zip(conv.places, conv.strides, strict=True)]
    taps = [_slice(x, at, spans, conv.strides) for at in _positions(conv.window, conv.gaps)]
    groups, *_, features = conv.kernel.shape
    last = x.ndim - 1
    kernel = conv.kernel.reshape(groups, -1, features)
    return conv.dot(_joined(taps), kernel, ((last,), (1,)))


def _by_output(conv: _Conv) -> Any:
    """(places of) x^T @ kernel: contracts over (feature, window)."""
    # The batch is last and the feature is first, which for the gradient by a kernel is the order
    # that the image itself has; so XLA makes the slices once for the gradient and the output.
    x = jnp.swapaxes(_padded(conv, conv.x), 1, -1)
    spans = [(n - 1) * g + 1 for n, g in zip(conv.window, conv.gaps, strict=True)]
    places = [_slice(x, at, spans, conv.gaps) for at in _positions(conv.places, conv.strides)]
    kernel = jnp.moveaxis(conv.kernel, -2, 1)
    inner = tuple(range(1, x.ndim - 1))
    groups, batch, features = x.shape[0], x.shape[-1], kernel.shape[-1]
    out = conv.dot(_joined(places), kernel, (inner, inner))
    return jnp.moveaxis(out.reshape(groups, *conv.places, batch, features), -2, 1)


def _by_sum(conv: _Conv) -> Any:
    """Sum over taps of shifted (x @ kernel): contracts over the feature alone."""
    groups, *_, features = conv.kernel.shape
    kernel = jnp.moveaxis(conv.kernel, -2, 1).reshape(groups, conv.x.shape[-1], -1)
    last = conv.x.ndim - 1
    products = conv.dot(conv.x, kernel, ((last,), (1,)))
    spans = [(n - 1) * s + 1 for n, s in zip(conv.places, conv.strides, strict=True)]

    def shifted(tap: int, at: Sizes) -> Any:
        mine = lax.slice_in_dim(products, tap * features, (tap + 1) * features, axis=last)
        moved = []
        for (low, _), shift, n, d, span in zip(
            conv.padding, at, conv.space, conv.spread, spans, strict=True
        ):
            before = low - shift
            moved.append((before, span - before - ((n - 1) * d + 1), d - 1))
        return _slice(_pad(mine, moved), (0,) * len(at), spans, conv.strides)

    taps = enumerate(_positions(conv.window, conv.gaps))
    return functools.reduce(operator.add, [shifted(tap, at) for tap, at in taps])


def _sum_is_cheaper(conv: _Conv) -> bool:
    features, outs = conv.kernel.shape[-2:]
    by_sum = math.prod(conv.space) * outs * (features + MOVE)
    by_window = math.prod(conv.places) * features * (outs + MOVE)
    return by_sum < by_window


# --- Slices -----------------------------------------------------------------------------------


def _positions(sizes: Sizes, steps: Sizes) -> Iterator[Sizes]:
    for index in itertools.product(*map(range, sizes)):
        yield tuple(i * s for i, s in zip(index, steps, strict=True))


def _slice(x: Any, start: Sizes, spans: Sequence[int], steps: Sizes) -> Any:
    """Of the spatial dimensions of (group, first, *space, last)."""
    stop = [a + n for a, n in zip(start, spans, strict=True)]
    first, last = x.shape[:2], x.shape[-1]
    return lax.slice(x, (0, 0, *start, 0), (*first, *stop, last), (1, 1, *steps, 1))


def _pad(x: Any, space: Sequence[tuple[int, int, int]]) -> Any:
    none = (0, 0, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), (none, none, *space, none))


def _padded(conv: _Conv, x: Any) -> Any:
    return _pad(x, [(a, b, d - 1) for (a, b), d in zip(conv.padding, conv.spread, strict=True)])


def _joined(slices: list[Any]) -> Any:
    return jnp.concatenate(slices, -1) if len(slices) > 1 else slices[0]


# --- The order of dimensions ------------------------------------------------------------------


def _read(params: dict[str, Any], lhs: Any, rhs: Any) -> _Conv | None:
    names = params["dimension_numbers"]
    batch, feature, *space = names.lhs_spec
    out, into, *window = names.rhs_spec
    by_batch, by_feature = params["batch_group_count"], params["feature_group_count"]
    groups = by_batch * by_feature  # at most one of the two is not 1
    x = jnp.transpose(lhs, (batch, *space, feature))
    n, *size, c = x.shape
    x = x.reshape(by_batch, n // by_batch, *size, by_feature, c // by_feature)
    x = jnp.moveaxis(x, -2, 1).reshape(groups, n // by_batch, *size, c // by_feature)
    kernel = jnp.transpose(rhs, (*window, into, out))
    *taps, i, o = kernel.shape
    kernel = jnp.moveaxis(kernel.reshape(*taps, i, groups, o // groups), -2, 0)
    conv = _Conv(
        x,
        kernel,
        _places(params, tuple(size), tuple(taps)),
        tuple(params["window_strides"]),
        tuple(params["padding"]),
        tuple(params["lhs_dilation"]),
        tuple(params["rhs_dilation"]),
        params["preferred_element_type"] or lhs.dtype,
        params["precision"],
    )
    return conv if math.prod((*x.shape, *kernel.shape, *conv.places)) else None


def _places(params: dict[str, Any], size: Sizes, taps: Sizes) -> Sizes:
    places = []
    for n, k, stride, (low, high), spread, gap in zip(
        size,
        taps,
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    ):
        free = low + (n - 1) * spread + 1 + high - ((k - 1) * gap + 1)
        places.append(max(0, free // stride + 1))
    return tuple(places)


def _write(conv: _Conv, params: dict[str, Any], out: Any) -> Any:
    """(group, batch, *space, feature) in the order that was asked for."""
    batch, feature, *space = params["dimension_numbers"].out_spec
    out = jnp.moveaxis(out.astype(conv.dtype), 0, -2)
    out = out.reshape(*out.shape[:-2], -1)
    order = [0] * out.ndim
    for mine, theirs in enumerate((batch, *space, feature)):
        order[theirs] = mine
    return jnp.transpose(out, order)


def _accumulator(dtype: Any) -> Any:
    # What is added up after the product must not be rounded to half precision each time.
    return jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype
