"""Refuses users' arrays that JAX would silently change: masked arrays, and numbers that do not fit
into 32 bits if x64 is disabled. Rounding is allowed."""

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
    """Refuse arrays and numbers that JAX would silently change."""
    if why := changed(tree):
        raise ArgumentError.here(f"{what}{why}")


def changed(tree: Any, into: Any = None) -> str:
    """Say which number JAX would change, where, and what to do; "" if none. `into` is the dtype
    that numbers get, if not JAX's default."""

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
    """Return the smallest and the largest of zero and the finite numbers of an array."""
    if x.dtype.kind == "c":
        ends = [*extremes(x.real), *extremes(x.imag)]
        return min(ends), max(ends)
    low, high = x.min(initial=0), x.max(initial=0)
    if not np.isfinite(low) or not np.isfinite(high):
        finite = np.isfinite(x)
        low, high = x.min(where=finite, initial=0), x.max(where=finite, initial=0)
    return low.item(), high.item()


def misfit(numbers: tuple[Any, ...], dtype: np.dtype[Any], into: Any = None) -> str:
    """Say which of these numbers changes in the dtype `into`, by default the one that JAX would
    give it; "" if none does."""
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
        return ""  # a shortcut: this is the usual case, and paths are slow
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    reasons = ((path, judge(x)) for path, x in leaves if isinstance(x, _NUMBERS))
    return next(f"{place(path)}: {why}" for path, why in reasons if why)


def place(path: Any) -> str:
    """Describe the position of a leaf in a pytree."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return f" in {name!r}" if name else ""
