"""From a program and its arguments to a checked graph of what the server and one client do."""

import contextvars
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedgrad.core.check import check
from fedgrad.core.cohort import Cohort, Population, view
from fedgrad.core.errors import ArgumentError, CohortError
from fedgrad.core.graph import Equation, Graph, Value
from fedgrad.core.normal_form import traced
from fedgrad.core.placement import ANYWHERE, SERVER, Placement
from fedgrad.core.primitives import current_source, jax_primitives
from fedgrad.core.program import Program


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of one call, flat, each leaf with what one client sees of it."""

    leaves: list[Any]
    values: list[Value]
    rebuild: Callable[[list[Any]], dict[str, Any]]  # what one client sees -> arguments by name
    clients: dict[str, int]  # how many, by placement
    indices: dict[str, Any]  # which clients these are, where the arguments say so
    sizes: dict[str, Any]  # how many examples each client has, where clients are ragged


@dataclass(frozen=True)
class Taken:
    """How a derivative is taken: the rule of each active round ("push", "local", "pull"), and
    whether clients compute again what they would have to remember."""

    rules: tuple[str, ...] = ()
    recompute: bool = False


# While a program is traced: how the derivatives in it were taken, by the function that took them.
_taken: contextvars.ContextVar[dict[Any, Taken]] = contextvars.ContextVar("fedgrad_taken")


def note(fun: Callable[..., Any], taken: Taken) -> None:
    """Say how the derivative that `fun` computes was taken; plans of it will tell."""
    _taken.get({})[fun] = taken


@dataclass(frozen=True, eq=False)
class Traced:
    graph: Graph
    outputs: Any  # the tree of the result
    taken: Taken  # if the program is a derivative


def struct(value: Value) -> jax.ShapeDtypeStruct:
    aval = value.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def trace(program: Program, arguments: Arguments) -> Traced:
    """Trace and check one client's view of the program."""
    structs = [struct(v) for v in arguments.values]
    notes: dict[Any, Taken] = {}
    token = _taken.set(notes)
    try:
        jaxpr, shape = traced(
            lambda *leaves: program.call(arguments.rebuild(list(leaves))),
            program.client_placements,
            *structs,
        )
    finally:
        _taken.reset(token)
    graph = _constants_placed(check(jaxpr, arguments.values, derived=program.derived), program)
    for value in graph.outputs:
        if value.shared:
            raise ArgumentError.here(
                f"{program.name} returns {value.origin}, the store of examples itself. Return what "
                "it computes of them, for example data.count."
            )
    return Traced(graph, jax.tree.structure(shape), notes.get(program.fun, Taken()))


def _constants_placed(graph: Graph, program: Program) -> Graph:
    """A constant that is returned is the server's. But where the server does nothing at all and
    nothing else is returned (zeros like a client's value, say), it is each client's."""
    places = {v.at for v in graph.inputs} | {v.at for e in graph.equations for v in e.outputs}
    beside = any(v.at != ANYWHERE for v in graph.outputs)
    if SERVER in places or beside or len(program.client_placements) != 1:
        return graph
    (at,) = program.client_placements
    copies = {
        v: Equation(
            jax_primitives.copy_p, {}, (v,), (Value(v.aval, at, v.origin),), at, current_source()
        )
        for v in graph.outputs
    }
    outputs = tuple(copies[v].outputs[0] for v in graph.outputs)
    equations = (*graph.equations, *copies.values())
    return dataclasses.replace(graph, equations=equations, outputs=outputs)


