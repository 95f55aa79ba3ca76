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
        signed = lambda by: lax.shift_right_arithmetic(
            *jnp.broadcast_arrays(self.high, _signed(by))
        )
        moved = _right(self.low, by) | _left(_bits(self.high), HALF - by)
        low = jnp.where(by < HALF, moved, _bits(signed(by - HALF)))
        return Long(signed(jnp.minimum(by, HALF - 1)), low)

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
        high, low = np.asarray(wide >> HALF, np.int32), np.asarray(wide & 0xFFFFFFFF, np.uint32)
        return Long(jnp.asarray(high), jnp.asarray(low))
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

    halves = lambda found: [(n.high, n.low) for n in found]
    nothing = _each(jnp.zeros_like, x)
    run = lambda i, found: halves(step(i, (Long(*found[0]), Long(*found[1]))))
    quotient, rest = lax.fori_loop(0, 2 * HALF, run, halves((nothing, nothing)))
    opposite = x.negative != y.negative
    quotient, rest = Long(*quotient), Long(*rest)
    quotient = where(opposite, -quotient, quotient)
    rest = where(x.negative, -rest, rest)
    if floor:
        down = opposite & rest.astype(jnp.bool_)
        quotient, rest = where(down, quotient - 1, quotient), where(down, rest + y, rest)
    none = ~y.astype(jnp.bool_)
    return where(none, _NONE, quotient), where(none, _NONE, rest)


def _below(x: Long, y: Long) -> Any:
    """Of sizes: 2^63 is the largest, and no negative number."""
    high = _bits(x.high), _bits(y.high)
    return (high[0] < high[1]) | ((high[0] == high[1]) & (x.low < y.low))


def _power(x: Any, exponent: Any) -> Long:
    if not isinstance(exponent, int):
        raise NotImplementedError(_WIDER)
    base = long(x)
    found = base * 0 + 1
    for digit in reversed(f"{exponent:b}"):
        found, base = found * base if digit == "1" else found, base * base
    return found


