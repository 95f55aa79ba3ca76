"""What the operations of PyTorch are in JAX: one table, by their names in `torch.ops.aten`.

A function takes what its operation takes, by the same names; those that draw random numbers take a
key besides, `noise`. Types that differ are promoted and results get the dtype that PyTorch gave
them where they are called (../model.py), so a function need not think of either.
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

# For those that draw: whether they do, of the same arguments.
DRAWS: dict[str, Callable[..., bool]] = {**attention.DRAWS, **random.DRAWS, **recurrent.DRAWS}
