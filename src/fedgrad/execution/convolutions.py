"""Convolutions as matrix products.

XLA on CPU is slow for a convolution inside a loop (jax-ml/jax#12868), including the grouped
convolution that results from vectorizing clients with their own kernels. Client stages are loops,
so there a convolution is computed as one matrix product over shifted slices, in one of three ways:

- by window: each tap of a small kernel is one slice of the image;
- by output: each position of a small output is one slice; also for the gradient with respect to a
  kernel;
- by sum: the product comes first and is then added up at its output positions; also for the
  gradient with respect to the image, even of a strided convolution, without multiplying the zeros
  between the strides.
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

from fedgrad.core.evaluate import Rules
from fedgrad.core.primitives import jax_primitives, wide

MAX_SLICES = 128  # the speedup shrinks with their number: 10x for 3 x 3, 1.8x for 11 x 11
MOVE = 32  # estimate: multiplications that take as long as writing and reading a number

Sizes = tuple[int, ...]


def default_rules() -> Rules:
    """Return the rules that make convolutions fast on this backend; none where XLA's own are
    fast."""
    if jax.default_backend() != "cpu":
        return {}
    return {jax_primitives.conv_general_dilated_p: as_matmul}


def as_matmul(eqn: Any, inputs: Sequence[Any]) -> list[Any] | None:
    """Apply the rule for `lax.conv_general_dilated`; return None where it needs too many slices."""
    conv = _read(eqn.params, *inputs)
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
    return [_write(conv, eqn.params, out)]


@dataclass(frozen=True)
class _Conv:
    """A convolution with its dimensions in a fixed order; groups, of batch or features, come
    first."""

    x: Any  # (*group, batch, *space, feature)
    kernel: Any  # (*group, *window, feature, out feature)
    groups: Sizes  # () for a single group: XLA would not detect equal slices with a dimension of 1
    places: Sizes  # spatial shape of the output
    strides: Sizes
    padding: tuple[tuple[int, int], ...]
    spread: Sizes  # dilation of x
    gaps: Sizes  # dilation of the kernel
    dtype: Any
    precision: Any

    @property
    def space(self) -> Sizes:
        return tuple(self.x.shape[len(self.groups) + 1 : -1])

    @property
    def window(self) -> Sizes:
        return tuple(self.kernel.shape[len(self.groups) : -2])

    def dot(self, a: Any, b: Any, contract: tuple[Sizes, Sizes]) -> Any:
        group = tuple(range(len(self.groups)))
        return lax.dot_general(
            a,
            b,
            (contract, (group, group)),
            precision=self.precision,
            preferred_element_type=wide(self.dtype),
        )

    def slice(self, x: Any, start: Sizes, counts: Sizes, steps: Sizes) -> Any:
        """Take `counts` positions, `steps` apart, of each spatial dimension of (*group, any,
        *space, any)."""
        stop = [a + (n - 1) * s + 1 for a, n, s in zip(start, counts, steps, strict=True)]
        before, last = x.shape[: -len(start) - 1], x.shape[-1]
        zeros, ones = (0,) * len(before), (1,) * len(before)
        return lax.slice(x, (*zeros, *start, 0), (*before, *stop, last), (*ones, *steps, 1))

    def padded(self, x: Any) -> Any:
        return _pad(x, [(a, b, d - 1) for (a, b), d in zip(self.padding, self.spread, strict=True)])


def _by_window(conv: _Conv) -> Any:
    """Compute (taps of) x @ kernel, contracting over (tap, feature)."""
    x = conv.padded(conv.x)
    taps = [
        conv.slice(x, at, conv.places, conv.strides) for at in _positions(conv.window, conv.gaps)
    ]
    kernel = conv.kernel.reshape(*conv.groups, -1, conv.kernel.shape[-1])
    return conv.dot(_joined(taps), kernel, ((x.ndim - 1,), (len(conv.groups),)))


def _by_output(conv: _Conv) -> Any:
    """Compute (positions of) x^T @ kernel, contracting over (feature, window)."""
    # Feature first and batch last: for the gradient with respect to a kernel, this is the order of
    # the image in the convolution itself, so XLA detects that both use the same slices.
    first = len(conv.groups)
    x = conv.padded(jnp.swapaxes(conv.x, first, -1))
    places = [
        conv.slice(x, at, conv.window, conv.gaps) for at in _positions(conv.places, conv.strides)
    ]
    inner = tuple(range(first, x.ndim - 1))
    out = conv.dot(_joined(places), jnp.moveaxis(conv.kernel, -2, first), (inner, inner))
    out = out.reshape(*conv.groups, *conv.places, x.shape[-1], out.shape[-1])
    return jnp.moveaxis(out, -2, first)


def _by_sum(conv: _Conv) -> Any:
    """Sum over taps of shifted (x @ kernel), contracting over the feature only."""
    first, last, outs = len(conv.groups), conv.x.ndim - 1, conv.kernel.shape[-1]
    kernel = jnp.moveaxis(conv.kernel, -2, first)
    kernel = kernel.reshape(*conv.groups, conv.x.shape[-1], -1)
    products = conv.dot(conv.x, kernel, ((last,), (first,)))
    spans = [(n - 1) * s + 1 for n, s in zip(conv.places, conv.strides, strict=True)]

    def shifted(tap: int, at: Sizes) -> Any:
        moves = []
        for (low, _), shift, n, d, span in zip(
            conv.padding, at, conv.space, conv.spread, spans, strict=True
        ):
            before = low - shift
            moves.append((before, span - before - ((n - 1) * d + 1), d - 1))
        mine = lax.slice_in_dim(products, tap * outs, (tap + 1) * outs, axis=last)
        return conv.slice(_pad(mine, moves), (0,) * len(at), conv.places, conv.strides)

    taps = enumerate(_positions(conv.window, conv.gaps))
    return functools.reduce(operator.add, [shifted(tap, at) for tap, at in taps])


def _sum_is_cheaper(conv: _Conv) -> bool:
    features, outs = conv.kernel.shape[-2:]
    by_sum = math.prod(conv.space) * outs * (features + MOVE)
    by_window = math.prod(conv.places) * features * (outs + MOVE)
    return by_sum < by_window


def _positions(sizes: Sizes, steps: Sizes) -> Iterator[Sizes]:
    for index in itertools.product(*map(range, sizes)):
        yield tuple(i * s for i, s in zip(index, steps, strict=True))


def _pad(x: Any, space: Sequence[tuple[int, int, int]]) -> Any:
    none = [(0, 0, 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), [*none * (x.ndim - len(space) - 1), *space, *none])


def _joined(slices: list[Any]) -> Any:
    return jnp.concatenate(slices, -1) if len(slices) > 1 else slices[0]


# --- The order of dimensions ------------------------------------------------------------------


def _read(params: dict[str, Any], lhs: Any, rhs: Any) -> _Conv | None:
    names = params["dimension_numbers"]
    batch, feature, *space = names.lhs_spec
    out, into, *window = names.rhs_spec
    by_batch, by_feature = params["batch_group_count"], params["feature_group_count"]
    x = jnp.transpose(lhs, (batch, *space, feature))
    kernel = jnp.transpose(rhs, (*window, into, out))
    places = _places(params, x.shape[1:-1], kernel.shape[:-2])
    if not math.prod((*x.shape, *kernel.shape, *places)):
        return None
    groups = () if by_batch * by_feature == 1 else (by_batch * by_feature,)
    if groups:  # at most one of the two exceeds 1
        kernel = _split(kernel, kernel.ndim - 1, groups[0])
        x = _split(x, 0, by_batch) if by_batch > 1 else _split(x, x.ndim - 1, by_feature)
    return _Conv(
        x,
        kernel,
        groups,
        places,
        tuple(params["window_strides"]),
        tuple(params["padding"]),
        tuple(params["lhs_dilation"]),
        tuple(params["rhs_dilation"]),
        params["preferred_element_type"] or lhs.dtype,
        params["precision"],
    )


def _split(x: Any, axis: int, groups: int) -> Any:
    shape = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


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
    """Transpose (*group, batch, *space, feature) to the requested order."""
    batch, feature, *space = params["dimension_numbers"].out_spec
    out = out.astype(conv.dtype)
    if conv.groups:
        out = jnp.moveaxis(out, 0, -2)
        out = out.reshape(*out.shape[:-2], -1)
    order = [0] * out.ndim
    for mine, theirs in enumerate((batch, *space, feature)):
        order[theirs] = mine
    return jnp.transpose(out, order)
