"""Hyperparameters: a nested dict, each with a dotted name such as `server.learning_rate`.

Each is a number, or a schedule: a function of the round number.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import ArgumentError
from fedgrad.core.primitives import Literal, promoting
from fedgrad.core.types import Hyper

LOOKED_AT = 10_000  # how many rounds of a schedule are checked


class NoNumber:
    """A value that is a number only for a given round."""

    def _is_no_number(self, *_: Any) -> NoReturn:
        raise ArgumentError.here(
            f"A hyperparameter is a schedule, {self!r}, but is used as a number. Ask for the "
            "numbers of the round first: hyper = fg.hyper.at(hyper, round), where the state counts "
            "rounds: 0, 1, 2, ..."
        )

    # A round that forgets about schedules ends up in one of these.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _is_no_number
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = __abs__ = _is_no_number
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = _is_no_number
    __array__ = __jax_array__ = _is_no_number
    __array_ufunc__ = None  # makes numpy defer to us


@jax.tree_util.register_static
@dataclass(frozen=True)
class Schedule(NoNumber):
    """A hyperparameter that is a function of the round number: 0, 1, 2, ...

    It is a pytree node without leaves, so that all leaves of `hyper` are numbers.
    """

    value: Callable[[Any], Any]

    def at(self, round: Any) -> Any:
        """Return its number for a round. Schedules of optax rely on type promotion."""
        # Dividing an int32 gives a float32; with x64, schedules should be as exact as other
        # numbers.
        number = round if isinstance(round, int) else jnp.asarray(round, int)
        with promoting():
            return self.value(number)

    def values(self, rounds: int) -> np.ndarray:
        """Return its numbers for so many rounds, also under tracing."""
        with jax.ensure_compile_time_eval():
            return np.asarray(jax.vmap(self.at)(jnp.arange(rounds, dtype=jnp.int32)))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["factor"], meta_fields=["schedule"]
)
@dataclass(frozen=True)
class Scaled(NoNumber):
    """A schedule times a factor, which is a number: it can be changed, sampled and learned as
    `client.learning_rate.factor`. `fg.self_tuning(..., learn="client.learning_rate")` creates one
    from a schedule."""

    schedule: Schedule
    factor: Any = 1.0

    def at(self, round: Any) -> Any:
        """Return its number for a round."""
        with promoting():
            return self.factor * self.schedule.at(round)


def paths(hyper: Hyper) -> dict[str, Any]:
    """Return every hyperparameter that is a number or an array, by dotted name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(hyper)
    return {_dotted(path): leaf for path, leaf in leaves}


