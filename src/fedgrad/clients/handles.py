"""Values that clients keep where they are: whoever trains has handles to them, and nothing more."""

from abc import ABC, abstractmethod
from typing import Any

import jax


class Handle(ABC):
    """A value that each of some clients keeps, such as on its node."""

    @abstractmethod
    def saved(self) -> Any:
        """Return what a checkpoint says of it, as JSON."""

    @abstractmethod
    def restored(self, saved: Any) -> "Handle":
        """Return the handle that was saved; this one is to what clients began with."""

    @abstractmethod
    def leave(self) -> None:
        """Let clients keep the value when this handle is gone: somebody has saved it."""

    @abstractmethod
    def origin(self) -> bytes:
        """Return what the value is made from, where it is the same for all clients."""


def handles(tree: Any) -> list[Any]:
    """Return the handles in an argument of a program, or in a state."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Handle)]
