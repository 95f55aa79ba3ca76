"""From a program and its arguments to a checked graph of what the server and one client do."""

import contextvars
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from fedgrad.core.arguments import Arguments
from fedgrad.core.check import check
from fedgrad.core.errors import ArgumentError
from fedgrad.core.graph import Equation, Graph, Value
from fedgrad.core.normal_form import traced
from fedgrad.core.placement import ANYWHERE, SERVER
from fedgrad.core.primitives import current_source, jax_primitives
from fedgrad.core.program import Program


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
