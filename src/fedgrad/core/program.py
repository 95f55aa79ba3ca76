"""A program: one function, written as the server and one client see it; and its operations.

The operations are `broadcast`, `sum`, and those that follow from them. All take any pytree.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from fedgrad.core.errors import ArgumentError, PlacementError, known_arguments, nearest, public
from fedgrad.core.graph import CLIENTS, Placement
from fedgrad.core.lossless import require_lossless
from fedgrad.core.primitives import (
    MEAN,
    broadcast_p,
    client_index,
    common,
    counted_p,
    inside,
    source_p,
    sum_p,
    wide,
)
from fedgrad.core.signature import left_to_pass
from fedgrad.core.types import Key


class Executor(Protocol):
    """Runs a program on arguments. Executors are immutable and hashable, and programs cache what
    was compiled for them. An executor that has to be closed (because it has connections, say) sets
    `remembers` and caches what it compiled itself."""

    def compile(self, program: "Program") -> Callable[[dict[str, Any]], Any]:
        """Return the program as a function of its arguments by name."""
        ...


@public
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A federated computation. Make one with `@fg.program(...)`; call it like a function.

    Client arguments are stacked pytrees (with a leading axis over clients) or cohorts. If it is
    called inside another program, it becomes a part of that program, and sees one client's values.

    A `fun` with a method `derive` is a derivative, which that method builds from the arguments
    instead of tracing it (trace.py).
    """

    fun: Callable[..., Any]
    placements: dict[str, Placement]
    executor: Executor | None = None
    derived: bool = False  # it is a derivative of another program
    # Receives the placement of each part of the result when the program is traced, and may refuse
    # it.
    look: Callable[[Any], None] | None = dataclasses.field(default=None)
    # These follow from the fields above, so `dataclasses.replace` makes them anew: the arguments of
    # `fun`, and the program's cache, which `.on(...)` shares so that nothing is compiled twice.
    signature: inspect.Signature = dataclasses.field(init=False)
    made: dict[Any, Any] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for attribute in (*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"):
            value = self.fun if attribute == "__wrapped__" else getattr(self.fun, attribute, None)
            object.__setattr__(self, attribute, value)
        object.__setattr__(self, "signature", left_to_pass(self.fun))
        parameters = self.signature.parameters
        for name, placement in self.placements.items():
            if name not in parameters:
                raise ArgumentError.here(
                    f"@fg.program({name}=...): {self.name} has no argument {name!r}."
                    + nearest(name, list(parameters))
                )
            if not isinstance(placement, Placement):
                raise ArgumentError.here(
                    f"@fg.program({name}={placement!r}): name a client placement, for example "
                    f"fg.CLIENTS. Arguments that are not named are at the server."
                )

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)

    def __repr__(self) -> str:
        placed = {name: f"{name}@{p.name}" for name, p in self.placements.items()}
        arguments = [placed.get(name, name) for name in self.signature.parameters]
        return f"Program({self.name}: {', '.join(arguments)})"

    @property
    def client_placements(self) -> tuple[str, ...]:
        """The names of the arguments' placements."""
        return tuple(dict.fromkeys(p.name for p in self.placements.values()))

    def on(self, executor: Executor | None) -> "Program":
        """Return the same program on another executor; None is the default one."""
        same = dataclasses.replace(self, executor=executor)
        object.__setattr__(same, "made", self.made)
        return same

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments by name, with defaults filled in."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError.here(f"{self.name}{self.signature}: {error}.") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call the function itself, on what one client and the server see."""
        bound = inspect.BoundArguments(self.signature, arguments)  # type: ignore[arg-type]
        return self.fun(*bound.args, **bound.kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.by_name(self.bind(args, kwargs))

    def by_name(self, arguments: dict[str, Any]) -> Any:
        """Call the program with all arguments by name, even positional-only ones."""
        if inside():
            self._require_placements()
            return self.call(arguments)
        require_lossless(arguments, f"{self.name}: the arguments")
        executor = self.executor or default_executor()
        return self._compiled(executor)(arguments)

    def _compiled(self, executor: Executor) -> Callable[[dict[str, Any]], Any]:
        if getattr(executor, "remembers", False):
            return executor.compile(self)
        return self.once(executor, lambda: executor.compile(self))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return `make()`, cached under `key`."""
        found = self.made.get(key)
        # dict.setdefault is atomic: two threads that make it at once end up with one.
        return found if found is not None else self.made.setdefault(key, make())

    def _require_placements(self) -> None:
        for name, placement in self.placements.items():
            if not inside(placement.name):
                raise PlacementError.here(
                    f"{self.name} is called inside of a program that has no clients "
                    f"{placement.name!r}, but its argument {name!r} is there. Give the outer "
                    f"program an argument at {placement!r}."
                )


@public
def program(fun: Callable[..., Any] | None = None, /, **placements: Placement) -> Any:
    """Decorate a function as a federated program.

        @fg.program(z=fg.CLIENTS)
        def mean_distance(x, z):
            return fg.mean(jnp.abs(fg.broadcast(x) - z))

    Args:
        fun: A function, written as the server and one client see it.
        **placements: The placement of each client argument, by name. Arguments that are not named
        are at the server.

    Returns:
        An `fg.Program`, which is called like the function.
    """
    if fun is not None and not callable(fun):
        raise ArgumentError.here(f"@fg.program decorates a function, got {fun!r}.")
    if fun is None:
        return public(lambda fun: program(fun, **placements))
    if next(iter(inspect.signature(fun).parameters), "") == "self":
        raise ArgumentError.here(
            f"{fun.__name__}: a method cannot be a program, because self is not data. Decorate a "
            "function inside of the method, which can use self."
        )
    return Program(fun, dict(placements))


_default: contextvars.ContextVar[Executor] = contextvars.ContextVar("fedgrad_executor")
_installed: list[Executor] = []


def install_default(executor: Executor) -> None:
    """Set the default executor. fedgrad.executors calls this once, because the core does not depend
    on any executor."""
    _installed[:] = [executor]


def default_executor() -> Executor:
    """Return the executor of programs that have none from `.on(...)`."""
    return _default.get(_installed[0])


@known_arguments()
@contextlib.contextmanager
def default(executor: Executor) -> Iterator[None]:
    """Set the executor of programs without `.on(...)`, within a `with` block.

    For example, to check a result against the definition:

        with fg.executors.default(fg.executors.reference()):
            program(x, cohort)
    """
    token = _default.set(executor)
    try:
        yield
    finally:
        _default.reset(token)


# --- the operations of a program --------------------------------------------------------------


@known_arguments()
def broadcast(x: Any, at: Placement = CLIENTS) -> Any:
    """Send a server value to every client of a placement.

    Args:
        x: A pytree of arrays, numbers or keys at the server.
        at: The placement of the clients.

    Returns:
        The same pytree at the clients.
    """
    _require_inside("broadcast", at)
    return jax.tree.map(lambda leaf: broadcast_p.bind(_array(leaf), placement=at.name), x)


@known_arguments()
def sum(x: Any, at: Placement = CLIENTS) -> Any:
    """Sum a client value over all clients of its placement; the result is at the server.

    Floating and complex dtypes are kept (float16 and bfloat16 are accumulated in float32). Integers
    and bools are widened first, as in `jnp.sum`: bool and signed to int32 (int64 under x64),
    unsigned to uint32 (uint64). Their sum is exact, and wraps where that of `jnp.sum` does, at 2^31
    without x64: cast what may be larger, `fg.sum(x.astype(float))`.

    Args:
        x: A pytree of arrays or numbers at clients.
        at: The placement of the clients.
    """
    _require_inside("sum", at)
    return jax.tree.map(lambda leaf: sum_p.bind(_summable(leaf), placement=at.name), x)


@known_arguments()
def mean(x: Any, weights: Any = None, at: Placement = CLIENTS, empty: float = 0.0) -> Any:
    """Return the mean over the clients: `sum(x) / sum(1)`, or `sum(w x) / sum(w)` with weights.

    A client of weight 0 does not count at all, even if its `x` is NaN; so give a client weight 0 to
    drop it. However many means a program takes, the number of clients, and the sum of the same
    weights, is sent once; inside of a loop, once per iteration.

    Args:
        x: A pytree of arrays or numbers at clients. Integers are averaged as floats, which do not
            wrap; float16 and bfloat16 are accumulated in float32.
        weights: One scalar per client. Integer weights are added up as floats, too; complex weights
            give a complex mean.
        at: The placement of the clients.
        empty: The mean if nobody counts (all weights are zero), with a zero derivative. Where
            weights cancel each other out (1 and -1) and the weighted values do not, the mean is a
            division by zero instead.
    """
    if weights is None:
        _require_inside("mean", at)
        count = sum_p.bind(jnp.int32(1), placement=at.name)
        return _ratios(x, sum(_floating(x), at), count, empty)
    weights = _array(weights)
    if weights.shape:
        raise ArgumentError.here(
            f"fg.mean takes one weight per client, so a scalar in the view of one client; got "
            f"shape {weights.shape}. Multiply first if you mean an elementwise product."
        )
    derivable = jnp.issubdtype(weights.dtype, jnp.inexact)
    if weights.dtype != jnp.bool_:  # a sum of bools is at most the number of clients
        weights = _floating(weights)
    counts = weights != (False if weights.dtype == jnp.bool_ else 0)
    if derivable:
        weights = source_p.bind(weights, counts)  # a weight may depend on the value that it weighs
    with jax.named_scope("weight"):
        total = sum(weights, at)

    def weighted(leaf: jax.Array) -> jax.Array:
        # 0 * NaN is NaN, so values of a dropped client that are not finite are zeroed first. Finite
        # ones stay: the derivative with respect to a weight of 0 needs them.
        kept = counted_p.bind(leaf, counts, seen=False)
        dtype = _weighted_dtype(leaf, weights)
        return weights.astype(dtype) * kept.astype(dtype)

    sums = sum(jax.tree.map(weighted, _floating(x)), at)
    return _ratios(x, sums, total, empty, by_zero=True)


@known_arguments()
def client_key(key: Key, at: Placement = CLIENTS) -> Key:
    """Return each client's own PRNG key, derived from one key of the server that is sent to all.

    The client folds in its own index. In a cohort sampled from a population this is the client's
    index in the population, so its key does not depend on who else was sampled.

    Args:
        key: A typed key at the server, `jax.random.key(0)`.
        at: The placement of the clients.
    """
    if not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key):
        raise ArgumentError.here(
            f"fg.client_key takes a typed key, jax.random.key(0); got {key!r}."
        )
    return jax.random.fold_in(broadcast(key, at), client_index(at.name))


def _require_inside(operation: str, at: Placement) -> None:
    if not isinstance(at, Placement):
        raise ArgumentError.here(f"fg.{operation}(..., at=) takes a fg.Placement, got {at!r}.")
    if not inside():
        raise PlacementError.here(
            f"fg.{operation} was called outside of a program, where there are no clients. "
            f"Call it in a function decorated with @fg.program(argument=fg.CLIENTS)."
        )
    if not inside(at.name):
        raise PlacementError.here(
            f"fg.{operation}(..., at={at.name}): no argument of this program is at {at.name}, so "
            f"nobody knows who these clients are. Name one: @fg.program(argument={at!r})."
        )


def _array(leaf: Any) -> jax.Array:
    require_lossless(leaf, "What is sent")
    try:
        return leaf if hasattr(leaf, "aval") else jnp.asarray(leaf)
    except TypeError:
        raise ArgumentError.here(
            f"Only arrays, numbers and keys can be sent, got {type(leaf).__name__}: {leaf!r}. "
            "Keep other things outside of the pytree."
        ) from None


def _summable(leaf: Any) -> jax.Array:
    leaf = _array(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ArgumentError.here("fg.sum: PRNG keys cannot be summed. Sum what you drew with them.")
    if jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == jnp.bool_:
        signed = not jnp.issubdtype(leaf.dtype, jnp.unsignedinteger)
        if leaf.dtype == jnp.bool_ or jnp.iinfo(leaf.dtype).bits < 32:
            leaf = leaf.astype(jnp.int32 if signed else jnp.uint32)
        return leaf.astype(jax.eval_shape(jnp.sum, leaf).dtype)
    return leaf


def _floating(x: Any) -> Any:
    """Cast leaves for averaging: integers to floats, and nothing narrower than float32, in which
    the sum over many clients could overflow."""

    def cast(leaf: Any) -> jax.Array:
        leaf = _summable(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf.astype(float)
        return leaf.astype(wide(leaf.dtype))

    return jax.tree.map(cast, x)


def _weighted_dtype(leaf: jax.Array, weights: jax.Array) -> Any:
    """Return the dtype of a mean of `leaf`: its own, made complex by complex weights."""
    if not jnp.issubdtype(weights.dtype, jnp.complexfloating):
        return leaf.dtype
    floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return common(leaf.dtype, jnp.complex64) if floating else weights.dtype


def _ratios(x: Any, sums: Any, count: jax.Array, empty: float, by_zero: bool = False) -> Any:
    """Return `sums / count`, or `empty` where the count is 0. With `by_zero`, a sum that is not
    zero is divided by zero there: its weights canceled each other out, which differs from nobody
    counting."""
    someone = count != 0

    def ratio(leaf: Any, total: jax.Array) -> jax.Array:
        mean = total / jnp.where(someone, count, 1).astype(total.dtype)
        instead = jnp.asarray(empty, total.dtype)
        if by_zero:  # without a derivative, which would have to wait for the sums
            left = jax.lax.stop_gradient(total)
            instead = jnp.where(left == 0, instead, left / jnp.zeros_like(left))
        mean = jnp.where(someone, mean, instead)
        dtype = _weighted_dtype(_array(leaf), total)
        return mean.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else mean

    with jax.named_scope(MEAN):
        return jax.tree.map(ratio, x, sums)
