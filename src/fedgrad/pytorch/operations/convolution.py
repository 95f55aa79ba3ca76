"""Convolutions as `lax.conv_general_dilated`, for which the executors have a fast rule."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

Sizes = int | Sequence[int]


def each(value: Sizes, axes: int) -> tuple[int, ...]:
    """Return one number per axis; a single number is repeated."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * axes if len(given) == 1 else given


def _conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Any:
    axes = weight.ndim - 2
    gaps = each(dilation, axes)
    if padding == "same":
        spans = [d * (k - 1) for d, k in zip(gaps, weight.shape[2:], strict=True)]
        edges = [(span // 2, span - span // 2) for span in spans]
    else:
        edges = [(p, p) for p in each(0 if isinstance(padding, str) else padding, axes)]
    if x.ndim == axes + 1:  # a single image without a batch axis
        return _conv(x[None], weight, bias, stride, padding, dilation, groups)[0]
    out = lax.conv_general_dilated(
        x,
        weight,
        each(stride, axes),
        edges,
        rhs_dilation=gaps,
        feature_group_count=groups,
    )
    return _shifted(out, bias)


def _transposed(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Any:
    """Compute a transposed convolution, the derivative of a convolution with respect to its image,
    as a convolution."""
    axes = weight.ndim - 2
    gaps = each(dilation, axes)
    edges = [
        (d * (k - 1) - p, d * (k - 1) - p + more)
        for d, k, p, more in zip(
            gaps, weight.shape[2:], each(padding, axes), each(output_padding, axes), strict=True
        )
    ]
    inputs, outs, *window = weight.shape
    kernel = weight.reshape(groups, inputs // groups, outs, *window).swapaxes(1, 2)
    kernel = kernel.reshape(groups * outs, inputs // groups, *window)
    out = lax.conv_general_dilated(
        x,
        lax.rev(kernel, tuple(range(2, kernel.ndim))),
        (1,) * axes,
        edges,
        lhs_dilation=each(stride, axes),
        rhs_dilation=gaps,
        feature_group_count=groups,
    )
    return _shifted(out, bias)


def _shifted(x: Any, bias: Any) -> Any:
    return x if bias is None else x + bias.reshape(-1, *[1] * (x.ndim - 2))


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{f"conv{n}d.{kind}": _conv for n in (1, 2, 3) for kind in ("default", "padding")},
    "conv_transpose1d.default": _transposed,
    "conv_transpose2d.input": _transposed,
    "conv_transpose3d.input": _transposed,
}
