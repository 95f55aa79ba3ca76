"""A client's own data: how programs read them, and how they are described to the server."""

import functools
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedgrad.clients.padding import padded
from fedgrad.core.imported import imported
from fedgrad.core.lossless import masked
from fedgrad.federation.protocol.federation_errors import FederationError


@dataclass(frozen=True)
class Context:
    """The configuration of a node, passed to the site's data function."""

    config: dict[str, Any] = field(default_factory=dict)

    @property
    def index(self) -> int | None:
        """The index of this client, if the configuration has it as `partition-id`."""
        given = self.config.get("partition-id")
        return None if given is None else int(given)


class OwnData:
    """The tree of dicts, lists and tuples of arrays that `load(context)` returns, loaded once.

    A part is an entry of the outermost dict; "" is all of it.
    """

    def __init__(self, load: Callable[[Any], Any], context: Any) -> None:
        self._load, self._context, self._once = load, context, threading.Lock()

    @property
    def tree(self) -> Any:
        """All data; every leaf is a numpy array."""
        with self._once:
            return self._tree

    @functools.cached_property
    def _tree(self) -> Any:
        loaded = self._load(self._context)
        if why := masked(loaded):
            raise FederationError(f"the data{why}".rstrip("."))
        tree = jax.tree.map(np.asarray, loaded)
        for leaf in jax.tree.leaves(tree):
            if leaf.dtype.kind not in "biufc" and leaf.dtype.name != "bfloat16":
                raise FederationError(f"the data have a leaf of dtype {leaf.dtype}")
        return tree

    def part(self, name: str) -> Any:
        """Return one part of the data."""
        if not name:
            return self.tree
        if not isinstance(self.tree, dict) or name not in self.tree:
            raise FederationError(f"the data here have no part {name!r}, only {self.parts}")
        return self.tree[name]

    @property
    def parts(self) -> list[str]:
        """The names of the parts."""
        return sorted(self.tree) if isinstance(self.tree, dict) else []

    def leaf(self, part: str, position: int) -> np.ndarray[Any, Any]:
        """Return one array of a part, unchanged."""
        leaves = jax.tree.leaves(self.part(part))
        if not 0 <= position < len(leaves):
            raise FederationError(f"the part {part!r} has no array {position}")
        return leaves[position]

    def count(self, part: str) -> int:
        """Return the number of examples of a part."""
        rows = {leaf.shape[:1] for leaf in jax.tree.leaves(self.part(part))}
        if len(rows) != 1 or rows == {()} or rows == {(0,)}:
            raise FederationError(f"the arrays of the part {part!r} have not one row per example")
        return int(rows.pop()[0])

    def rows(self, part: str, position: int, capacity: int) -> np.ndarray[Any, Any]:
        """Return one array of a part in the layout of `fg.Examples`: at most `capacity` examples,
        padded to twice the capacity so that a slice starting at any example is never shifted back.
        """
        leaf, count = self.leaf(part, position), self.count(part)
        if count > capacity:
            raise FederationError(f"the part {part!r} has more than {capacity} examples")
        return padded([leaf], 2 * capacity)

    def describe(self, part: str, examples: bool) -> dict[str, str]:
        """Return structure, shapes and dtypes of a part. For examples, return the shape of one
        example and only a rounded number of them: the exact number is private to the client."""
        tree = self.part(part)
        leaves, structure = jax.tree.flatten(tree)
        shapes = [list(leaf.shape[1:] if examples else leaf.shape) for leaf in leaves]
        return {
            "structure": json.dumps(_encoded(jax.tree.unflatten(structure, range(len(leaves))))),
            "shapes": json.dumps(shapes),
            "dtypes": json.dumps([str(leaf.dtype) for leaf in leaves]),
            "capacity": json.dumps(rounded_up(self.count(part)) if examples else None),
        }


def rounded_up(count: int) -> int:
    """Round up to the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ..."""
    power = 1 << (count.bit_length() - 1)
    return next(n for n in (power, power + power // 2, 2 * power) if n >= count)


def decoded(structure: Any, leaves: list[Any]) -> Any:
    """Return the tree that a structure describes, with these leaves."""
    if isinstance(structure, int):
        return leaves[structure]
    if isinstance(structure, list):
        return [decoded(item, leaves) for item in structure]
    if structure is None:
        return None
    ((kind, items),) = structure.items()
    if kind == "tuple":
        return tuple(decoded(item, leaves) for item in items)
    return {key: decoded(item, leaves) for key, item in items.items()}


def _encoded(tree: Any) -> Any:
    if tree is None or type(tree) is int:
        return tree
    if type(tree) is list:
        return [_encoded(item) for item in tree]
    if type(tree) is tuple:
        return {"tuple": [_encoded(item) for item in tree]}
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": {key: _encoded(item) for key, item in tree.items()}}
    raise FederationError(
        f"the data are a {type(tree).__name__}: return dicts (with names), lists, tuples and arrays"
    )


def load(name: str) -> Callable[[Any], Any]:
    """Import the data function of a site, named as `module:function`."""
    function: Callable[[Any], Any] = imported(name, "the data as module:function")[1]
    return function
