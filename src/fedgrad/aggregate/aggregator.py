"""Other ways to sum, as a pass from plan to plan after differentiation.

An aggregator works on *the list of sums of one message*. Its `encode` ends the client's stage, and
its `decode` begins the server's work after that round, in loops too. Encoded values are ordinary
arrays that are summed like all others, so everything that reads the plan (traffic, audit, drawing,
exported stages) shows what is actually sent.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.errors import PlanError
from fedgrad.core.graph import SERVER, Equation, Exchange, Graph, Round, Value, changed
from fedgrad.core.primitives import jax_primitives
from fedgrad.core.trace import check

Arrays = Sequence[jax.Array]


@dataclass(frozen=True)
class Aggregator:
    """Defines how the sums of a message are computed.

    Args:
        name: The name in error messages.
        encode: At one client, maps the list of values to be summed to the list of arrays that it
            sends.
        decode: At the server, maps the sums of those arrays, and the shapes and dtypes of the
            values, to the sums of the values.
    """

    name: str
    encode: Callable[[Arrays], Arrays] = field(repr=False)
    decode: Callable[[Arrays, Sequence[jax.ShapeDtypeStruct]], Arrays] = field(repr=False)

    def applied(self, plan: Graph) -> Graph:
        """Return the same plan, with every message summed this way."""
        return plan if self is plain else changed(plan, self._graph)

    def _graph(self, graph: Graph) -> Graph:
        equations: list[Equation] = []
        for equation in graph.equations:
            if isinstance(equation, Round):
                pairs = [self._exchange(x) for x in equation.exchanges]
                equations.append(Round.of([x for x, _ in pairs]))
                equations += [e for _, decoding in pairs for e in decoding]
            else:
                equations.append(equation)
        return dataclasses.replace(graph, equations=tuple(equations))

    def _exchange(self, x: Exchange) -> tuple[Exchange, tuple[Equation, ...]]:
        """Return an exchange whose stage ends with encoding, and the decoding that follows it."""
        if not x.up:
            return x, ()
        values, totals = [v for v, _ in x.up], [total for _, total in x.up]
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in values]
        encoding = self._equations(self.encode, values)
        _check_sent(self.name, encoding.outputs)
        sent = [_sum_of(v, encoding, dict(x.up)) for v in encoding.outputs]
        decoding = self._equations(lambda sums: self.decode(sums, shapes), sent)
        _check(self.name, decoding.outputs, totals)
        stage = dataclasses.replace(
            x.stage,
            equations=(*x.stage.equations, *encoding.equations),
            outputs=(*encoding.outputs, *x.kept),
        )
        up = tuple(zip(encoding.outputs, sent, strict=True))
        named = [
            Equation(jax_primitives.copy_p, {}, (found,), (total,), SERVER, total.origin.source)
            for found, total in zip(decoding.outputs, totals, strict=True)
        ]
        exchange = dataclasses.replace(x, stage=stage, up=up)
        return exchange, (*decoding.equations, *named)

    def _equations(self, fun: Callable[[Any], Arrays], values: Sequence[Value]) -> Graph:
        """Trace a function of arrays to equations between values. They get the source line of the
        first value that has one."""

        def arrays(*xs: Any) -> list[Any]:
            found = fun(list(xs))
            if not isinstance(found, list | tuple):
                raise PlanError.here(
                    f"the aggregator {self.name!r}: encode and decode give a list of arrays; got "
                    f"{found!r}."
                )
            return list(found)

        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in values]
        jaxpr = jax.make_jaxpr(arrays)(*structs)
        source = next((v.origin.source for v in values if v.origin.source), None)
        return check(jaxpr, values, nested=True, source=source)


def _sum_of(encoded: Value, encoding: Graph, totals: Mapping[Value, Value]) -> Value:
    """Return the sum of an encoded value, with the source line of the first sum that is in it."""
    inside = {encoded}
    for equation in reversed(encoding.equations):
        if any(v in inside for v in equation.outputs):
            inside.update(equation.inputs)
    known = [totals[v].origin.source for v in totals if v in inside]
    source = next((s for s in known if s is not None), encoded.origin.source)
    return Value(encoded.aval, SERVER, dataclasses.replace(encoded.origin, source=source))


plain = Aggregator("plain", lambda values: values, lambda sums, shapes: sums)


def _check_sent(name: str, encoded: Sequence[Value]) -> None:
    dtypes = [str(v.aval.dtype) for v in encoded]
    if not dtypes or not all(jnp.issubdtype(v.aval.dtype, jnp.number) for v in encoded):
        raise PlanError.here(
            f"the aggregator {name!r} encodes {dtypes}: it gives at least one array, of numbers, "
            "because nothing else can be summed. Send bools as integers."
        )


def _check(name: str, found: Sequence[Value], wanted: Sequence[Value]) -> None:
    shapes = [str(v.aval.strip_weak_type()) for v in found]
    expected = [str(v.aval.strip_weak_type()) for v in wanted]
    if shapes != expected:
        raise PlanError.here(
            f"the aggregator {name!r} decodes {shapes} where the sums are {expected}: decode gives "
            "one array for each value that was encoded, of its shape and dtype."
        )
