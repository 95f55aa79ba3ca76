"""The JAX implementations of PyTorch's operations: one table, by their names in `torch.ops.aten`.

A function takes the arguments of its operation under the same names; operations that draw random
numbers also take a key, `noise`. The caller (../model.py) promotes mixed dtypes and casts results
to the dtype that PyTorch gave them, so a function can ignore both. `computed` says how one is
called: with integers as floats where its result is floating, and half precision as float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.pytorch.operations import (
    attention,
    convolution,
    linear,
    losses,
    norms,
    pointwise,
    pools,
    random,
    recurrent,
    reductions,
    shapes,
)
from fedgrad.pytorch.operations.in_halves import in_halves

OPERATIONS: dict[str, Callable[..., Any]] = {
    **attention.OPERATIONS,
    **convolution.OPERATIONS,
    **linear.OPERATIONS,
    **losses.OPERATIONS,
    **norms.OPERATIONS,
    **pointwise.OPERATIONS,
    **pools.OPERATIONS,
    **random.OPERATIONS,
    **recurrent.OPERATIONS,
    **reductions.OPERATIONS,
    **shapes.OPERATIONS,
}

# For each random operation: whether it draws numbers with these arguments.
DRAWS: dict[str, Callable[..., bool]] = {**attention.DRAWS, **random.DRAWS, **recurrent.DRAWS}

# These keep halves as they are: products of matrices, which add up float32 anyhow; what only moves
# numbers or draws them; and what asks what a half is: the largest one, or the remainder by one.
_NARROW = (
    {*convolution.OPERATIONS, *linear.PRODUCTS, *random.OPERATIONS, *recurrent.OPERATIONS}
    | {name for name in shapes.OPERATIONS if not name.startswith("upsample")}
    | {
        name
        for name in pointwise.OPERATIONS
        if name.startswith(("nan_to_num", "remainder", "fmod"))
    }
)


def computed(name: str, dtype: Any, is_long: bool) -> Callable[..., Any]:
    """The function of an operation as PyTorch computes it: its result has this dtype in JAX (None
    if it is not one array), and is an int64 in PyTorch or not."""
    fun = OPERATIONS[name]
    floats = dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and name in pointwise.PROMOTED

    def cast(x: Any) -> Any:
        if not hasattr(x, "dtype"):
            return x
        if floats and not jnp.issubdtype(x.dtype, jnp.inexact):
            x = x.astype(dtype)
        half = name not in _NARROW and x.dtype in (jnp.float16, jnp.bfloat16)
        return x.astype(jnp.float32) if half else x

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(cast, (args, kwargs), is_leaf=lambda x: x is None)
        return fun(*args, **kwargs)

    exact = jax.dtypes.canonicalize_dtype("int64") == jnp.int64
    return call if exact else in_halves(name, call, dtype, is_long)
