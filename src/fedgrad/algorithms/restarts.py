"""Refuse schedules inside the clients' optimizer, which starts anew in every round."""

import functools
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedgrad.algorithms.hyper import depends_on_its_number
from fedgrad.algorithms.optimizer import start_of
from fedgrad.core.errors import ArgumentError


def require_no_restart(made: optax.GradientTransformation, params: Any) -> None:
    """Refuse a client optimizer that has a schedule inside.

    Some optax states occur only in schedules. Others contain a counter for a schedule or for
    another purpose (a bias correction). In that case the arguments of the optimizer decide: it is
    refused if one is a function of a single number whose value depends on that number. A constant
    schedule may restart.
    """
    state = jax.eval_shape(lambda p: start_of(made, p), params)
    counts, what = _counts(), ""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, counts))
    if not any(isinstance(node, counts) for node in nodes):
        if not any(map(_is_a_count, nodes)):
            return
        found = next(filter(depends_on_its_number, _given(made)), None)
        if found is None:
            return
        what = f" ({getattr(found, '__qualname__', found)}, a function of the count)"
    raise ArgumentError.here(
        f"client= has a schedule inside{what}, which would begin again in every round, because "
        "clients start their optimizer anew. Let it follow the number of the round: "
        "client=fg.optimizer(optax.sgd, learning_rate=schedule)."
    )


@functools.cache  # lazy: creating them is a JAX operation, which an import must not do
def _counts() -> tuple[type, ...]:
    """Return the optax states that count calls of a schedule. Not all have a public name."""
    constant = optax.constant_schedule(1.0)
    return (
        optax.ScaleByScheduleState,
        type(optax.WrappedSchedule(constant).init()),
        type(optax.add_decayed_weights(constant).init(None)),
    )


def _is_a_count(leaf: Any) -> bool:
    return leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)


def _given(made: optax.GradientTransformation) -> Iterator[Any]:
    """Yield every callable that was passed to an optimizer, found by walking its closures. `init`
    functions are skipped, and so are functions that belong to the method itself (the decay of
    Adafactor, the clipping of ADOPT)."""
    seen: dict[int, Any] = {}  # references keep the ids valid
    found = [("init", made.init), ("update", made.update)]
    while found:
        name, value = found.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if callable(value) and not name.startswith("init") and not _is_of_a_method(value):
            yield value
        found += _inside(name, value)


def _is_of_a_method(fun: Any) -> bool:
    """Return whether a function is defined in optax, outside its schedules."""
    module = str(getattr(fun, "__module__", ""))
    return module.startswith("optax.") and not module.startswith("optax.schedules.")


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the contents of a value by name; elements of a list have the name of the list."""
    if isinstance(value, type | ModuleType | BuiltinFunctionType | jax.Array):
        return []
    if isinstance(value, FunctionType):
        return _closure(value)
    if isinstance(value, MethodType):
        return [(name, value.__func__), ("self", value.__self__)]
    if isinstance(value, functools.partial):
        return [
            ("partial", value.func),
            *(("partial", x) for x in value.args),
            *value.keywords.items(),
        ]
    if isinstance(value, Mapping):
        return [(name, x) for x in value.values()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list | set | frozenset):
        return [(name, x) for x in value]
    return list(getattr(value, "__dict__", {}).items())  # an object, or a function under jax.jit


def _closure(fun: FunctionType) -> list[tuple[str, Any]]:
    cells = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
    found = [(name, _content(cell)) for name, cell in cells]
    defaults = [("default", x) for x in fun.__defaults__ or ()]
    return [*found, *defaults, *(fun.__kwdefaults__ or {}).items(), *fun.__dict__.items()]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
