"""Reads the arguments of a call, in the same way for running, planning and differentiating."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedgrad.core.errors import ArgumentError, CohortError
from fedgrad.core.graph import SERVER, Origin, Value
from fedgrad.core.program import Program


@dataclass(frozen=True, eq=False)
class Shared:
    """A leaf of a client argument that all clients see entirely, such as a store of examples."""

    array: Any
    devices: int = 1  # number of devices over which its rows are split; a client sees those of one


@dataclass(frozen=True, eq=False)
class Seen:
    """Clients as a program sees them."""

    view: Any  # a pytree whose leaves have a leading axis over clients or are `Shared`
    index: Any  # the index of each client
    count: Any  # the number of examples of each client


class ClientData(ABC):
    """An argument, or a part of one, that represents clients and is not a stacked array."""

    @abstractmethod
    def seen(self, where: str) -> Seen:
        """Return the clients as a program sees them; `where` describes the argument in errors."""


def map_parts(fun: Callable[[Any], Any], argument: Any) -> Any:
    """Apply `fun` to every array and every `ClientData` of an argument."""
    return jax.tree.map(fun, argument, is_leaf=_is_client_data)


def parts(argument: Any) -> list[Any]:
    """Return every array and every `ClientData` of an argument."""
    return jax.tree.leaves(argument, is_leaf=_is_client_data)


def _is_client_data(x: Any) -> bool:
    return isinstance(x, ClientData)


@dataclass(frozen=True, eq=False)
class Arguments:
    """The flat arguments of one call, each leaf with what one client sees of it."""

    leaves: list[Any]
    values: list[Value]
    names: list[str]  # for each leaf, the argument that it belongs to
    tree: Any  # the structure of all arguments, in their order
    arguments: tuple[str, ...]
    clients: dict[str, int]  # number of clients by placement
    indices: dict[str, Any]  # indices of the clients, if the arguments have them
    sizes: dict[str, Any]  # numbers of examples, if these differ between clients

    def rebuild(self, flat: Sequence[Any]) -> dict[str, Any]:
        """Return arguments by name, given one value per leaf."""
        return dict(zip(self.arguments, jax.tree.unflatten(self.tree, flat), strict=True))

    @property
    def key(self) -> Any:
        """A key of all that a plan depends on: placements, structure, shapes and dtypes."""
        avals = [(v.at, v.aval) for v in self.values]
        return self.tree, tuple((at, x.shape, x.dtype, x.weak_type) for at, x in avals)


def read_arguments(program: Program, arguments: dict[str, Any]) -> Arguments:
    """Check the arguments of a call and return them as one client sees them."""
    found: dict[str, Seen] = {}
    views = {}
    for name, argument in arguments.items():
        placement = program.placements.get(name)
        if placement is not None:
            where = f"{program.name}: argument {name!r}, at {placement.name}"
            argument, clients = _seen(argument, where)
            if clients:
                found.setdefault(placement.name, clients[0])
        elif any(map(_is_client_data, parts(argument))):
            raise CohortError.here(
                f"{program.name}: argument {name!r} is at the server, but got clients. Name it: "
                f"@fg.program({name}=fg.CLIENTS)."
            )
        views[name] = argument
    return _read(program, views, found, stacked=True)


def read_inside(program: Program, arguments: dict[str, Any]) -> Arguments:
    """Read the arguments of a call inside of a program, which are one client's values already."""
    return _read(program, arguments, {}, stacked=False)


def _read(
    program: Program, views: dict[str, Any], found: dict[str, Seen], stacked: bool
) -> Arguments:
    paths, tree = jax.tree_util.tree_flatten_with_path(list(views.values()))
    names: list[str] = []
    leaves: list[Any] = []
    values: list[Value] = []
    clients: dict[str, tuple[int, str]] = {}
    for (position, *path), leaf in paths:
        name = list(views)[position.idx]
        label = f'"{name}{jax.tree_util.keystr(tuple(path))}"'
        shared = isinstance(leaf, Shared)
        array = leaf.array if shared else leaf
        aval = _aval(array, label, program)
        placement = program.placements.get(name)
        at = SERVER if placement is None else placement.name
        if shared:
            aval = aval.update(shape=(aval.shape[0] // leaf.devices, *aval.shape[1:]))
        elif stacked and placement is not None:
            _count_clients(clients, at, aval, label, program)
            aval = jax.core.ShapedArray(aval.shape[1:], aval.dtype)
        names.append(name)
        leaves.append(array)
        values.append(Value(aval, at, Origin(label), shared=shared))
    return Arguments(
        leaves,
        values,
        names,
        tree,
        tuple(views),
        clients={at: n for at, (n, _) in clients.items()},
        indices={at: seen.index for at, seen in found.items()},
        sizes={at: seen.count for at, seen in found.items()},
    )


def _seen(argument: Any, where: str) -> tuple[Any, list[Seen]]:
    """Return a client argument as one client sees it, and every `ClientData` in it."""
    if isinstance(argument, list):
        raise CohortError.here(
            f"{where}: got a list of {len(argument)}. Is it one entry per client? Then stack them, "
            "or write fg.cohort([...]) if clients have different sizes. If it is a pytree whose "
            "parts are stacked over clients, make it a tuple."
        )
    if isinstance(argument, np.ndarray) and argument.dtype == object:
        raise CohortError.here(
            f"{where}: got an array of objects, so clients of different sizes. "
            "Write fg.cohort([client_0, client_1, ...])."
        )
    if not parts(argument):
        raise CohortError.here(f"{where}: got {argument!r}, which has no array over clients.")
    seen: list[Seen] = []

    def view(part: Any) -> Any:
        if not isinstance(part, ClientData):
            return part
        seen.append(part.seen(where))
        return seen[-1].view

    return map_parts(view, argument), seen


def _aval(leaf: Any, label: str, program: Program) -> Any:
    if isinstance(leaf, jax.Array):  # a shortcut, as eval_shape traces each of many leaves
        weak = jax.typeof(leaf).weak_type
        return jax.core.ShapedArray(leaf.shape, leaf.dtype, weak_type=weak)
    try:
        shape = jax.eval_shape(lambda x: x, leaf)
    except TypeError:
        raise ArgumentError.here(
            f"{program.name}: {label} is {type(leaf).__name__} {leaf!r}, which is not an array. "
            "Bind what is not data beforehand, for example with functools.partial."
        ) from None
    return jax.core.ShapedArray(shape.shape, shape.dtype, weak_type=shape.weak_type)


def _count_clients(
    clients: dict[str, tuple[int, str]], at: str, aval: Any, label: str, program: Program
) -> None:
    if not aval.shape:
        raise CohortError.here(
            f"{program.name}: {label} is at {at}, so it has a leading axis over clients; got a "
            "scalar."
        )
    n, first = clients.setdefault(at, (aval.shape[0], label))
    if n == 0 or aval.shape[0] == 0:
        raise CohortError.here(
            f"{program.name}: {label} has no clients: its shape is {aval.shape}. A cohort needs at "
            "least one client."
        )
    if n != aval.shape[0]:
        raise CohortError.here(
            f"{program.name}: different numbers of clients at {at}: {first} has {n}, {label} has "
            f"{aval.shape[0]} (shape {aval.shape}). Give both the same clients; for clients of "
            "different sizes use fg.cohort([...])."
        )
