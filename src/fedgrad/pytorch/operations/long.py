"""Whole numbers of 64 bits, PyTorch's int64, where JAX has 32: two halves each.

Without `jax_enable_x64`, JAX computes an int64 of PyTorch as an int32. That is right for tokens and
for places, and wrong for what arithmetic may make of them: a hash of tokens would wrap. So whatever
may leave 32 bits is a `Long`, from the operation that makes it to the one that brings it back: a
remainder, a comparison, an index, a cast. Nothing here is used where JAX has 64 bits.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

HALF, LEAST, MOST = 32, -(2**31), 2**31 - 1  # bits of a half, and what fits one
_NONE = -(2**63)  # what there is no number for, as PyTorch has it of a NaN


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Long:
    """high * 2^32 + low. Arithmetic wraps at 64 bits, as PyTorch's."""

    high: Any  # int32
    low: Any  # uint32

    @property
    def shape(self) -> Any:
        return jnp.broadcast_shapes(jnp.shape(self.high), jnp.shape(self.low))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def negative(self) -> Any:
        return self.high < 0

    def __add__(self, other: Any) -> "Long":
        other = long(other)
        low = self.low + other.low
        return Long(self.high + other.high + (low < self.low).astype(jnp.int32), low)

    def __invert__(self) -> "Long":
        return Long(~self.high, ~self.low)

    def __neg__(self) -> "Long":
        return ~self + 1

    def __sub__(self, other: Any) -> "Long":
        return self + -long(other)

    def __mul__(self, other: Any) -> "Long":
        other = long(other)
        high, low = _product(self.low, other.low)
        crossed = _bits(self.high) * other.low + self.low * _bits(other.high)
        return Long(_signed(high + crossed), low)

    def __abs__(self) -> "Long":
        return where(self.negative, -self, self)

    def __lshift__(self, by: Any) -> "Long":
        """By 0 to 63 bits; by any other number it is 0."""
        by, high = _amount(by), _bits(self.high)
        moved = _left(high, by) | _right(self.low, HALF - by)
        return Long(
            _signed(jnp.where(by < HALF, moved, _left(self.low, by - HALF))), _left(self.low, by)
        )

    def __rshift__(self, by: Any) -> "Long":
        """The bits that come in are those of the sign."""
        by = jnp.minimum(_amount(by), 2 * HALF - 1)
        moved = _right(self.low, by) | _left(_bits(self.high), HALF - by)
        rest = _bits(_down(self.high, by - HALF))
        high = _down(self.high, jnp.minimum(by, HALF - 1))
        return Long(high, jnp.where(by < HALF, moved, rest))

    def __and__(self, other: Any) -> "Long":
        return _each(operator.and_, self, long(other))

    def __or__(self, other: Any) -> "Long":
        return _each(operator.or_, self, long(other))

    def __xor__(self, other: Any) -> "Long":
        return _each(operator.xor, self, long(other))

    def equals(self, other: Any) -> Any:
        other = long(other)
        return (self.high == other.high) & (self.low == other.low)

    def less(self, other: Any) -> Any:
        other = long(other)
        return (self.high < other.high) | ((self.high == other.high) & (self.low < other.low))

    def astype(self, dtype: Any) -> Any:
        """As numbers that JAX has; whole ones wrap."""
        if dtype == jnp.bool_:
            return (self.high != 0) | (self.low != 0)
        if jnp.issubdtype(dtype, jnp.integer):
            return _signed(self.low).astype(dtype)
        size = abs(self)  # so that a small number is no difference of two large ones
        wide = jnp.promote_types(dtype, jnp.float32)
        found = _bits(size.high).astype(wide) * 2.0**HALF + size.low.astype(wide)
        return jnp.where(self.negative, -found, found).astype(dtype)

    def place(self) -> Any:
        """As an int32; what does not fit is the least or the largest, where no table has a row."""
        fits = self.high == _signed(self.low) >> (HALF - 1)
        return jnp.where(fits, _signed(self.low), jnp.where(self.negative, LEAST, MOST))