def schedules(hyper: Hyper) -> dict[str, Schedule]:
    """Return every hyperparameter that is a schedule, by dotted name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(hyper, is_leaf=_follows_rounds)
    return {
        _dotted(path): leaf.schedule if isinstance(leaf, Scaled) else leaf
        for path, leaf in leaves
        if _follows_rounds(leaf)
    }


def at(hyper: Hyper, round: Any) -> Hyper:
    """Return the hyperparameters of a round, all of them numbers; the first round is 0."""

    def value(leaf: Any) -> Any:
        return leaf.at(round) if _follows_rounds(leaf) else leaf

    return jax.tree.map(value, hyper, is_leaf=_follows_rounds)


def scalable(hyper: Hyper, names: str | Iterable[str]) -> Hyper:
    """Return the hyperparameters with every schedule at or below these names as a `Scaled` one,
    with a factor of 1."""
    chosen = [names] if isinstance(names, str) else list(names)

    def scaled(path: Any, leaf: Any) -> Any:
        name = _dotted(path)
        asked = any(name == one or name.startswith(f"{one}.") for one in chosen)
        return Scaled(leaf) if asked and _is_schedule(leaf) else leaf

    return jax.tree_util.tree_map_with_path(scaled, hyper, is_leaf=_is_schedule)


def multiplied(hyper: Hyper, names: Iterable[str], factor: Any) -> Hyper:
    """Return the hyperparameters with these, numbers or schedules, multiplied by a factor."""
    chosen = [*names]

    def times(path: Any, leaf: Any) -> Any:
        if _dotted(path) not in chosen:
            return leaf
        return Scaled(leaf, factor) if _is_schedule(leaf) else leaf * factor

    return jax.tree_util.tree_map_with_path(times, hyper, is_leaf=_is_schedule)


def with_schedules(hyper: Hyper) -> Hyper:
    """Return the hyperparameters with functions of the round number as checked `Schedule`s."""
    known, _ = _flatten(hyper)
    found = {name: leaf for name, leaf in known.items() if callable(leaf)}
    return replace(hyper, found) if found else hyper  # keeps the order


def depends_on_its_number(fun: Any) -> bool:
    """Return whether this is a function of one integer whose number or boolean depends on it."""
    try:
        jaxpr = jax.make_jaxpr(Schedule(fun).at)(jax.ShapeDtypeStruct((), jnp.int32)).jaxpr
    except Exception:  # not a function of a number
        return False
    if len(jaxpr.outvars) != 1 or jaxpr.outvars[0].aval.shape:
        return False
    reached = set(jaxpr.invars)
    for eqn in jaxpr.eqns:
        if any(v in reached for v in eqn.invars if not isinstance(v, Literal)):
            reached.update(eqn.outvars)
    (out,) = jaxpr.outvars
    return not isinstance(out, Literal) and out in reached


def select(hyper: Hyper, names: str | Iterable[str]) -> list[str]:
    """Return the dotted names of all leaves at or below these: `server` means all of its leaves."""
    known = _flatten(hyper)[0]
    chosen: list[str] = []
    for name in [names] if isinstance(names, str) else list(names):
        below = [p for p in known if p == name or p.startswith(f"{name}.")]
        if not below:
            raise ArgumentError.here(f"There is no hyperparameter {name!r}.", name, known)
        for path in below:
            require_number(path, known[path], "learned")
        chosen += [p for p in below if p not in chosen]
    return chosen


def require_number(name: str, leaf: Any, done: str) -> None:
    """Refuse a schedule where a number is to be `done`: learned, or drawn."""
    if _is_schedule(leaf):
        raise ArgumentError.here(
            f"{name!r} is a schedule, {leaf.value!r}: the number of the round says what it is, so "
            f"it cannot be {done} as well. Leave it out, give it a number to start from, or a "
            f"factor that can be {done}: fg.hyper.scalable(hyper, {name!r})."
        )


def replace(hyper: Hyper, values: Mapping[str, Any]) -> Hyper:
    """Return the hyperparameters with some changed, by dotted name or nested; a function of the
    round number is a schedule."""
    known, tree = _flatten(hyper)
    values, _ = _flatten(dict(values), or_none=True)
    for name, value in values.items():
        if name not in known:
            raise ArgumentError.here(f"There is no hyperparameter {name!r}.", name, known)
        if value is None:
            raise ArgumentError.here(f"{name!r} is None. Give a number, or leave it out.")
    new = [_checked(name, values.get(name, leaf)) for name, leaf in known.items()]
    return jax.tree.unflatten(tree, new)


def _flatten(hyper: Hyper, or_none: bool = False) -> tuple[dict[str, Any], Any]:
    def is_leaf(x: Any) -> bool:
        return _is_schedule(x) or (or_none and x is None)

    leaves, tree = jax.tree_util.tree_flatten_with_path(hyper, is_leaf=is_leaf)
    return {_dotted(path): leaf for path, leaf in leaves}, tree


def _is_schedule(leaf: Any) -> bool:
    return isinstance(leaf, Schedule)


def _follows_rounds(leaf: Any) -> bool:
    return isinstance(leaf, Schedule | Scaled)


def _gives_a_number(fun: Any) -> bool:
    """Return whether this is a schedule: a function from a round number to a number."""
    try:
        found = jax.eval_shape(Schedule(fun).at, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception:  # not a function of a round number
        return False
    real = isinstance(found, jax.ShapeDtypeStruct) and not found.shape
    return real and jnp.isdtype(found.dtype, ("real floating", "integral"))


def _checked(name: str, leaf: Any) -> Any:
    if isinstance(leaf, str | bytes):
        raise ArgumentError.here(f"{name!r} is the text {leaf!r}. Give a number.")
    if not callable(leaf):
        return leaf
    if not _gives_a_number(leaf):
        raise ArgumentError.here(
            f"{name!r} is a function, so it should give one number for the number of a round, an "
            f"integer that JAX traces; {leaf!r} does not. Write it with jax.numpy, without a "
            "Python `if`, or take a schedule of optax."
        )
    return Schedule(leaf)


_dotted = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
