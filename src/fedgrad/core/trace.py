"""Traces a program with its arguments to a checked graph of what the server and one client do.

Every value gets a placement, and programs that mix placements are refused. The law of this pass: in
the graph that it returns, all inputs of an equation are at one placement (or anywhere), a broadcast
goes from the server to clients, a sum from clients to the server.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.arguments import Arguments
from fedgrad.core.bodies import CONTROL_FLOW, custom
from fedgrad.core.control import scan_of
from fedgrad.core.errors import ArgumentError, PlacementError, PlanError
from fedgrad.core.graph import ANYWHERE, OUTER, SERVER, Equation, Graph, Origin, Value, is_client
from fedgrad.core.misuse import refuse_broadcast, refuse_mix, refuse_sum
from fedgrad.core.normal_form import MENDED, in_normal_form
from fedgrad.core.primitives import (
    CALLS,
    CUSTOM_DERIVATIVES,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    alone,
    broadcast_p,
    closed,
    communicates,
    current_source,
    foreign_axis,
    has_effects,
    index_placement,
    inner_constants,
    inner_jaxprs,
    jax_primitives,
    make_jaxpr,
    part,
    primitives_of,
    source_p,
    sum_p,
    where,
    wide,
)
from fedgrad.core.program import Program


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced program. For a derivative, also the rule of each active round and whether clients
    recompute what they would otherwise remember; and its plan, if it was made to choose the
    rules."""

    jaxpr: ClosedJaxpr
    graph: Graph
    outputs: Any  # the structure of the result
    rules: tuple[str, ...] = ()
    recompute: bool = False
    plan: Graph | None = None


def struct(value: Value) -> jax.ShapeDtypeStruct:
    aval = value.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def trace(program: Program, arguments: Arguments) -> Traced:
    """Trace and check one client's view of the program."""
    derive = getattr(program.fun, "derive", None)
    if derive is None:
        made = traced(
            lambda *leaves: program.call(arguments.rebuild(leaves)),
            arguments.values,
            program.client_placements,
            derived=program.derived,
        )
    else:
        made = derive(arguments)
    for value in made.graph.outputs:
        if value.shared:
            raise ArgumentError.here(
                f"{program.name} returns {value.origin}, the store of examples itself. Return what "
                "it computes of them, for example data.count."
            )
    if program.look is not None:
        program.look(jax.tree.unflatten(made.outputs, [v.at for v in made.graph.outputs]))
    return _constants_placed(made, program)


def traced(fun: Any, values: Sequence[Value], placements: Sequence[str], **how: bool) -> Traced:
    """Trace one client's view of a function of flat values, and `check` it."""
    jaxpr, tree = one_view(fun, placements, *[struct(v) for v in values])
    return Traced(jaxpr, check(jaxpr, values, **how), tree)


