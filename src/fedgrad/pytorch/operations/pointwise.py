"""Elementwise operations. Derivatives at kinks are PyTorch's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x + (y if alpha == 1 else alpha * y)


def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x - (y if alpha == 1 else alpha * y)


def whole(x: Any) -> bool:
    """Return whether these are whole numbers; booleans are not."""
    return jnp.issubdtype(jnp.result_type(x), jnp.integer)


def _divided(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Whole numbers, divided by zero, are the least there is (of unsigned ones the largest): they
    have no NaN, and PyTorch raises."""

    def divided(x: Any, y: Any) -> Any:
        result = fun(x, y)
        if not whole(result):
            return result
        if isinstance(y, int) and y == 0:
            raise ZeroDivisionError("whole numbers, divided by 0")
        limits = jnp.iinfo(result.dtype)
        return jnp.where(y == 0, limits.min or limits.max, result)

    return divided


@_divided
def _truncated(x: Any, y: Any) -> Any:
    dtype = jnp.result_type(x, y)
    if not jnp.issubdtype(dtype, jnp.integer):
        return jnp.trunc(x / y)
    return jax.lax.div(*jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype)))


_floor_divide = _divided(jnp.floor_divide)
_ROUNDED = {None: jnp.true_divide, "floor": _floor_divide, "trunc": _truncated}


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    return _ROUNDED[rounding_mode](x, y)


def _power(x: Any, exponent: Any) -> Any:
    # An integer exponent is a product, whose derivatives exist at zero and below.
    if isinstance(exponent, float) and exponent.is_integer():
        exponent = int(exponent)
    return x**exponent


def _left(x: Any, by: Any) -> Any:
    """Zero where it is shifted by as many bits as there are, or by less than none."""
    return jnp.where(_within(x, by), jnp.left_shift(x, by), 0)


def _right(x: Any, by: Any) -> Any:
    """Shift right; a negative number is filled with ones."""
    most = jnp.iinfo(x.dtype).bits - 1
    found = jnp.right_shift(x, jnp.where(_within(x, by), by, most).astype(x.dtype))
    return jnp.where(_within(x, by) | (x < 0), found, 0)


def _within(x: Any, by: Any) -> Any:
    return (by >= 0) & (by < jnp.iinfo(x.dtype).bits)


def _gelu(x: Any, approximate: str = "none") -> Any:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    return jnp.where(x > 0, x, x * negative_slope)


def _prelu(x: Any, weight: Any) -> Any:
    if weight.size > 1 and weight.ndim == 1:  # one per channel
        weight = weight.reshape(-1, *[1] * (x.ndim - 2))
    return jnp.where(x > 0, x, x * weight)


def absolute(x: Any) -> Any:
    """Return the absolute value, with derivative 0 at 0."""
    if jnp.iscomplexobj(x):
        zero = x == 0
        return jnp.where(zero, 0, jnp.abs(jnp.where(zero, 1, x)))
    return x * jax.lax.stop_gradient(jnp.sign(x))


def _sgn(x: Any) -> Any:
    """The direction of a complex number, which has a derivative; the sign of a real one."""
    if not jnp.iscomplexobj(x):
        return jnp.sign(x)
    zero = x == 0
    other = jnp.where(zero, 1, x)
    return jnp.where(zero, 0, other / absolute(other))


def _angle(x: Any) -> Any:
    """Return the angle: 0 or pi of a real number. Its derivative is 0 there, and at a complex 0."""
    if not jnp.iscomplexobj(x):
        return jnp.where(x < 0, jnp.pi, jnp.where(x != x, x, 0 * jax.lax.stop_gradient(x)))
    zero = x == 0
    return jnp.where(zero, 0, jnp.angle(jnp.where(zero, 1, x)))


def _elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    below = jnp.expm1(jnp.where(x > 0, 0, x) * input_scale) * alpha
    return jnp.where(x > 0, x, below) * scale


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    """Clip with derivative 0 at both ends, unlike `_clamp`."""
    return jnp.where(x <= min_val, min_val, jnp.where(x >= max_val, max_val, x))


def _glu(x: Any, dim: int = -1) -> Any:
    a, b = jnp.split(x, 2, dim)
    return a * jax.nn.sigmoid(b)


def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


def _nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


