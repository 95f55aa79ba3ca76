"""Arrays of users that JAX would change in silence: masked ones, and numbers that do not fit 32
bits, where JAX computes with those. Rounding is not meant."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedgrad.core.errors import ArgumentError

MASKED = (
    "a masked array. JAX has no masks, and would read what is masked as if it were data. Fill it, "
    "x.filled(0), or drop its rows, x.data[~mask]."
)
_X64 = 'or compute with 64 bits: jax.config.update("jax_enable_x64", True).'
_NUMBERS = (np.ndarray, np.generic, float, int, complex)


def require_lossless(tree: Any, what: str) -> None:
    """Refuse arrays and numbers that JAX would change in silence."""
    if why := changed(tree):
        raise ArgumentError.here(f"{what}{why}")


def changed(tree: Any, into: Any = None) -> str:
    """Say which number JAX would change, where, and what to do; "" if none. `into`: the dtype that
    numbers get, if not that of JAX."""

    def judge(leaf: Any) -> str:
        if isinstance(leaf, np.ma.MaskedArray):
            return MASKED
        array = np.asarray(leaf)
        narrow = jax.dtypes.canonicalize_dtype(array.dtype) if into is None else into
        return "" if array.dtype == narrow else misfit(extremes(array), array.dtype, narrow)

    return _first(tree, judge)


def masked(tree: Any) -> str:
    """Say which array is masked, and what to do; "" if none is."""
    return _first(tree, lambda leaf: MASKED if isinstance(leaf, np.ma.MaskedArray) else "")


def extremes(x: np.ndarray) -> tuple[Any, Any]:
    """Return the least and the largest finite number of an array and zero."""
    if x.dtype.kind == "c":
        ends = [*extremes(x.real), *extremes(x.imag)]
        return min(ends), max(ends)
    low, high = x.min(initial=0), x.max(initial=0)
    if not np.isfinite(low) or not np.isfinite(high):
        finite = np.isfinite(x)
        low, high = x.min(where=finite, initial=0), x.max(where=finite, initial=0)
    return low.item(), high.item()


def misfit(numbers: tuple[Any, ...], dtype: np.dtype[Any], into: Any = None) -> str:
    """Say which of these numbers is another one in `into`, by default the dtype that JAX would give
    it; "" if none is."""
    narrow = jax.dtypes.canonicalize_dtype(dtype) if into is None else into
    for number in numbers:
        with np.errstate(over="ignore"):
            there = dtype.type(number).astype(narrow)
        if dtype.kind in "iu" and there != number:
            fix = "Use smaller numbers, such as np.unique(x, return_inverse=True)[1],"
        elif dtype.kind in "fc" and not np.isfinite(there):
            fix = "Scale it,"
        else:
            continue
        return f"{number} is {dtype}, and becomes {there} as {narrow} without x64. {fix} {_X64}"
    return ""


def _first(tree: Any, judge: Callable[[Any], str]) -> str:
    given = [x for x in jax.tree.leaves(tree) if isinstance(x, _NUMBERS)]
    if not any(map(judge, given)):
        return ""  # nearly always, and paths take time
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    reasons = ((path, judge(x)) for path, x in leaves if isinstance(x, _NUMBERS))
    return next(f"{place(path)}: {why}" for path, why in reasons if why)


def place(path: Any) -> str:
    """Say in which leaf of a tree something is."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return f" in {name!r}" if name else ""
