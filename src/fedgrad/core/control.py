"""JAX's control flow: the layout of its equations, and the same equations with other bodies.

This is the only file that reads the parameters of scan, while and cond. Their layout changes with
JAX's version; tests/core/test_jax_layout.py fails when it does and says what to look at.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax

from fedgrad.core.primitives import ClosedJaxpr, Primitive, closed, jax_primitives

Body = Callable[[list[Any]], list[Any]]
# In Python, the body of a loop gets the number of its iteration; None if that depends on data.
PythonBody = Callable[..., list[Any]]
T = TypeVar("T")


class Rows(Protocol):
    """Access to rows of arrays, as needed to run loops in Python."""

    def row(self, x: Any, i: int) -> Any:
        """Return a row of an array that a scan iterates over."""

    def stacked(self, rows: Sequence[Any]) -> Any:
        """Stack rows into one array."""


class Control(ABC):
    """One equation of control flow. `bodies` are its jaxprs, in the order in which `rebuilt` takes
    the functions that replace them."""

    bodies: tuple[ClosedJaxpr, ...]

    @property
    @abstractmethod
    def times(self) -> int | None:
        """The number of iterations; None if it depends on data."""

    @abstractmethod
    def seen(self, inputs: Sequence[T]) -> list[list[T | None]]:
        """Return, for each body, the outer value that each of its inputs always equals (for a
        scanned array, a row of it); None for inputs that change between iterations."""

    @abstractmethod
    def rebuilt(self, inputs: Sequence[Any], bodies: Sequence[Body]) -> list[Any]:
        """Run the same control flow with other bodies, each a function of the inputs of the jaxpr
        that it replaces."""

    @abstractmethod
    def in_python(self, inputs: Sequence[Any], bodies: Sequence[PythonBody], by: Rows) -> list[Any]:
        """Run the same control flow in Python, iteration by iteration. With no iterations there are
        no stacked outputs."""


@dataclass(frozen=True, eq=False)
class Scan(Control):
    """A scan. Inputs: constants, carry, scanned arrays. Outputs: carry, stacked rows."""

    consts: int
    carry: int
    length: int
    reverse: bool
    unroll: Any
    bodies: tuple[ClosedJaxpr, ...]

    @property
    def times(self) -> int:
        return self.length

    @property
    def order(self) -> Sequence[int]:
        """The iterations, in the order in which they run."""
        forward = range(self.length)
        return forward[::-1] if self.reverse else forward

    def split(self, inputs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split inputs into constants, carry and scanned arrays."""
        n, m = self.consts, self.consts + self.carry
        return list(inputs[:n]), list(inputs[n:m]), list(inputs[m:])

    def split_outputs(self, outputs: Sequence[T]) -> tuple[list[T], list[T]]:
        """Split outputs into carry and rows."""
        return list(outputs[: self.carry]), list(outputs[self.carry :])

    def seen(self, inputs: Sequence[T]) -> list[list[T | None]]:
        consts, carry, xs = self.split(inputs)
        return [[*consts, *[None] * len(carry), *xs]]

    def rebuilt(self, inputs: Sequence[Any], bodies: Sequence[Body]) -> list[Any]:
        consts, start, xs = self.split(inputs)

        def step(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            return self.split_outputs(bodies[0]([*consts, *carry, *rows]))

        options = {"length": self.length, "reverse": self.reverse, "unroll": self.unroll}
        carry, ys = jax.lax.scan(step, start, xs, **options)
        return [*carry, *ys]

    def in_python(self, inputs: Sequence[Any], bodies: Sequence[PythonBody], by: Rows) -> list[Any]:
        consts, carry, xs = self.split(inputs)
        rows: list[list[Any]] = [[] for _ in self.order]
        for i in self.order:
            out = bodies[0]([*consts, *carry, *[by.row(x, i) for x in xs]], i)
            carry, rows[i] = self.split_outputs(out)
        return [*carry, *[by.stacked(column) for column in zip(*rows, strict=True)]]


@dataclass(frozen=True, eq=False)
class While(Control):
    """A while loop. Inputs: constants of the condition, constants of the body, carry. Outputs:
    carry. The bodies are the condition and the body."""

    cond_consts: int
    body_consts: int
    bodies: tuple[ClosedJaxpr, ...]

    @property
    def times(self) -> None:
        return None

    def split(self, inputs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split inputs into constants of the condition, constants of the body, and carry."""
        n, m = self.cond_consts, self.cond_consts + self.body_consts
        return list(inputs[:n]), list(inputs[n:m]), list(inputs[m:])

    def seen(self, inputs: Sequence[T]) -> list[list[T | None]]:
        of_cond, of_body, carry = self.split(inputs)
        changing = [None] * len(carry)
        return [[*of_cond, *changing], [*of_body, *changing]]

    def rebuilt(self, inputs: Sequence[Any], bodies: Sequence[Body]) -> list[Any]:
        of_cond, of_body, start = self.split(inputs)
        cond, body = bodies

        def goes_on(carry: Any) -> Any:
            return cond([*of_cond, *carry])[0]

        return list(jax.lax.while_loop(goes_on, lambda c: body([*of_body, *c]), start))

    def in_python(self, inputs: Sequence[Any], bodies: Sequence[PythonBody], by: Rows) -> list[Any]:
        of_cond, of_body, carry = self.split(inputs)
        cond, body = bodies
        while cond([*of_cond, *carry], None)[0]:
            carry = body([*of_body, *carry], None)
        return carry


@dataclass(frozen=True, eq=False)
class Cond(Control):
    """A cond. Inputs: the index of the branch, then the operands of every branch. The bodies are
    the branches."""

    bodies: tuple[ClosedJaxpr, ...]

    @property
    def times(self) -> None:
        return None

    def seen(self, inputs: Sequence[T]) -> list[list[T | None]]:
        return [list(inputs[1:]) for _ in self.bodies]

    def rebuilt(self, inputs: Sequence[Any], bodies: Sequence[Body]) -> list[Any]:
        branches = [lambda *xs, b=body: b(list(xs)) for body in bodies]
        return list(jax.lax.switch(inputs[0], branches, *inputs[1:]))

    def in_python(self, inputs: Sequence[Any], bodies: Sequence[PythonBody], by: Rows) -> list[Any]:
        chosen = min(max(int(inputs[0]), 0), len(bodies) - 1)  # clamped, as JAX does
        return bodies[chosen](list(inputs[1:]))


# --- The layout of JAX's parameters -----------------------------------------------------------


def scan_of(params: dict[str, Any]) -> Scan:
    if "ft_in" in params:  # since JAX 0.11: the trees of constants, carry and scanned arrays
        consts, carry, _ = map(len, params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
    return Scan(
        consts,
        carry,
        int(params["length"]),
        params["reverse"],
        params["unroll"],
        (closed(params["jaxpr"]),),
    )


def while_of(params: dict[str, Any]) -> While:
    bodies = closed(params["cond_jaxpr"]), closed(params["body_jaxpr"])
    return While(params["cond_nconsts"], params["body_nconsts"], bodies)


def cond_of(params: dict[str, Any]) -> Cond:
    return Cond(tuple(map(closed, params["branches"])))


_READERS: dict[Primitive, Callable[[dict[str, Any]], Control]] = {
    jax_primitives.scan_p: scan_of,
    jax_primitives.while_p: while_of,
    jax_primitives.cond_p: cond_of,
}


def control(primitive: Primitive, params: dict[str, Any]) -> Control | None:
    """Return the equation's control flow, or None if it has none."""
    read = _READERS.get(primitive)
    return None if read is None else read(params)


def text_of(jaxpr: Any) -> str:
    """Return a jaxpr as text that is the same whenever the same program is traced: without
    addresses, and without the trees in which a scan since JAX 0.11 remembers its origin."""
    return re.sub(r" at 0x[0-9a-f]+|\bft_(?:in|out)=.*", "", str(jaxpr))
