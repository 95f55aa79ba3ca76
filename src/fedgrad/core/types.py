"""Types of values that cross boundaries.

To Python and to type checkers the first four are pytrees of any kind. Their leaves are described in
jaxtyping's notation, for readers and for tests/core/test_types.py: nobody else needs jaxtyping
installed.
"""

from typing import Annotated, Any

import jax

Params = Annotated[Any, "PyTree[Float[ArrayLike, '...']]"]  # a model
Hyper = Annotated[Any, "PyTree[Float[ArrayLike, '...']]"]  # hyperparameters, nested by name
Batch = Annotated[Any, "PyTree[Shaped[Array, 'examples ...']]"]
State = Annotated[Any, "PyTree[Shaped[Array, '...']]"]  # what a side keeps between rounds
Key = Annotated[jax.Array, "Key[Array, '']"]