def read_arguments(program: Program, arguments: dict[str, Any]) -> Arguments:
    """Check the arguments of a call and see them as one client does."""
    leaves: list[Any] = []
    values: list[Value] = []
    trees: dict[str, Any] = {}
    clients: dict[str, tuple[int, str]] = {}
    indices: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for name, argument in arguments.items():
        placement = program.placements.get(name)
        if placement is None and any(
            map(_is_clients, jax.tree.leaves(argument, is_leaf=_is_clients))
        ):
            raise CohortError.here(
                f"{program.name}: argument {name!r} is at the server, but got clients. Name it: "
                f"@fg.program({name}=fg.CLIENTS)."
            )
        if placement is not None:
            cohorts = _check_client_argument(program, name, argument, placement)
            for cohort in cohorts:
                indices.setdefault(placement.name, cohort.index)
                sizes.setdefault(placement.name, cohort.count)
            argument = _views(argument)
        paths, trees[name] = jax.tree_util.tree_flatten_with_path(argument)
        shared = _shared(argument) if placement is not None else set()
        for i, (path, leaf) in enumerate(paths):
            label = f'"{name}{jax.tree_util.keystr(path)}"'
            aval = _aval(leaf, label, program)
            if placement is None:
                values.append(Value(aval, SERVER, label))
            elif i in shared:
                values.append(Value(aval, placement.name, label, shared=True))
            else:
                _count_clients(clients, placement, aval, label, program)
                one = jax.core.ShapedArray(aval.shape[1:], aval.dtype)
                values.append(Value(one, placement.name, label))
            leaves.append(leaf)

    def rebuild(flat: list[Any]) -> dict[str, Any]:
        rest = list(flat)
        result = {}
        for name, tree in trees.items():
            result[name] = jax.tree.unflatten(tree, rest[: tree.num_leaves])
            rest = rest[tree.num_leaves :]
        return result

    counts = {name: n for name, (n, _) in clients.items()}
    return Arguments(leaves, values, rebuild, counts, indices, sizes)


def _check_client_argument(
    program: Program, name: str, argument: Any, placement: Placement
) -> list[Cohort]:
    where = f"{program.name}: argument {name!r}, at {placement.name}"
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
    parts = jax.tree.leaves(argument, is_leaf=_is_clients)
    if any(isinstance(part, Population) for part in parts):
        raise CohortError.here(
            f"{where}: got a population. Choose clients: population.sample(key, size), or "
            "population.everyone for all of them."
        )
    if not parts:
        raise CohortError.here(f"{where}: got {argument!r}, which has no array over clients.")
    return [part for part in parts if isinstance(part, Cohort)]


def _is_clients(x: Any) -> bool:
    return isinstance(x, (Cohort, Population))


def _views(argument: Any) -> Any:
    return jax.tree.map(
        lambda x: view(x) if isinstance(x, Cohort) else x, argument, is_leaf=_is_clients
    )


def _shared(argument: Any) -> set[int]:
    """Positions of the leaves that all clients share: the stores of cohorts."""
    from fedgrad.core.examples import Examples

    def is_view(x: Any) -> bool:
        return isinstance(x, Examples)

    found: set[int] = set()
    position = 0
    for part in jax.tree.leaves(argument, is_leaf=is_view):
        if is_view(part):
            stored = len(jax.tree.leaves(part.store))
            found.update(range(position, position + stored))
            position += stored + 2
        else:
            position += 1
    return found


def _aval(leaf: Any, label: str, program: Program) -> Any:
    if isinstance(leaf, jax.Array):  # at once: a model has many leaves, and eval_shape traces each
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
    clients: dict[str, tuple[int, str]],
    placement: Placement,
    aval: Any,
    label: str,
    program: Program,
) -> None:
    if not aval.shape:
        raise CohortError.here(
            f"{program.name}: {label} is at {placement.name}, so it has a leading axis over "
            f"clients; got a scalar."
        )
    n, first = clients.setdefault(placement.name, (aval.shape[0], label))
    if n == 0 or aval.shape[0] == 0:
        raise CohortError.here(
            f"{program.name}: {label} has no clients: its shape is {aval.shape}. A cohort needs at "
            "least one client."
        )
    if n != aval.shape[0]:
        raise CohortError.here(
            f"{program.name}: different numbers of clients at {placement.name}: {first} has {n}, "
            f"{label} has {aval.shape[0]} (shape {aval.shape}). Give both the same clients; for "
            "clients of different sizes use fg.cohort([...])."
        )
