"""A converted module: JAX operations called in order. This file does not depend on PyTorch."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import ArgumentError, FederatedError, nearest
from fedgrad.core.primitives import promoting
from fedgrad.core.types import Key, Params
from fedgrad.pytorch.operations.long import Long


@dataclass(frozen=True)
class Ref:
    """A reference to a value by its name."""

    name: str


@dataclass(frozen=True)
class Call:
    """An operation with its arguments, in which a `Ref` stands for a value."""

    name: str  # the name of its result
    target: str  # PyTorch's name of the operation
    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dtype: Any  # the dtype of the result; None if it is not a single array
    shape: tuple[int | None, ...]  # the result's shape; None where it depends on the batch size
    draws: bool
    where: str  # its line in the user's code


@dataclass(frozen=True)
class Input:
    """An input with any number of examples, in PyTorch's dtype."""

    name: str
    shape: tuple[int, ...]  # the shape of one example
    dtype: Any


@dataclass(frozen=True)
class Array:
    """A parameter or buffer of a model, by its name in `params`."""

    name: str
    shape: tuple[int, ...]
    dtype: Any  # the dtype of the computation; in params it is a float
    trained: bool


@dataclass(frozen=True, eq=False)  # compared by identity, so that JAX can cache it
class Model:
    """A callable, `model(params, *inputs, key=None)`, that returns what the module returns."""

    name: str
    training: bool
    arrays: Mapping[str, Array]  # by the name of the value; tied parameters share an array
    inputs: tuple[Any, ...]  # pytrees of Input
    constants: Mapping[str, Any]
    calls: tuple[Call, ...]
    outputs: Any  # a pytree with Refs

    def __call__(self, params: Params, *inputs: Any, key: Key | None = None) -> Any:
        env: dict[str, Any] = dict(self.constants)
        self._check_params(params)
        self._check_key(key)
        for name, array in self.arrays.items():
            value = jnp.asarray(params[array.name])
            value = value if array.trained else jax.lax.stop_gradient(value)
            # Integer buffers are stored in params as floats, because derivatives need floats.
            inexact = jnp.issubdtype(array.dtype, jnp.inexact)
            env[name] = value if inexact else value.astype(array.dtype)
        env |= self._read(inputs)
        with _promoting():
            for number, call in enumerate(self.calls):
                args, kwargs = _filled((call.args, dict(call.kwargs)), env)
                if call.draws:
                    kwargs["noise"] = jax.random.fold_in(key, number)  # type: ignore[arg-type]
                env[call.name] = self._result(call, args, kwargs)
        self._check_outputs(env)
        return _filled(self.outputs, env)

    def __repr__(self) -> str:
        mode = "training" if self.training else "evaluation"
        takes = ", ".join(f"{x.name}: {_shown(x)}" for x in jax.tree.leaves(self.inputs))
        return f"{self.name} of PyTorch, in {mode} mode: model(params, {takes})"

    def _result(self, call: Call, args: Any, kwargs: Any) -> Any:
        try:
            result = _as(call.operation(*args, **kwargs), call.dtype)
        except FederatedError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            raise ArgumentError.here(
                f"{self.name} has {call.target} ({call.where}), which JAX does not compute here: "
                f"{said}. {_instead(call.target)}"
            ) from error
        if call.dtype is not None and not _fits(_shape(result), call.shape):
            raise ArgumentError.here(
                f"{self.name} has {call.target} ({call.where}), whose result has shape "
                f"{_shape(result)} here and {_any(call.shape)} in PyTorch. Either what was "
                "given as operations= is something else, or the module does something else with "
                "this number of examples, as x.squeeze() does with one: x.squeeze(1)."
            )
        return result

    def _read(self, given: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
        wanted, values = jax.tree.leaves(self.inputs), jax.tree.leaves(given)
        trees: list[Any] = [jax.tree.structure(tree) for tree in (given, self.inputs)]
        if trees[0] != trees[1]:
            raise ArgumentError.here(
                f"{self.name} was converted for inputs like {_like(self.inputs)}, but got "
                f"{_like(given)}. Call model(params, x) with what the example had."
            )
        values = [self._array(value) for value in values]
        rows = {value.shape[:1] for value in values}
        for one, value in zip(wanted, values, strict=True):
            kinds = [_kind(d) for d in (one.dtype, value.dtype)]
            if value.shape[1:] != one.shape or not value.ndim or kinds[0] != kinds[1]:
                raise ArgumentError.here(
                    f"{self.name} was converted for {one.name}: {_shown(one)}, but got "
                    f"{_shown(value)}. Any number of examples will do, along the first axis; for "
                    "another shape or kind of number, convert it with such an example."
                )
            if kinds[0] is jnp.integer and not _holds(one.dtype, value.dtype):
                kind = jnp.dtype(one.dtype).name
                raise ArgumentError.here(
                    f"{self.name} was converted for {one.name}: {_shown(one)}, but got "
                    f"{_shown(value)}, of which {kind} does not hold every number. If it holds "
                    f"yours, say so: x.astype({kind!r}); else convert it with an example of "
                    f"{value.dtype.name}."
                )
            if len(rows) > 1:
                raise ArgumentError.here(
                    f"{self.name} got inputs of different numbers of examples: {_like(given)}."
                )
            yield one.name, value.astype(one.dtype)  # e.g. 200 * x overflows in uint8

    def _array(self, value: Any) -> jax.Array:
        whole = isinstance(value, np.ndarray) and value.dtype.kind in "iu"
        kept = jax.dtypes.canonicalize_dtype(value.dtype if whole else np.int32)
        if whole and not fits(value, kept):
            raise ArgumentError.here(
                f"{self.name} got an input of {value.dtype.name} with numbers that {kept.name} "
                "does not hold, and JAX has no wider ones switched on. Make them smaller, such as "
                "x % size for places in a table, or switch 64 bits on before anything else: "
                "jax.config.update('jax_enable_x64', True)."
            )
        return jnp.asarray(value)

    def _check_outputs(self, env: Mapping[str, Any]) -> None:
        made = {call.name: f", of {call.target} ({call.where})" for call in self.calls}
        for leaf in jax.tree.leaves(self.outputs):
            if isinstance(leaf, Ref) and isinstance(env[leaf.name], Long):
                raise ArgumentError.here(
                    f"{self.name} returns whole numbers of 64 bits, PyTorch's int64"
                    f"{made.get(leaf.name, '')}: the 32 that JAX has may not hold them. Return "
                    "y.int(), where 32 will do in PyTorch too; or switch 64 on before anything "
                    "else: jax.config.update('jax_enable_x64', True)."
                )

    def _check_params(self, params: Params) -> None:
        names = {array.name for array in self.arrays.values()}
        if not isinstance(params, Mapping) or not names <= set(params):
            got = sorted(params) if isinstance(params, Mapping) else type(params).__name__
            missing = sorted(names - set(params if isinstance(params, Mapping) else ()))
            raise ArgumentError.here(
                f"{self.name} takes the params that fg.from_torch gave; there is no "
                f"{missing[0]!r} in {got}."
            )
        for array in self.arrays.values():
            if jnp.shape(params[array.name]) != array.shape:
                raise ArgumentError.here(
                    f"{array.name!r} of {self.name} has shape {array.shape}, but params has "
                    f"{jnp.shape(params[array.name])}. For many clients at once: jax.vmap(model)."
                )

    def _check_key(self, key: Key | None) -> None:
        draws = any(call.draws for call in self.calls)
        if key is None and draws:
            raise ArgumentError.here(
                f"{self.name} draws random numbers (dropout, in training): give it a key, "
                "model(params, x, key=key); a loss gets one if it has an argument `key`. To "
                "evaluate, convert it once more: fg.from_torch(module.eval(), example)."
            )
        if key is not None and not self.training and not draws:
            raise ArgumentError.here(
                f"{self.name} was converted in evaluation mode and draws nothing: leave the key "
                "out, or convert it in training mode: fg.from_torch(module.train(), example)."
            )


def _kind(dtype: Any) -> Any:
    """Return the kind of numbers that an input must have, or None if it has no numbers. Kinds do
    not mix: an integer mask is not accepted as a boolean one."""
    kinds = (jnp.complexfloating, jnp.floating, jnp.integer, jnp.bool_)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), None)


