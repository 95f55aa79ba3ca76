"""Handles to values that stay with the clients; training sees nothing but the handles."""

from abc import ABC, abstractmethod
from typing import Any

import jax


class Handle(ABC):
    """A value that each of some clients keeps, for example on its node."""

    @abstractmethod
    def saved(self) -> Any:
        """Return the entry of a checkpoint for it, as JSON."""

    @abstractmethod
    def restored(self, saved: Any) -> "Handle":
        """Return the saved handle; this one refers to the clients' initial values."""

    @abstractmethod
    def leave(self) -> None:
        """Let clients keep the value after this handle is gone, because it is in a checkpoint."""

    @abstractmethod
    def origin(self) -> bytes:
        """Return the source of the value, which is the same for all clients when they begin."""


def handles(tree: Any) -> list[Any]:
    """Return the handles in an argument of a program, or in a state."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Handle)]
