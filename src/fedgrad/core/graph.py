"""The traced program as data: values that each have a placement, and equations between them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedgrad.core.primitives import Primitive, at_source, bind


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the program. Two values are the same only if they are the same object."""

    aval: Any
    at: str
    origin: Any = ""  # the user's name for it, or (primitive, source) of what made it
    shared: bool = False  # a store of examples that all simulated clients read
    constant: Any = None  # the value itself, if it is known while tracing

    @property
    def size(self) -> int:
        """Scalars; a PRNG key counts as the integers it is made of."""
        return int(np.prod(self.aval.shape)) * _key_words(self.aval)

    @property
    def bytes(self) -> int:
        if jax.dtypes.issubdtype(self.aval.dtype, jax.dtypes.prng_key):
            return self.size * 4
        return self.size * self.aval.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Equation:
    """`outputs = primitive(inputs)`, at one placement.

    Control flow that contains communication has the graphs of its bodies in `bodies`.
    """

    primitive: Primitive
    params: dict[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    at: str
    source: Any
    effects: bool = False
    indexed: bool = False  # its inner jaxpr asks for the client's index, which is its last input
    bodies: tuple["Graph", ...] = ()


@dataclass(frozen=True, eq=False)
class Graph:
    """A checked program: every value has a placement and no equation mixes them."""

    inputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Value, ...]
    indices: dict[str, Value] = field(default_factory=dict)  # "which client am I", by placement
    opened: tuple[str, ...] = ()  # lines of functions whose custom derivative was left behind


def evaluate(equations: Iterable[Equation], env: dict[Value, Any]) -> None:
    """Run local equations, adding what they compute to `env`."""
    for equation in equations:
        with at_source(equation.source):
            values = [read(env, v) for v in equation.inputs]
            results = bind(equation.primitive, equation.params, values)
        env.update(zip(equation.outputs, results, strict=True))


def read(env: dict[Value, Any], value: Value) -> Any:
    return value.constant if value.constant is not None else env[value]


def needed(
    equations: Sequence[Equation],
    roots: Iterable[Value],
    known: Callable[[Value], bool] = lambda v: False,
    always: Sequence[Equation] = (),
) -> tuple[list[Equation], list[Value]]:
    """The equations that `roots` and the equations `always` depend on, in order, stopping at known
    values; and those values."""
    wanted = {v: None for v in roots if v.constant is None}  # a dict keeps the order
    found = {v: None for v in wanted if known(v)}
    kept = []
    for equation in reversed(equations):
        if equation in always or any(v in wanted and v not in found for v in equation.outputs):
            kept.append(equation)
            for v in equation.inputs:
                if v.constant is None:
                    wanted[v] = None
                    if known(v):
                        found[v] = None
    kept.reverse()
    made = {v for equation in kept for v in equation.outputs}
    found.update((v, None) for v in wanted if v not in made)
    return kept, list(found)


def _key_words(aval: Any) -> int:
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return 1
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype))
    return int(np.prod(data.shape))
