"""A cohort: the clients of one call of a program, each with its own number of examples."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedgrad.clients import digest
from fedgrad.clients.examples import Examples
from fedgrad.core.arguments import ClientData, Seen, Shared
from fedgrad.core.errors import public


@public
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cohort(ClientData):
    """A selection of clients from a population, which client code sees as `fg.Examples`.

    It holds the population's store (not a copy) and three small vectors, so a new cohort of the
    same size moves no data and compiles nothing.
    """

    store: Any
    offset: Any  # one integer per client, a NumPy or JAX array
    count: Any
    index: Any
    capacity: int = field(metadata={"static": True})

    def __len__(self) -> int:
        return len(self.count)

    def seen(self, where: str) -> Seen:
        """Return each client's view of the shared store."""
        store = jax.tree.map(Shared, self.store)
        view = Examples(store, self.offset, self.count, self.capacity)
        return Seen(view, self.index, self.count)

    @functools.cached_property
    def digest(self) -> str | None:
        """A digest of every example of these clients, in their order; None if some of them are on
        other machines."""
        named, _ = jax.tree_util.tree_flatten_with_path(self.store)
        if not all(getattr(leaf, "is_fully_addressable", False) for _, leaf in named):
            return None
        kinds = [digest.kind(jax.tree_util.keystr(p), x.dtype, x.shape[1:]) for p, x in named]
        leaves = [np.asarray(leaf) for _, leaf in named]
        return digest.of_all(kinds, digest.of_each(leaves, self.offset, self.count))

    def __repr__(self) -> str:
        return f"Cohort({len(self)} clients of at most {self.capacity} examples)"