def _added_up(fun: Callable[[Long, Long], Long], start: int) -> Callable[..., Any]:
    """The sum or product along some axes."""

    def reduced(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Long:
        x = long(x)
        dims = range(x.ndim) if dim in (None, [], ()) else [dim] if isinstance(dim, int) else dim
        axes = tuple(sorted(d % x.ndim for d in dims))
        one = long(start)
        high, low = lax.reduce(
            (x.high, x.low),
            (jnp.asarray(one.high), jnp.asarray(one.low)),
            lambda a, b: _halves(fun(Long(*a), Long(*b))),
            axes,
        )
        found = Long(high, low)
        return _each(lambda half: jnp.expand_dims(half, axes), found) if keepdim else found

    return reduced


def _halves(x: Long) -> tuple[Any, Any]:
    return x.high, x.low


def _cumsum(x: Any, dim: int, dtype: Any = None) -> Long:
    x = long(x)
    both = lambda a, b: _halves(Long(*a) + Long(*b))
    return Long(*lax.associative_scan(both, _halves(x), axis=dim % x.ndim))


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else where(long(x).less(min), min, x)
    x = long(x if max is None else where(long(max).less(x), max, x))
    return x.place() if _small(min) and _small(max) else x


def _remainder(floor: bool) -> Callable[..., Any]:
    """Less than what it is divided by: it fits if that does."""

    def remainder(x: Any, y: Any) -> Any:
        (_, found) = divided(x, y, floor)
        return found.place() if _small(y) else found

    return remainder


def _and(x: Any, y: Any) -> Any:
    found = long(x) & y
    return found.place() if _small(y) and y >= 0 else found


def _small(number: Any) -> bool:
    """Whether it is a number that is written down and fits 32 bits."""
    return isinstance(number, int) and LEAST <= number <= MOST


def _sign(x: Any) -> Long:
    return where(x.negative, -1, where(x.astype(jnp.bool_), 1, 0))


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Long:
    return divided(x, y, rounding_mode != "trunc")[0]


# What may leave 32 bits, whatever it is given.
GROWS: dict[str, Callable[..., Any]] = {
    "__lshift__": lambda x, by: long(x) << by,
    "_to_copy": lambda x, *_, **__: long(x),
    "abs": lambda x: abs(long(x)),
    "add": lambda x, y, alpha=1: long(x) + long(y) * alpha,
    "cumsum": _cumsum,
    "div": _divide,
    "floor_divide": _divide,
    "mul": lambda x, y: long(x) * y,
    "neg": lambda x: -long(x),
    "pow": _power,
    "prod": _added_up(operator.mul, 1),
    "rsub": lambda x, y, alpha=1: long(y) - long(x) * alpha,
    "square": lambda x: long(x) * x,
    "sub": lambda x, y, alpha=1: long(x) - long(y) * alpha,
    "sum": _added_up(operator.add, 0),
    "type_as": lambda x, _: long(x),
}

# What stays within 32 bits if what it is given does.
KEEPS: dict[str, Callable[..., Any]] = {
    "__and__": _and,
    "__or__": lambda x, y: long(x) | y,
    "__rshift__": lambda x, by: long(x) >> by,
    "__xor__": lambda x, y: long(x) ^ y,
    "bitwise_and": _and,
    "bitwise_not": lambda x: ~long(x),
    "bitwise_or": lambda x, y: long(x) | y,
    "bitwise_xor": lambda x, y: long(x) ^ y,
    "clamp": _clamp,
    "clamp_max": lambda x, max: _clamp(x, None, max),
    "clamp_min": _clamp,
    "eq": lambda x, y: long(x).equals(y),
    "fmod": _remainder(floor=False),
    "ge": lambda x, y: ~long(x).less(y),
    "gt": lambda x, y: long(y).less(x),
    "le": lambda x, y: ~long(y).less(x),
    "lt": lambda x, y: long(x).less(y),
    "masked_fill": lambda x, mask, value: where(mask, value, x),
    "maximum": lambda x, y: _clamp(x, y),
    "minimum": lambda x, y: _clamp(x, None, y),
    "ne": lambda x, y: ~long(x).equals(y),
    "remainder": _remainder(floor=True),
    "sgn": _sign,
    "sign": _sign,
    "where": where,
}

# What moves numbers and leaves them as they are: its first argument by halves.
MOVES = set(
    """
    _unsafe_view alias cat clone detach expand flip gather index index_select permute repeat
    repeat_interleave roll select slice split split_with_sizes squeeze stack t tile transpose tril
    triu unbind unsqueeze view
    """.split()
)

# What is given places in a table, or looks at a shape alone.
PLACES = set(
    """
    embedding embedding_bag empty_like full_like new_empty new_full new_ones new_zeros
    nll_loss2d_forward nll_loss_forward one_hot ones_like sym_size zeros_like
    """.split()
)

# What makes whole numbers that fit 32 bits, of sizes, of numbers that are written down, or of
# others that fit.
SMALL = set(
    """
    amax amin arange argmax argmin argsort ceil copy empty eye fill floor full linspace max min
    ones pad relu round scalar_tensor select_scatter slice_scatter trunc zeros
    """.split()
)

_WIDER = (
    "its whole numbers have 64 bits (PyTorch's int64), where JAX has 32. Switch them on before "
    "anything else, jax.config.update('jax_enable_x64', True), or compute with 32 bits in PyTorch, "
    "too, x.int()"
)


def in_halves(name: str, fun: Callable[..., Any], dtype: Any, is_long: bool) -> Callable[..., Any]:
    """An operation of PyTorch that takes Longs, too, and makes them where its result is an int64
    (`is_long`) that may not fit; `dtype` is JAX's of the result, None if that is not one array."""
    called = name.removeprefix("aten.").partition(".")[0]

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        given = any(isinstance(leaf, Long) for leaf in leaves)
        if is_long and called in GROWS and (given or not _stays(called, args)):
            return GROWS[called](*args, **kwargs)
        if called in KEEPS and (given or any(map(_large, leaves))) and all(map(_whole, leaves)):
            return KEEPS[called](*args, **kwargs)
        if not given:
            known = called in {*GROWS, *KEEPS, *MOVES, *PLACES, *SMALL}
            if is_long and (not known or (called not in MOVES and any(map(_large, leaves)))):
                raise NotImplementedError(_WIDER)
            return fun(*args, **kwargs)
        if called in MOVES:
            return _moved(fun, *args, **kwargs)
        if called in PLACES:
            to: Callable[[Long], Any] = Long.place
        elif is_long or dtype is None:
            raise NotImplementedError(_WIDER)
        else:
            kind = next((x.dtype for x in leaves if _inexact(x)), jnp.float32)
            to = lambda x: x.astype(kind if called in COMPARES else dtype)
        return fun(*_with(args, to), **_with(kwargs, to))

    return call


COMPARES = set("eq ne lt le gt ge".split())


def _large(leaf: Any) -> bool:
    return isinstance(leaf, int | float) and not LEAST <= leaf <= MOST


def _whole(leaf: Any) -> bool:
    return isinstance(leaf, int | Long) or not (isinstance(leaf, float) or _inexact(leaf))


def _inexact(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _stays(called: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation that may leave 32 bits does not, of numbers that have fewer."""
    if called in ("sum", "cumsum", "prod"):
        return bool(args[0].dtype == jnp.bool_)
    if called in ("div", "floor_divide"):
        return _small(args[1]) and args[1] != -1
    if called in ("_to_copy", "type_as"):
        return not _inexact(args[0]) and args[0].dtype != jnp.uint32
    return called in ("add", "sub", "rsub", "mul", "neg", "abs") and all(map(_short, args))


def _short(number: Any) -> bool:
    """Whether it has 15 bits: products of two have 32."""
    if isinstance(number, int):
        return abs(number) < 2**15
    return number.dtype in (jnp.bool_, jnp.int8, jnp.uint8)


def _with(tree: Any, to: Callable[[Long], Any]) -> Any:
    return jax.tree.map(
        lambda leaf: to(leaf) if isinstance(leaf, Long) else leaf, tree, is_leaf=lambda x: x is None
    )


def _moved(fun: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
    """By halves, if it is the first argument that has them: the others are places."""
    args, kwargs = _with((args, kwargs), Long.place)
    if not any(isinstance(leaf, Long) for leaf in jax.tree.leaves(first)):
        return fun(first, *args, **kwargs)
    several = isinstance(first, list)
    numbers = [long(x) for x in first] if several else long(first)
    take = lambda half: [half(x) for x in numbers] if several else half(numbers)
    halves = [operator.attrgetter(name) for name in ("high", "low")]
    high, low = (fun(take(half), *args, **kwargs) for half in halves)
    return tuple(map(Long, high, low)) if isinstance(high, tuple) else Long(high, low)
