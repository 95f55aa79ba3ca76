"""Marks what is evident about a client's contribution to a sum from how it was computed.

These are marks for a reader, not proofs: they find what is written plainly in the program. A value
without marks may still give a client away.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from fedgrad.core.graph import Equation, Exchange, Value
from fedgrad.core.primitives import CALLS, JaxprEqn, Literal, closed, primitives_inside

# Operations that only move, pick or convert their inputs.
_MOVES = frozenset(
    ("convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose")
    + ("slice", "dynamic_slice", "dynamic_update_slice", "gather", "concatenate", "copy", "rev")
    + ("pad", "stop_gradient", "counted", "source", "select_n", "sort", "split", "real", "imag")
)
_COMBINES = {"mul", "add", "sub", "neg", "div", "dot_general", "reduce_sum", "cumsum"}
_PICKS = {"reduce_max", "reduce_min"}
_BOUNDED = frozenset(
    ("tanh", "logistic", "sin", "cos", "sign", "erf", "is_finite")
    + ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor")
)
_OF_BOUNDED = _MOVES | frozenset(
    ("mul", "dot_general", "cumsum", "sqrt", "cbrt", "real", "imag", "argmax", "argmin")
    + ("reduce_sum", "reduce_or", "reduce_and", "reduce_max", "reduce_min", "reduce_precision")
    + ("round", "floor", "ceil", "exp2", "atan2")
)


@dataclass(frozen=True)
class Trait:
    """Known properties of one value at a client.

    `raw`: it is one of the client's arguments, at most moved, picked, or added to and multiplied
    with constants and other arguments. `indexed`: it depends on the client's index, other than
    through randomness. `low`, `high`: it has a bound that does not depend on the client's data.
    """

    raw: bool = False
    indexed: bool = False
    low: bool = False
    high: bool = False
    constant: bool = False

    @property
    def bounded(self) -> bool:
        return self.low and self.high


CONSTANT = Trait(low=True, high=True, constant=True)
SENT = Trait(low=True, high=True)  # the same for all clients
OWN = Trait(raw=True)
INDEX = Trait(indexed=True, low=True, high=True, constant=True)


def traits(exchange: Exchange, indices: Iterable[Value]) -> dict[Value, Trait]:
    """Return what is known about the values that clients add up in an exchange."""
    known = {received: SENT for _, received in exchange.down}
    for v in exchange.own:
        # A value kept from an earlier round: how it was made is not tracked.
        known[v] = Trait() if v.origin.primitive else OWN
    known.update((v, INDEX) for v in indices)

    def of(v: Value) -> Trait:
        return CONSTANT if v.constant is not None else known.get(v, CONSTANT)

    for equation in exchange.stage.equations:
        found = _results(equation, [of(v) for v in equation.inputs], len(equation.outputs))
        known.update(zip(equation.outputs, found, strict=True))
    return {sent: of(sent) for sent, _ in exchange.up}


def _results(eqn: Equation | JaxprEqn, inputs: Sequence[Trait], count: int) -> list[Trait]:
    if eqn.primitive in CALLS and not getattr(eqn, "indexed", False):
        return _through(closed(eqn.params[CALLS[eqn.primitive]]).jaxpr, inputs)
    return [_result(eqn.primitive.name, eqn.params, inputs)] * count


def _through(jaxpr: Any, inputs: Sequence[Trait]) -> list[Trait]:
    known: dict[Any, Trait] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> Trait:
        return CONSTANT if isinstance(atom, Literal) else known.get(atom, CONSTANT)

    for eqn in jaxpr.eqns:
        found = _results(eqn, [of(v) for v in eqn.invars], len(eqn.outvars))
        known.update(zip(eqn.outvars, found, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _result(name: str, params: Mapping[str, Any], inputs: Sequence[Trait]) -> Trait:
    if all(t.constant and not t.indexed for t in inputs):
        return CONSTANT
    drawn = name.startswith("random_") or any(
        p.name.startswith("random_") for p in primitives_inside(dict(params))
    )
    low, high = _bounds(name, params, inputs)
    cases = inputs[1:] if name == "select_n" else inputs  # the selector may be anything
    plain = all(t.raw or t.constant for t in cases)
    linear = name in _COMBINES and (name not in ("mul", "dot_general", "div") or plain)
    return Trait(
        raw=plain and any(t.raw for t in cases) and (name in _MOVES | _PICKS or linear),
        indexed=any(t.indexed for t in inputs) and not drawn,
        low=low,
        high=high,
        constant=all(t.constant for t in inputs),
    )


def _bounds(name: str, params: Mapping[str, Any], inputs: Sequence[Trait]) -> tuple[bool, bool]:
    everything = all(t.bounded for t in inputs)
    if name in _BOUNDED:
        return True, True
    if name == "clamp":  # min(max(least, x), most)
        least, x, most = inputs
        return most.low and (least.low or x.low), most.high or (least.high and x.high)
    if name in ("max", "min"):
        low, high = [t.low for t in inputs], [t.high for t in inputs]
        return (any(low), all(high)) if name == "max" else (all(low), any(high))
    if name in ("add", "neg", "sub", "abs", "exp", "square", "integer_pow"):
        return _arithmetic(name, params, inputs)
    if name == "div":
        return (everything, everything) if inputs[1].constant else (False, False)
    return everything and name in _OF_BOUNDED, everything and name in _OF_BOUNDED


def _arithmetic(name: str, params: Mapping[str, Any], inputs: Sequence[Trait]) -> tuple[bool, bool]:
    a = inputs[0]
    if name == "neg":
        return a.high, a.low
    if name == "exp":
        return True, a.high
    if name in ("abs", "square", "integer_pow"):
        power = params.get("y", 2)
        if power < 0:
            return False, False
        return a.bounded or power % 2 == 0, a.bounded
    b = inputs[1]
    if name == "sub":
        return a.low and b.high, a.high and b.low
    return a.low and b.low, a.high and b.high


def can_dominate(value: Value, trait: Trait) -> bool:
    """Whether one client can give the sum any value, as far as can be seen."""
    return not trait.bounded and value.aval.dtype != jnp.bool_
