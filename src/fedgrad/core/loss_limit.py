"""When a loss has run away: one rule for every training that goes back then."""

import math
from typing import Any

from fedgrad.core.primitives import promoting


def ran_away(loss: Any, first: Any, times: float) -> Any:
    """Return whether a loss is not finite, or above the first one by more than `times` its size.

    The rule has no unit: a loss times a constant gives the same answer. A first loss of 0 has no
    size, so beside it only what is not finite has run away. Numbers of Python and of JAX.
    """
    with promoting():
        above = (first != 0) & (loss > first + times * abs(first))
        return above | (loss != loss) | (abs(loss) == math.inf)