def long(x: Any) -> Long:
    """The same numbers, as a Long: whole ones, booleans, floats without their fractions."""
    if isinstance(x, Long):
        return x
    if isinstance(x, int) or (isinstance(x, np.ndarray) and x.dtype == np.int64):
        wide = np.asarray(x, np.int64)
        halves = np.asarray(wide >> HALF, np.int32), np.asarray(wide & 0xFFFFFFFF, np.uint32)
        return Long(*map(jnp.asarray, halves))
    if jnp.issubdtype(x.dtype, jnp.floating):
        size = jnp.abs(jnp.trunc(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
        high = jnp.floor(size / 2.0**HALF)
        found = Long(high.astype(jnp.int32), (size - high * 2.0**HALF).astype(jnp.uint32))
        return where(size < 2.0**63, where(x < 0, -found, found), _NONE)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger) or x.dtype == jnp.bool_:
        return Long(jnp.zeros(x.shape, jnp.int32), x.astype(jnp.uint32))
    signed = x.astype(jnp.int32)
    return Long(signed >> (HALF - 1), _bits(signed))


def where(condition: Any, x: Any, y: Any) -> Long:
    return _each(functools.partial(jnp.where, condition), long(x), long(y))


def _bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _signed(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.int32)


def _each(fun: Callable[..., Any], *numbers: Long) -> Long:
    return Long(fun(*(n.high for n in numbers)), fun(*(n.low for n in numbers)))


def _amount(by: Any) -> Any:
    """As an unsigned number: one below 0 is large."""
    return jnp.asarray(by.astype(jnp.int32) if isinstance(by, Long) else by).astype(jnp.uint32)


def _left(x: Any, by: Any) -> Any:
    return lax.shift_left(*jnp.broadcast_arrays(x, by))  # which gives 0 by 32 or more


def _right(x: Any, by: Any) -> Any:
    return lax.shift_right_logical(*jnp.broadcast_arrays(x, by))


def _down(x: Any, by: Any) -> Any:
    return lax.shift_right_arithmetic(*jnp.broadcast_arrays(x, _signed(by)))


def _product(x: Any, y: Any) -> tuple[Any, Any]:
    """All 64 bits of the product of two uint32, by their halves."""
    low, high = lambda n: n & 0xFFFF, lambda n: n >> 16
    least = low(x) * low(y)
    middle = high(x) * low(y) + high(least)
    other = low(x) * high(y) + low(middle)
    return high(x) * high(y) + high(middle) + high(other), (other << 16) | low(least)


def divided(x: Any, y: Any, floor: bool) -> tuple[Long, Long]:
    """Quotient and remainder, of the quotient that is cut off or rounded down. Both are the least
    there is where the divisor is 0: PyTorch raises."""
    if isinstance(y, int) and y == 0:
        raise ZeroDivisionError("whole numbers, divided by 0")
    x, y = long(x), long(y)
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    x, y = (_each(lambda half: jnp.broadcast_to(half, shape), n) for n in (x, y))
    size, by = abs(x), abs(y)

    def step(i: Any, found: tuple[Long, Long]) -> tuple[Long, Long]:
        """One digit of the quotient, from the highest down."""
        quotient, rest = (number << 1 for number in found)
        rest = rest | ((size >> (2 * HALF - 1 - i)) & 1)
        fits = ~_below(rest, by)
        return quotient | long(fits), where(fits, rest - by, rest)

    nothing = _each(jnp.zeros_like, x)
    quotient, rest = lax.fori_loop(0, 2 * HALF, step, (nothing, nothing))
    opposite = x.negative != y.negative
    quotient = where(opposite, -quotient, quotient)
    rest = where(x.negative, -rest, rest)
    if floor:
        down = opposite & rest.astype(jnp.bool_)
        quotient, rest = where(down, quotient - 1, quotient), where(down, rest + y, rest)
    none = ~y.astype(jnp.bool_)
    return where(none, _NONE, quotient), where(none, _NONE, rest)


def _below(x: Long, y: Long) -> Any:
    """Return whether x < y as unsigned numbers, so that the size 2^63 is no negative number."""
    high = _bits(x.high), _bits(y.high)
    return (high[0] < high[1]) | ((high[0] == high[1]) & (x.low < y.low))


def reduced(fun: Callable[[Long, Long], Long], start: int) -> Callable[..., Long]:
    """The sum or the product along some axes, as PyTorch calls it."""

    def along(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Long:
        x = long(x)
        dims = range(x.ndim) if dim in (None, [], ()) else [dim] if isinstance(dim, int) else dim
        axes = tuple(sorted(d % x.ndim for d in dims))
        found = lax.reduce(x, long(start), fun, axes)
        return _each(lambda half: jnp.expand_dims(half, axes), found) if keepdim else found

    return along


def cumsum(x: Any, dim: int, dtype: Any = None) -> Long:
    x = long(x)
    found: Long = lax.associative_scan(operator.add, x, axis=dim % x.ndim)
    return found


def power(x: Any, exponent: int) -> Long:
    base = long(x)
    found = base * 0 + 1
    for digit in reversed(f"{exponent:b}"):
        found, base = found * base if digit == "1" else found, base * base
    return found
