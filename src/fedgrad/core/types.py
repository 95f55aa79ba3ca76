"""What crosses boundaries, by name.

To Python and to type checkers the first four are trees of any kind. What their leaves are is noted
as jaxtyping writes it, for readers and tests/core/test_types.py: nobody else needs it installed.
"""

from typing import Annotated, Any

import jax

Params = Annotated[Any, "PyTree[Float[ArrayLike, '...']]"]  # a model
Hyper = Annotated[Any, "PyTree[Float[ArrayLike, '...']]"]  # hyperparameters, nested by name
Batch = Annotated[Any, "PyTree[Shaped[Array, 'examples ...']]"]
State = Annotated[Any, "PyTree[Shaped[Array, '...']]"]  # what a side keeps between rounds
Key = Annotated[jax.Array, "Key[Array, '']"]
