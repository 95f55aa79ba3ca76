"""The one rule of padding: what has to be filled up is filled with real examples."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import CohortError

MOST = 2**31 - 1  # rows that 32 bits can count, and a client's place in a store is such a number


def padded(parts: Sequence[Any], rows: int) -> Any:
    """These rows one after another, and after them so many that there are `rows`.

    Code may read past a client's last example, and masks what it finds there. But they are examples
    all the same, copies of the first: a loss may be infinite on zeros, and zero times infinity is
    not zero.
    """
    if rows > MOST:
        raise CohortError.here(
            f"{rows:,} rows, of all examples and of those that fill up a last batch, are more than "
            "32 bits can count. Use fewer examples, or clients on disk, of which only a cohort has "
            "to be fewer: fg.store(path, clients)."
        )
    numbers: Any = np if isinstance(parts[0], np.ndarray) else jnp
    spare = (rows - sum(map(len, parts)), *parts[0].shape[1:])
    return numbers.concatenate([*parts, numbers.broadcast_to(parts[0][:1], spare)])


def fill(array: np.ndarray, rows: int) -> None:
    """The same in place, of an array in which so many rows are examples."""
    array[rows:] = array[0]