def one_view(fun: Any, placements: Sequence[str], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """Return one client's view of a function of arrays (or their shapes) in normal form, and the
    structure of its result."""
    jaxpr, shape = make_jaxpr(fun, placements, *args)
    if MENDED & primitives_of(jaxpr.jaxpr.eqns):
        jaxpr = in_normal_form(jaxpr, placements, *args)
    return jaxpr, jax.tree.structure(shape)


def _constants_placed(made: Traced, program: Program) -> Traced:
    """Place returned constants at the server. But if the server does nothing at all and nothing
    else is returned (zeros like a client's value, say), they are each client's."""
    graph = made.graph
    places = {v.at for v in graph.inputs} | {v.at for e in graph.equations for v in e.outputs}
    beside = any(v.at != ANYWHERE for v in graph.outputs)
    if SERVER in places or beside or len(program.client_placements) != 1:
        return made
    (at,) = program.client_placements
    copies = {
        v: Equation(
            jax_primitives.copy_p, {}, (v,), (Value(v.aval, at, v.origin),), at, current_source()
        )
        for v in graph.outputs
    }
    outputs = tuple(copies[v].outputs[0] for v in graph.outputs)
    equations = (*graph.equations, *copies.values())
    placed = dataclasses.replace(graph, equations=equations, outputs=outputs)
    return dataclasses.replace(made, graph=placed, plan=None)


# If captured arrays have more scalars than this in total, they are data of the server, not
# constants of the program: client code that used them would make every client download them,
# unseen.
CAPTURE_LIMIT = 1024

# Operations that JAX inserts by itself: their result is still called by the name of their input.
_SAME_TO_A_READER = {"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy"}


def check(
    jaxpr: ClosedJaxpr,
    inputs: Sequence[Value],
    nested: bool = False,
    to_derive: bool = False,
    derived: bool = False,
    source: Any = None,
) -> Graph:
    """Place every value of a traced program.

    Args:
        jaxpr: The traced program.
        inputs: Its inputs, with placements.
        nested: The program is traced within another one, which will itself be checked and which
            places what this one captures.
        to_derive: JAX will differentiate it: functions with custom derivatives stay whole even if
            they communicate, and JAX itself provides the client's index.
        derived: It is a derivative, in which the communication of a cond may have become dead; the
            server decides all the same.
        source: The line that all of it is attributed to, if to one.
    """
    reader = _Reader(nested, to_derive, derived)
    outputs = reader.run(jaxpr, inputs, source)
    return Graph(
        tuple(inputs),
        tuple(reader.equations),
        tuple(outputs),
        reader.indices,
        tuple(reader.opened),
    )


class _Reader:
    """Reads equations one by one; caches what it has made, so that equal work is done once."""

    def __init__(self, nested: bool, to_derive: bool, derived: bool) -> None:
        self.nested, self.to_derive, self.derived = nested, to_derive, derived
        self.around: tuple[Any, ...] = ()  # sources of the enclosing control flow
        self.equations: list[Equation] = []
        self.indices: dict[str, Value] = {}
        self.made: dict[Any, tuple[Value, ...]] = {}
        self.literals: dict[Any, Value] = {}
        self.marked: dict[Value, Value] = {}  # source-marked value: the value itself
        self.opened: list[str] = []
        self.hidden = 0  # scalars captured so far that no message shows

    def run(self, jaxpr: ClosedJaxpr, inputs: Sequence[Value], source: Any) -> list[Value]:
        """Read a jaxpr in place; `source` overrides where its equations come from."""
        env: dict[Any, Value] = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
        for var, constant in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = self.captured(var.aval, constant)

        def value(atom: Any) -> Value:
            return self.literal(atom) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.jaxpr.eqns:
            outputs = self.equation(eqn, [value(v) for v in eqn.invars], source or eqn.source_info)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [value(v) for v in jaxpr.jaxpr.outvars]

    def literal(self, literal: Literal) -> Value:
        array = np.asarray(literal.val)
        key = (str(literal.aval), array.tobytes())
        if key not in self.literals:
            self.literals[key] = Value(literal.aval, ANYWHERE, constant=literal.val)
        return self.literals[key]

    def captured(self, aval: Any, constant: Any) -> Value:
        key = id(constant)
        if key not in self.literals:
            of_server = self.of_server(aval, constant)
            at = SERVER if of_server else ANYWHERE
            if self.nested and isinstance(constant, jax.core.Tracer):
                at = OUTER
            name = f"a captured array of shape {aval.shape}" if of_server else ""
            origin = Origin(name, captured=of_server)
            self.hidden += 0 if of_server else aval.size
            self.literals[key] = Value(aval, at, origin, constant=constant)
        return self.literals[key]

    def captures(self, params: dict[str, Any]) -> bool:
        """Whether the jaxprs of an equation capture data of the server."""
        return any(self.of_server(jax.typeof(c), c) for c in inner_constants(params))

    def of_server(self, aval: Any, constant: Any) -> bool:
        traced = isinstance(constant, jax.core.Tracer)
        return not self.nested and (traced or self.hidden + aval.size > CAPTURE_LIMIT)

    # --- one equation ---------------------------------------------------------------------

    def equation(self, eqn: JaxprEqn, inputs: list[Value], source: Any) -> Sequence[Value]:
        primitive = eqn.primitive
        if primitive in (broadcast_p, sum_p):
            return self.communication(eqn, inputs[0], source)
        if (name := index_placement(primitive, eqn.params)) is not None:
            return [self.index(name, eqn.outvars[0].aval)]
        if foreign_axis(primitive, eqn.params):
            raise PlacementError(
                f"{self.where(source)}: {primitive.name} talks across clients. Only fg.sum and "
                "fg.broadcast can; everything else sees one client."
            )
        if primitive is source_p:
            return self.source(eqn, inputs, source)
        speaks = communicates(eqn.params)
        mixed = len({v.at for v in inputs} - {ANYWHERE, OUTER}) > 1
        if speaks or ((mixed or self.captures(eqn.params)) and inner_jaxprs(eqn.params)):
            if primitive in CALLS and not (self.to_derive and primitive in CUSTOM_DERIVATIVES):
                # jnp's own jitted functions are traced once for all callers: show the call's line.
                inner = closed(eqn.params[CALLS[primitive]])
                if primitive in CUSTOM_DERIVATIVES and (speaks or mixed):
                    self.opened.append(self.where(source))
                return self.run(inner, inputs, None if speaks else source)
            if primitive in CONTROL_FLOW or primitive in CUSTOM_DERIVATIVES:
                return self.control_flow(eqn, inputs, source)
            if speaks:
                raise PlanError(
                    f"{self.where(source)}: fg.broadcast or fg.sum inside of {primitive.name} is "
                    "not supported. Use jit, scan, while_loop, cond, switch, checkpoint, "
                    "custom_jvp or custom_vjp around communication."
                )
        if self.derived and primitive is jax_primitives.scan_p:
            split = self.without_constants(eqn, inputs, source)
            if split is not None:
                return split
        indices = [self.index(name, None) for name in _indices_inside(eqn.params)]
        at = self.join([*inputs, *indices], primitive.name, source)
        asked = [] if self.to_derive else indices
        return self.add(eqn, [*inputs, *asked], at, source, bool(asked))

    def without_constants(
        self, eqn: JaxprEqn, inputs: list[Value], source: Any
    ) -> Sequence[Value] | None:
        """Split a client's scan from those of its integer rows that depend on nothing placed. JAX
        puts predicates of the server there, which it needs in the backward pass."""
        avals: list[Any] = [v.aval for v in eqn.outvars]
        carry = scan_of(eqn.params).carry
        whole = [False] * carry + [_is_whole(aval) for aval in avals[carry:]]
        if all(whole) or not any(whole) or not any(is_client(v.at) for v in inputs):
            return None
        if _indices_inside(eqn.params):
            return None  # it depends on the client's index
        constant, used = part(alone(eqn), whole)
        if any(v.at != ANYWHERE for v, needed in zip(inputs, used, strict=True) if needed):
            return None
        rest, rest_used = part(alone(eqn), [not w for w in whole])
        found = iter(self.run(constant, list(compress(inputs, used)), source))
        others = iter(self.run(rest, list(compress(inputs, rest_used)), source))
        return [next(found if w else others) for w in whole]

    def add(
        self, eqn: JaxprEqn, inputs: list[Value], at: str, source: Any, indexed: bool = False
    ) -> Sequence[Value]:
        """Append a local equation, or return the outputs of an equal one made before."""
        try:
            params = tuple(sorted(eqn.params.items()))
            key = (eqn.primitive, hash(params) and params, tuple(inputs))
        except TypeError:
            key = None
        if has_effects(eqn):
            key = None
        if key is not None and key in self.made:
            return self.made[key]
        origin = Origin("", eqn.primitive.name, source)
        same = eqn.primitive.name in _SAME_TO_A_READER and not inputs[0].origin.primitive
        if same or eqn.primitive is source_p:
            origin = inputs[0].origin
        placed = [v.origin for v in inputs if v.at != ANYWHERE]
        if placed and all(o.captured for o in placed):
            origin = placed[0]
        outputs = tuple(Value(v.aval, at, origin) for v in eqn.outvars)
        if key is not None:
            self.made[key] = outputs
        return self.append(eqn, inputs, outputs, at, source, indexed=indexed)

    def append(
        self,
        eqn: JaxprEqn,
        inputs: Sequence[Value],
        outputs: tuple[Value, ...],
        at: str,
        source: Any,
        **more: Any,
    ) -> Sequence[Value]:
        placed = (tuple(inputs), outputs, at, source, has_effects(eqn))
        self.equations.append(Equation(eqn.primitive, eqn.params, *placed, **more))
        return outputs

    def source(self, eqn: JaxprEqn, inputs: list[Value], source: Any) -> Sequence[Value]:
        """Read a source mark (uncounted.py). Where it would mix placements, so does the value it
        was made for, whose error is clearer."""
        if len({v.at for v in inputs} - {ANYWHERE, OUTER}) > 1:
            return inputs[:1]
        outputs = self.add(eqn, inputs, self.join(inputs, eqn.primitive.name, source), source)
        self.marked[outputs[0]] = inputs[0]
        return outputs

    def communication(self, eqn: JaxprEqn, x: Value, source: Any) -> Sequence[Value]:
        placement = eqn.params["placement"]
        if eqn.primitive is broadcast_p:
            if is_client(x.at):
                refuse_broadcast(x, placement, self.where(source))
            return self.add(eqn, [x], placement, source)
        if not self.to_derive:  # any differentiation is done: sum the value itself
            x = self.marked.get(x, x)
        if x.at == SERVER or (is_client(x.at) and x.at != placement):
            refuse_sum(x, placement, self.where(source))
        if x.at == ANYWHERE and not _is_one(x):
            return self.constant_sum(x, placement, source)
        return self.add(eqn, [x], SERVER, source)

    def constant_sum(self, x: Value, placement: str, source: Any) -> Sequence[Value]:
        # The sum of a constant is the constant times the number of clients, which is sent once.
        def times_count(x: jax.Array) -> jax.Array:
            count = sum_p.bind(jnp.int32(1), placement=placement)  # as fg.mean counts
            return (x.astype(wide(x.dtype)) * count.astype(wide(x.dtype))).astype(x.dtype)

        jaxpr = jax.make_jaxpr(times_count)(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype))
        return self.run(jaxpr, [x], source)

    def index(self, placement: str, aval: Any) -> Value:
        if placement not in self.indices:
            aval = aval or jax.typeof(jnp.int32(0))
            self.indices[placement] = Value(aval, placement, Origin("the client's index"))
        return self.indices[placement]

    def join(self, inputs: Sequence[Value], operation: str, source: Any) -> str:
        """Return the one placement of these inputs."""
        placed: dict[str, Value] = {}
        for v in inputs:
            if v.at not in (ANYWHERE, OUTER):
                placed.setdefault(v.at, v)
        if len(placed) > 1:
            refuse_mix(placed, operation, self.where(source))
        unplaced = OUTER if any(v.at == OUTER for v in inputs) else ANYWHERE
        return next(iter(placed), unplaced)

    # --- control flow that communicates ---------------------------------------------------

    def control_flow(self, eqn: JaxprEqn, inputs: list[Value], source: Any) -> Sequence[Value]:
        read = CONTROL_FLOW.get(eqn.primitive, custom)
        bodies, placements = read(self, eqn, inputs, source)
        origin = Origin("", eqn.primitive.name, source)
        outputs = tuple(
            Value(v.aval, at, origin) for v, at in zip(eqn.outvars, placements, strict=True)
        )
        return self.append(eqn, inputs, outputs, "", source, bodies=tuple(bodies))

    def where(self, source: Any) -> str:
        return where(source, *self.around)

    def body(self, jaxpr: ClosedJaxpr, inputs: Sequence[Value], source: Any) -> Graph:
        reader = _Reader(self.nested, self.to_derive, self.derived)
        reader.around = (source, *self.around)
        # A body asks for the client's index through the outer graph, which has it as an input.
        reader.indices = self.indices
        outputs = reader.run(jaxpr, inputs, None)
        self.opened += reader.opened
        return Graph(tuple(inputs), tuple(reader.equations), tuple(outputs), self.indices)


def _indices_inside(params: dict[str, Any]) -> list[str]:
    names: dict[str, None] = {}
    for jaxpr in inner_jaxprs(params):
        for eqn in jaxpr.eqns:
            name = index_placement(eqn.primitive, eqn.params)
            names.update(dict.fromkeys(_indices_inside(eqn.params) + ([name] if name else [])))
    return list(names)


def _is_one(x: Value) -> bool:
    known = x.constant is not None and not isinstance(x.constant, jax.core.Tracer)
    return known and x.aval.shape == () and bool(x.constant == 1)


def _is_whole(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.integer))