def fits(array: np.ndarray, kind: Any) -> bool:
    """Whether whole numbers stay what they are as those of another kind."""
    if array.dtype.kind not in "iu" or not array.size:
        return True
    limits = np.iinfo(kind)
    return bool(limits.min <= array.min() and array.max() <= limits.max)


def _holds(wanted: Any, given: Any) -> bool:
    """Whether a cast keeps every integer. int64 tokens are accepted for int32, as JAX's x64 setting
    decides which of them is used."""
    tokens = (wanted, given) == (jnp.int32, jnp.int64)
    return tokens or np.can_cast(given, wanted)


@contextlib.contextmanager
def _promoting() -> Iterator[None]:
    """Promote dtypes and ranks as PyTorch does; results are cast to the dtype they have there."""
    with promoting(), jax.numpy_rank_promotion("allow"):
        yield


def _as(result: Any, dtype: Any) -> Any:
    if dtype is None or not hasattr(result, "dtype") or result.dtype == dtype:
        return result
    return result.astype(dtype)


def _shape(result: Any) -> tuple[Any, ...]:
    return result.shape if isinstance(result, Long) else jnp.shape(result)


def _fits(shape: tuple[Any, ...], wanted: tuple[int | None, ...]) -> bool:
    pairs = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(n == m for n, m in pairs if m is not None)


def _any(shape: tuple[int | None, ...]) -> str:
    return f"({', '.join('any' if n is None else str(n) for n in shape)})"


def _instead(name: str, it: str = "it", is_: str = "it is") -> str:
    return (
        f"Write {it} with others, or say what {is_} in JAX: fg.from_torch(module, example, "
        f"operations={{{name!r}: lambda x, ...: ...}})."
    )


def _filled(tree: Any, env: Mapping[str, Any]) -> Any:
    """Replace the references in a pytree by their values."""
    return jax.tree.map(
        lambda leaf: env[leaf.name] if isinstance(leaf, Ref) else leaf,
        tree,
        is_leaf=lambda leaf: leaf is None or isinstance(leaf, slice),
    )


def _shown(array: Any) -> str:
    if isinstance(array, Input):
        return f"{jnp.dtype(array.dtype).name}[any, {', '.join(map(str, array.shape))}]"
    return f"{array.dtype.name}[{', '.join(map(str, array.shape))}]"  # may be that of keys


def _like(inputs: tuple[Any, ...]) -> str:
    shown = jax.tree.map(lambda x: _shown(x if isinstance(x, Input) else jnp.asarray(x)), inputs)
    return str(shown).replace("'", "")


def unknown(names: Mapping[str, str], known: list[str], module: str) -> ArgumentError:
    """Return the error for unknown operations, each with the user's line that called it."""
    calls = "".join(f"\n  {name}  {where}" for name, where in names.items())
    (first, *_) = names
    return ArgumentError.here(
        f"{module} has operations that fg.from_torch does not know:{calls}\n"
        + _instead(first, "them", "they are")
        + _hint(first, known)
    )


def _hint(name: str, known: list[str]) -> str:
    return nearest(name, known).partition(" Known:")[0]
