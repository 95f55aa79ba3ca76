"""Control flow that communicates: reads its bodies as graphs, and places its outputs."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fedgrad.core.control import cond_of, scan_of, while_of
from fedgrad.core.graph import ANYWHERE, SERVER, Graph, Value, is_client
from fedgrad.core.misuse import join_carry, refuse_client_predicate
from fedgrad.core.primitives import (
    CALLS,
    ClosedJaxpr,
    JaxprEqn,
    closed,
    communicates,
    jax_primitives,
)

Read = tuple[list[Graph], list[str]]  # the bodies, and the placements of the outputs


class Reader(Protocol):
    """The reader of a jaxpr's equations (trace.py)."""

    derived: bool

    def where(self, source: Any) -> str:
        """Return the user's line."""

    def body(self, jaxpr: ClosedJaxpr, inputs: Sequence[Value], source: Any) -> Graph:
        """Read a jaxpr as a graph."""

    def join(self, inputs: Sequence[Value], operation: str, source: Any) -> str:
        """Return the one placement of these inputs."""


def scan(reader: Reader, eqn: JaxprEqn, inputs: list[Value], source: Any) -> Read:
    loop = scan_of(eqn.params)
    (body,) = loop.bodies
    consts, start, arrays = loop.split(inputs)
    _, _, rows = loop.split(body.jaxpr.invars)
    given = [Value(row.aval, v.at, v.origin) for row, v in zip(rows, arrays, strict=True)]

    def read(carry: list[Value]) -> Graph:
        return reader.body(body, [*map(_inner, consts), *carry, *given], source)

    graph, carry = _settled(read, start, reader.where(source))
    _, stacked = loop.split_outputs(graph.outputs)
    return [graph], [v.at for v in (*carry, *stacked)]


def while_(reader: Reader, eqn: JaxprEqn, inputs: list[Value], source: Any) -> Read:
    loop = while_of(eqn.params)
    cond, body = loop.bodies
    of_cond, of_body, start = loop.split(inputs)

    def read(carry: list[Value]) -> Graph:
        return reader.body(body, [*map(_inner, of_body), *carry], source)

    line = reader.where(source)
    graph, carry = _settled(read, start, line)
    goes_on = reader.body(cond, [*map(_inner, of_cond), *map(_inner, carry)], source)
    (decides,) = goes_on.outputs
    refuse_client_predicate(decides, "while_loop", line)
    # Only the server knows how often the loop ran, so a carry that merely counts is at the server.
    known = [SERVER if decides.at != ANYWHERE and v.at == ANYWHERE else v.at for v in carry]
    return [goes_on, graph], known


def _settled(
    read: Callable[[list[Value]], Graph], start: Sequence[Value], line: str
) -> tuple[Graph, list[Value]]:
    """Return the body of a loop, and its carry with placements. A carry may start anywhere and turn
    out to have a placement, so the body is read until nothing changes."""
    at = [v.at for v in start]
    while True:
        carry = [Value(v.aval, place, v.origin) for v, place in zip(start, at, strict=True)]
        graph = read(carry)
        after = [v.at for v in graph.outputs[: len(at)]]
        joined = [join_carry(a, b, line) for a, b in zip(at, after, strict=True)]
        if joined == at:
            return graph, carry
        at = joined


def cond(reader: Reader, eqn: JaxprEqn, inputs: list[Value], source: Any) -> Read:
    graphs = [
        reader.body(branch, [_inner(v) for v in inputs[1:]], source)
        for branch in cond_of(eqn.params).bodies
    ]
    if communicates(eqn.params) or (reader.derived and not is_client(inputs[0].at)):
        refuse_client_predicate(inputs[0], "cond", reader.where(source))
    else:  # one side runs it, so that side needs all inputs
        reader.join(inputs, "cond", source)
    line, placements = reader.where(source), [v.at for v in graphs[0].outputs]
    for graph in graphs[1:]:
        pairs = zip(placements, graph.outputs, strict=True)
        placements = [join_carry(a, v.at, line) for a, v in pairs]
    # Only the server knows which branch is taken, so a constant result is at the server.
    return graphs, [SERVER if p == ANYWHERE else p for p in placements]


def custom(reader: Reader, eqn: JaxprEqn, inputs: list[Value], source: Any) -> Read:
    inside = closed(eqn.params[CALLS[eqn.primitive]])
    graph = reader.body(inside, [_inner(v) for v in inputs], source)
    return [graph], [v.at for v in graph.outputs]


CONTROL_FLOW = {
    jax_primitives.scan_p: scan,
    jax_primitives.while_p: while_,
    jax_primitives.cond_p: cond,
}


def _inner(v: Value) -> Value:
    """Return the same value, as an input of a body."""
    return Value(v.aval, v.at, v.origin, v.shared, v.constant)