def _to(x: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
    # A tensor may be passed to give only a dtype (`x.type_as(other)`).
    dtype = getattr(dtype, "dtype", dtype)
    return x if dtype is None else x.astype(dtype)


_UNARY: dict[str, Callable[..., Any]] = {
    "abs": absolute,
    "_conj": jnp.conj,
    "_neg_view": jnp.negative,
    "acos": jnp.arccos,
    "angle": _angle,
    "asin": jnp.arcsin,
    "atan": jnp.arctan,
    "bitwise_not": jnp.invert,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "erf": jax.scipy.special.erf,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "gelu": _gelu,
    "glu": _glu,
    "hardsigmoid": lambda x: _hardtanh(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * _hardtanh(x + 3, 0, 6) / 6,
    "hardtanh": _hardtanh,
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "leaky_relu": _leaky_relu,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "log_sigmoid": jax.nn.log_sigmoid,
    "logical_not": jnp.logical_not,
    "mish": jax.nn.mish,
    "neg": jnp.negative,
    "reciprocal": lambda x: 1 / x,
    "relu": jax.nn.relu,
    "relu6": lambda x: _hardtanh(x, 0, 6),
    "round": jnp.round,
    "rsqrt": jax.lax.rsqrt,
    "sgn": _sgn,
    "selu": lambda x: _elu(x, 1.6732632423543772, 1.0507009873554805),
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "softplus": _softplus,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "threshold": lambda x, threshold, value: jnp.where(x > threshold, x, value),
    "trunc": jnp.trunc,
    # Operations that concern only memory or gradients.
    "alias": lambda x: x,
    "clone": lambda x, memory_format=None: x,
    "detach": jax.lax.stop_gradient,
    "elu": _elu,
    "celu": lambda x, alpha=1.0: _elu(x, alpha, 1.0, 1 / alpha),
    "prelu": _prelu,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "_to_copy": _to,
    "addcdiv": lambda x, a, b, value=1: x + value * a / b,
    "addcmul": lambda x, a, b, value=1: x + value * a * b,
    "atan2": jnp.arctan2,
    "complex": jax.lax.complex,
    "floor_divide": _floor_divide,
    "logaddexp": jnp.logaddexp,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "nan_to_num": _nan_to_num,
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
}

_BINARY: dict[str, Callable[..., Any]] = {
    "__lshift__": _left,
    "__rshift__": _right,
    "add": _add,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "rsub": lambda x, y, alpha=1: _sub(y, x, alpha),
    "mul": jnp.multiply,
    "div": _divide,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "lerp": lambda x, y, weight: x + weight * (y - x),
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "remainder": _divided(jnp.remainder),
    "fmod": _divided(jnp.fmod),
    "masked_fill": _masked_fill,
}

_OF_TENSORS: dict[str, Callable[..., Any]] = {
    "__and__": jnp.bitwise_and,
    "__or__": jnp.bitwise_or,
    "__xor__": jnp.bitwise_xor,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "sub": _sub,
}

OPERATIONS: dict[str, Callable[..., Any]] = {
    **{f"{name}.default": fun for name, fun in _UNARY.items()},
    **{f"{name}.{kind}": fun for name, fun in _BINARY.items() for kind in ("Tensor", "Scalar")},
    **{f"{name}.Tensor": fun for name, fun in _OF_TENSORS.items()},
    "div.Tensor_mode": _divide,
    "max.other": jnp.maximum,
    "min.other": jnp.minimum,
    "pow.Tensor_Scalar": _power,
    "pow.Tensor_Tensor": _power,
    "pow.Scalar": _power,
    "where.self": jnp.where,
    "where.Scalar": jnp.where,
    "where.ScalarOther": jnp.where,
    "where.ScalarSelf": jnp.where,
    "remainder.Scalar_Tensor": _divided(jnp.remainder),
    "type_as.default": _to,
    "view_as_complex.default": lambda x: jax.lax.complex(x[..., 0], x[..., 1]),
    "view_as_real.default": lambda x: jnp.stack([x.real, x.imag], -1),
}

# What has one dtype for all of its arguments: that of its result, where that is a float.
PROMOTED = OPERATIONS.keys() - {
    *("_to_copy.default", "type_as.default", "where.self", "where.Scalar", "where.ScalarOther"),
    *("where.ScalarSelf", "masked_fill.Tensor", "masked_fill.Scalar"),
    *("abs.default", "angle.default", "complex.default", "view_as_complex.default"),
    "view_as_real.default",
}
