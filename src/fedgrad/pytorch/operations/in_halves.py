"""Operations of PyTorch on whole numbers of 64 bits, where JAX has 32 (long.py): those that make a
`Long`, those that take one, and those that are refused."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.pytorch.operations.long import (
    LEAST,
    MOST,
    Long,
    cumsum,
    divided,
    long,
    power,
    reduced,
    where,
)


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


def _power(x: Any, exponent: Any) -> Long:
    if not isinstance(exponent, int):
        raise NotImplementedError(_WIDER)
    return power(x, exponent)


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
    "cumsum": cumsum,
    "div": _divide,
    "floor_divide": _divide,
    "mul": lambda x, y: long(x) * y,
    "neg": lambda x: -long(x),
    "pow": _power,
    "prod": reduced(operator.mul, 1),
    "rsub": lambda x, y, alpha=1: long(y) - long(x) * alpha,
    "square": lambda x: long(x) * x,
    "sub": lambda x, y, alpha=1: long(x) - long(y) * alpha,
    "sum": reduced(operator.add, 0),
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
_MOVES = """
    _unsafe_view alias cat clone detach expand flip gather index index_select permute repeat
    repeat_interleave roll select slice split split_with_sizes squeeze stack t tile transpose tril
    triu unbind unsqueeze view
"""

# What is given places in a table, or looks at a shape alone.
_PLACES = """
    embedding embedding_bag empty_like full_like new_empty new_full new_ones new_zeros
    nll_loss2d_forward nll_loss_forward one_hot ones_like sym_size zeros_like
"""

# What makes whole numbers that fit 32 bits, of sizes, of numbers that are written down, or of
# others that fit.
_SMALL = """
    amax amin arange argmax argmin argsort ceil copy empty eye fill floor full linspace max min
    ones pad relu round scalar_tensor select_scatter slice_scatter trunc zeros
"""

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
        leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_long)
        given = any(map(_is_long, leaves))
        if is_long and called in GROWS and (given or not _stays(called, args, leaves)):
            return GROWS[called](*args, **kwargs)
        if called in KEEPS and (given or any(map(_large, leaves))) and all(map(_whole, leaves)):
            return KEEPS[called](*args, **kwargs)
        if not given:
            too_large = called not in MOVES and any(map(_large, leaves))
            if is_long and (called not in _KNOWN or too_large):
                raise NotImplementedError(_WIDER)
            return fun(*args, **kwargs)
        if called in MOVES:
            return _move_halves(fun, *args, **kwargs)
        if called in PLACES:
            args, kwargs = _with((args, kwargs), Long.place)
            return fun(*args, **kwargs)
        if is_long or dtype is None:
            raise NotImplementedError(_WIDER)
        floats = next((x.dtype for x in leaves if _inexact(x)), jnp.float32)
        kind = floats if called in COMPARES else dtype
        args, kwargs = _with((args, kwargs), lambda x: x.astype(kind))
        return fun(*args, **kwargs)

    return call


MOVES, PLACES, SMALL = (names.split() for names in (_MOVES, _PLACES, _SMALL))
COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
_KNOWN = {*GROWS, *KEEPS, *MOVES, *PLACES, *SMALL}


def _large(leaf: Any) -> bool:
    return isinstance(leaf, int | float) and not LEAST <= leaf <= MOST


def _whole(leaf: Any) -> bool:
    return isinstance(leaf, int | Long) or not (isinstance(leaf, float) or _inexact(leaf))


def _inexact(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _stays(called: str, args: tuple[Any, ...], leaves: list[Any]) -> bool:
    """Whether an operation that may leave 32 bits does not, of numbers that have fewer."""
    if called in ("sum", "cumsum", "prod"):
        return bool(args[0].dtype == jnp.bool_)
    if called in ("div", "floor_divide"):
        return _small(args[1]) and args[1] != -1
    if called in ("_to_copy", "type_as"):
        return not _inexact(args[0]) and args[0].dtype != jnp.uint32
    return called in ("add", "sub", "rsub", "mul", "neg", "abs") and all(map(_short, leaves))


def _short(number: Any) -> bool:
    """Whether it has 15 bits: products of two have 32."""
    if isinstance(number, int):
        return abs(number) < 2**15
    return number.dtype in (jnp.bool_, jnp.int8, jnp.uint8)


def _is_long(leaf: Any) -> bool:
    return isinstance(leaf, Long)


def _with(tree: Any, to: Callable[[Long], Any]) -> Any:
    return jax.tree.map(
        lambda leaf: to(leaf) if _is_long(leaf) else leaf,
        tree,
        is_leaf=lambda leaf: leaf is None or _is_long(leaf),
    )


def _move_halves(fun: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
    """Move each half alike if the first argument has halves; the other arguments are indices."""
    args, kwargs = _with((args, kwargs), Long.place)
    numbers = first if isinstance(first, list) else [first]
    if not any(map(_is_long, numbers)):
        return fun(first, *args, **kwargs)
    numbers = [long(x) for x in numbers]

    def half(name: str) -> Any:
        halves = [getattr(x, name) for x in numbers]
        return fun(halves if isinstance(first, list) else halves[0], *args, **kwargs)

    return jax.tree.map(Long, half("high"), half("low"))
