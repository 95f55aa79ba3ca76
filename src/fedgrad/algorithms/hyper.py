"""Hyperparameters are a nested dict; each has a dotted name, `server.learning_rate`."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from fedgrad.core.errors import ArgumentError, nearest


def paths(hyper: Any) -> dict[str, Any]:
    """Every hyperparameter by its dotted name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(hyper)
    return {_dotted(path): leaf for path, leaf in leaves}


def select(hyper: Any, names: str | Iterable[str]) -> list[str]:
    """The dotted names of all leaves at or below these: `server` means all of the server's."""
    known = list(paths(hyper))
    chosen: list[str] = []
    for name in [names] if isinstance(names, str) else list(names):
        below = [p for p in known if p == name or p.startswith(f"{name}.")]
        if not below:
            raise ArgumentError.here(f"There is no hyperparameter {name!r}." + nearest(name, known))
        chosen += [p for p in below if p not in chosen]
    return chosen


def replace(hyper: Any, values: Mapping[str, Any]) -> Any:
    """The hyperparameters with some of them changed, by dotted name."""
    known = paths(hyper)
    for name in values:
        if name not in known:
            raise ArgumentError.here(
                f"There is no hyperparameter {name!r}." + nearest(name, list(known))
            )
    new = [values.get(name, leaf) for name, leaf in known.items()]
    return jax.tree.unflatten(jax.tree.structure(hyper), new)


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
