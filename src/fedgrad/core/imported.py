"""Imports objects that a user names as module:name, on a command line or in a configuration."""

import importlib
import sys
from pathlib import Path
from typing import Any

from fedgrad.core.errors import ArgumentError, nearest


def imported(name: str, what: str) -> tuple[Any, Any]:
    """Return (module, the object of that name in it); the current folder is searched, too."""
    path, _, attribute = name.partition(":")
    if not path or not attribute:
        raise ArgumentError(f"Name {what}, got {name!r}.")
    if path.endswith(".py") or "/" in path:
        meant = path.removesuffix(".py").replace("/", ".").lstrip(".")
        raise ArgumentError(f"{name!r} names a file. Write the module: {meant}:{attribute}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if path != error.name and not path.startswith(f"{error.name}."):  # a missing dependency
            raise ArgumentError(f"{path} fails to import: {error}.") from error
        here = sorted(file.stem for file in Path().glob("*.py"))
        hint = nearest(path, here) if here else ""
        raise ArgumentError(f"There is no module {path!r} here: {error}.{hint}") from None
    except Exception as error:
        raise ArgumentError(f"{path} fails to import: {type(error).__name__}: {error}") from error
    return module, attribute_of(module, attribute)


def attribute_of(module: Any, name: str) -> Any:
    """Return an attribute of a module, or raise an error with the nearest names that it has."""
    if not hasattr(module, name):
        known = [known for known in vars(module) if not known.startswith("_")]
        raise ArgumentError(f"{module.__name__} has no {name!r}." + nearest(name, known))
    return getattr(module, name)
