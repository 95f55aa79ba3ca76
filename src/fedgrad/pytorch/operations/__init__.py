"""The JAX implementations of PyTorch's operations: one table, by their names in `torch.ops.aten`.

A function takes the arguments of its operation under the same names; operations that draw random
numbers also take a key, `noise`. The caller (../model.py) promotes mixed dtypes and casts results
to the dtype that PyTorch gave them, so a function can ignore both.
"""

from collections.abc import Callable
from typing import Any

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
