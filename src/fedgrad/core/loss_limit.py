"""Divergence of a loss: one rule for every kind of training that rolls back then."""

import math
from typing import Any

from fedgrad.core.primitives import promoting


def ran_away(loss: Any, first: Any, times: float) -> Any:
    """Return whether a loss is not finite, or exceeds the first one by more than `times` its size.

    The rule is invariant to scale: a loss times a constant gives the same answer. A first loss of 0
    has no size; then only losses that are not finite have diverged. Works with Python and JAX
    numbers.
    """
    with promoting():
        above = (first != 0) & (loss > first + times * abs(first))
        return above | (loss != loss) | (abs(loss) == math.inf)
