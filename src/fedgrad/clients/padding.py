"""The rule of padding: arrays are padded with real examples."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import CohortError

MOST = 2**31 - 1  # the most rows of a store: positions in it have 32 bits


def padded(parts: Sequence[Any], rows: int) -> Any:
    """Concatenate these parts and pad them to `rows` rows.

    Code may read past a client's last example, and masks what it finds there. The padding consists
    of copies of the first example: a loss may be infinite on zeros, and zero times infinity is not
    zero.
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
    """Pad an array in place, of which the first `rows` rows are examples."""
    array[rows:] = array[0]
