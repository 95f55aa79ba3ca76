"""The model in a checkpoint: its arrays and its structure, so that it can be read on its own.

A model of dicts, lists and tuples is restored as it was. For other classes, such as Equinox
modules, only the named arrays are stored, because a checkpoint contains no code; reading them needs
a model with the same structure.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedgrad.core.types import Params, State
from fedgrad.training.config import name_of
from fedgrad.training.files import RunFolderError

Encode = Callable[[Any], tuple[np.ndarray, dict[str, Any]]]
Decode = Callable[[np.ndarray, dict[str, Any]], Any]


def kept(state: State, arrays: dict[str, np.ndarray], encode: Encode) -> dict[str, Any] | None:
    """Describe the model of a state, and add its arrays to `arrays` unless the state has them."""
    # With several processes only one writes, and it must not compute what the others do not.
    if jax.process_count() > 1 and "params" not in getattr(state, "__dict__", {}):
        return None
    params = getattr(state, "params", None)
    named, structure = jax.tree_util.tree_flatten_with_path(params)
    known = {id(leaf): f"state/{i}" for i, leaf in enumerate(jax.tree.leaves(state))}
    leaves = []
    for i, (path, leaf) in enumerate(named):
        array, kind = encode(leaf)
        at = known.get(id(leaf)) or _same(array, kind, arrays) or f"model/{i}"
        arrays.setdefault(at, array)
        leaves.append({"name": name_of(path), "at": at, **kind})
    numbered = jax.tree.unflatten(structure, range(len(leaves)))
    return {"leaves": leaves, "structure": _structure(numbered)}


def read(
    arrays: dict[str, np.ndarray], model: dict[str, Any] | None, like: Params | None, decode: Decode
) -> Params:
    """Return the model, with the structure of `like` if given, or its own."""
    if model is None:
        raise RunFolderError.here(
            "The checkpoint does not say which of its arrays are the model: an older version wrote "
            "it, or several processes. Call fg.fit as it was called then, with the same out=."
        )
    leaves = [decode(arrays[leaf["at"]], leaf) for leaf in model["leaves"]]
    if like is None:
        return _built(model["structure"], leaves)
    wanted, structure = jax.tree_util.tree_flatten_with_path(like)
    there = {leaf["name"]: tuple(leaf["shape"]) for leaf in model["leaves"]}
    given = {name_of(path): np.shape(leaf) for path, leaf in wanted}
    if list(there.items()) != list(given.items()):
        odd = [n for n in [*there, *given] if there.get(n) != given.get(n)] or list(there)
        raise RunFolderError.here(
            f"like= is not like the model of the checkpoint: {odd[0]} has shape "
            f"{there.get(odd[0], 'nothing')} there, and {given.get(odd[0], 'nothing')} in like=."
        )
    return jax.tree.unflatten(structure, leaves)


def is_plain(model: dict[str, Any]) -> bool:
    """Return whether a model can be read without `like`."""

    def plain(structure: Any) -> bool:
        if not isinstance(structure, dict):
            return not isinstance(structure, str)
        (parts,) = structure.values()
        return all(map(plain, parts.values() if isinstance(parts, dict) else parts))

    return plain(model["structure"])


def _same(array: np.ndarray, kind: dict[str, Any], arrays: dict[str, np.ndarray]) -> str | None:
    """Find the same numbers in the state: an average is a new array on each access."""
    for at, other in arrays.items():
        if at.startswith("state/") and (other.dtype, other.shape) == (array.dtype, array.shape):
            if other.tobytes() == array.tobytes() and not kind["weak"]:
                return at
    return None


def _structure(numbered: Any) -> Any:
    """Convert a tree to JSON: leaves become numbers, and unsupported classes their names."""
    if isinstance(numbered, int) or numbered is None:
        return numbered
    if type(numbered) is dict and all(isinstance(key, str) for key in numbered):
        return {"dict": {key: _structure(value) for key, value in numbered.items()}}
    if type(numbered) in (list, tuple):
        return {type(numbered).__name__: [_structure(value) for value in numbered]}
    return type(numbered).__qualname__


def _built(structure: Any, leaves: list[Any]) -> Any:
    if structure is None:
        return None
    if isinstance(structure, int):
        return leaves[structure]
    if isinstance(structure, str):
        raise RunFolderError.here(
            f"The model is made of {structure}, which a checkpoint does not hold, because it is "
            "code. Give a model like it, such as the one that training began with: "
            "fg.load(folder, like=params)."
        )
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: _built(value, leaves) for key, value in parts.items()}
    built = [_built(value, leaves) for value in parts]
    return tuple(built) if kind == "tuple" else built
