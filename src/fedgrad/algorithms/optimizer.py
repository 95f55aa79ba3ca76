"""optax optimizers whose hyperparameters stay arguments: `fg.optimizer(optax.sgd, ...)`."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedgrad.algorithms.hyper import at, with_schedules
from fedgrad.algorithms.parametrization import DEFAULT_BOUNDS
from fedgrad.algorithms.roots import with_roots_of_zero
from fedgrad.core.errors import ArgumentError, public
from fedgrad.core.primitives import promoting, wide


@public
@dataclass(frozen=True, repr=False)
class Optimizer:
    """A factory of an optax optimizer, and the hyperparameters to call it with."""

    make: Callable[..., optax.GradientTransformation]
    hyper: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # Hyperparameters that are functions of the round number, or contain one (by layer).
    schedules: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        said = {**self.hyper, **self.fixed, **dict.fromkeys(self.schedules, "a schedule")}
        name = getattr(self.make, "__name__", "<lambda>").replace("<lambda>", "optimizer")
        return f"{name}({', '.join(f'{n}={v}' for n, v in said.items())})"

    @property
    def defaults(self) -> dict[str, Any]:
        """All hyperparameters: numbers, and functions of the round number."""
        return {**self.hyper, **self.schedules}

    @property
    def words(self) -> str:
        """The name: `sgd`, or `adaptive, second_moment=adam`."""
        name = getattr(self.make, "__name__", type(self.make).__name__)
        plain = {n: v for n, v in self.fixed.items() if isinstance(v, str | int | float)}
        first = in_words(self.make) if name == "<lambda>" else name
        return ", ".join([first, *(f"{n}={v}" for n, v in plain.items())])

    def build(self, hyper: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
        """Return the optimizer with these hyperparameters, which may be traced."""
        arguments = {**self.fixed, **self.schedules, **hyper}
        rates = arguments.get("learning_rate")
        if not isinstance(rates, Mapping):
            return optax.with_extra_args_support(self.make(**arguments))
        made = self.make(**{**arguments, "learning_rate": 1.0})
        return optax.with_extra_args_support(optax.chain(made, _scale_by(rates)))


@public
def optimizer(make: Callable[..., optax.GradientTransformation], **arguments: Any) -> Optimizer:
    """Return an optimizer whose float arguments are hyperparameters.

    Hyperparameters can be changed or learned. Functions of the round number become schedules; other
    arguments stay fixed. A function counts as a schedule where `make` expects a number, according
    to the default or annotation of its parameter (`decay=0.5` or `decay: float`), or according to
    its name, such as `learning_rate` or `momentum`.

    Args:
        make: A factory of optax optimizers, such as `optax.sgd`.
        **arguments: Its arguments. `learning_rate` may be a dict like the model's outer one,
            `{"dense": 0.1, "out": 1.0}`: a rate for each layer.

    Returns:
        An `fg.Optimizer`, for `server=` or `client=`.

    Raises:
        ArgumentError: If an argument is unknown or missing, or a learning rate is negative.

    Example:

        fg.optimizer(optax.sgd, learning_rate=1.0, momentum=0.9)
    """
    known = _signature(make).parameters
    for name in arguments:
        if name not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise ArgumentError.here(f"{make.__name__} has no argument {name!r}.", name, known)
    missing = [
        name
        for name, p in known.items()
        if p.default is p.empty and name not in arguments and p.kind is not p.VAR_KEYWORD
    ]
    if missing:
        raise ArgumentError.here(
            f"{make.__name__} needs {missing[0]!r}: "
            f"fg.optimizer(optax.{make.__name__}, {missing[0]}=...)."
        )
    if "learning_rate" in arguments:  # 1 means 1.0
        arguments["learning_rate"] = jax.tree.map(
            lambda rate: float(rate) if type(rate) is int else rate, arguments["learning_rate"]
        )
        for rate in jax.tree.leaves(arguments["learning_rate"]):
            if isinstance(rate, float) and rate < 0:
                raise ArgumentError.here(
                    f"learning_rate={rate}: with less than 0 the loss goes up. Give 0 or more."
                )
    hyper = {name: value for name, value in arguments.items() if _is_float(value)}
    scheduled = {n: v for n, v in arguments.items() if _is_scheduled(v, n, known.get(n))}
    varied = {*hyper, *scheduled}
    fixed = {name: value for name, value in arguments.items() if name not in varied}
    made = Optimizer(make, hyper, fixed, scheduled)
    if isinstance(arguments.get("learning_rate"), Mapping):
        _require_proportional(made)
    return made


def as_optimizer(found: Any, what: str, others: str = "") -> Optimizer:
    """Return an `Optimizer` as it is; wrap an optax optimizer as one without hyperparameters."""
    if isinstance(found, Optimizer):
        return found
    if isinstance(found, optax.GradientTransformation):
        return Optimizer(lambda: found, {})
    raise ArgumentError.here(
        f"{what}= takes an optimizer{others}, got {found!r}. Write {what}=optax.sgd(1.0), or "
        f"{what}=fg.optimizer(optax.sgd, learning_rate=1.0) to be able to learn its learning rate."
    )


def in_words(made: Any) -> str:
    """Describe an optax optimizer: `scale_by_adam(b1=0.9, ...), scale(step_size=-0.1)`. The
    description is read from the closures of its functions."""
    return ", ".join(_held_by(made, ())) or "an optimizer of optax"


def _held_by(part: Any, around: tuple[Any, ...]) -> list[str]:
    if isinstance(part, optax.GradientTransformation):
        return _held_by(part.update, around)
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, tuple | list):
        return [words for one in part for words in _held_by(one, around)]
    if not isinstance(part, types.FunctionType) or part in around:
        return []
    cells = [_content(cell) for cell in part.__closure__ or ()]
    held = dict(zip(part.__code__.co_freevars, cells, strict=True))
    plain = [f"{n}={v}" for n, v in held.items() if _is_plain(v)]
    maker = part.__qualname__.partition(".<locals>")[0]
    own = [f"{maker}({', '.join(plain)})"] if plain else []
    return own + [words for v in cells for words in _held_by(v, (*around, part))]


def _is_plain(value: Any) -> bool:
    number = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return isinstance(value, str | int | float | np.generic) or (number and value.ndim == 0)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name is not bound yet
        return None


def widened(tree: Any) -> Any:
    """Return the tree with half precision as float32, in which optimizers and averages compute."""

    def one(leaf: Any) -> Any:
        dtype = jnp.result_type(leaf)
        return leaf if wide(dtype) == dtype else leaf.astype(wide(dtype))

    return jax.tree.map(one, tree)


def start_of(made: optax.GradientTransformation, params: Any) -> Any:
    """Return the first state of an optimizer, in at least float32: in float16 the small constants
    of most optimizers (1e-8) are 0, and squares of gradients are 0 or infinite."""
    with promoting():
        return made.init(widened(params))


def apply(
    made: optax.GradientTransformationExtraArgs,
    gradient: Any,
    state: Any,
    params: Any,
    **extra: Any,
) -> tuple[Any, Any]:
    """Take a step and return (params, state), with unchanged dtypes. It is computed in at least
    float32, and is differentiable where the optimizer takes the square root of 0."""
    update = with_roots_of_zero(made.update)
    with promoting():
        updates, new = update(widened(gradient), state, widened(params), **extra)
        params = optax.apply_updates(params, updates)
    return params, jax.tree.map(lambda a, old: jnp.asarray(a, jnp.result_type(old)), new, state)


def _is_float(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(map(is_number, leaves))


def is_number(x: Any) -> bool:
    """Return whether this is a floating-point number, or an array of them."""
    return isinstance(x, float) or (
        isinstance(x, np.generic | np.ndarray | jax.Array) and jnp.isdtype(x.dtype, "real floating")
    )


def _is_scheduled(value: Any, name: str, parameter: inspect.Parameter | None) -> bool:
    """Return whether this contains a schedule: a function where a number is expected. Where the
    factory expects something else, or does not say, a function is passed on to it."""
    leaves = jax.tree.leaves(value)
    if not any(map(callable, leaves)) or not all(is_number(x) or callable(x) for x in leaves):
        return False
    if name in DEFAULT_BOUNDS:
        return True
    return parameter is not None and (
        _is_float(jax.tree.map(lambda x: float(x) if type(x) is int else x, parameter.default))
        or any(_is_of_numbers(one) for one in _alternatives(parameter.annotation))
    )


def _is_of_numbers(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, float | np.floating | jax.Array)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _signature(make: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(make, eval_str=True)
    except Exception:  # an annotation refers to a missing name
        return inspect.signature(make)


def _scale_by(rates: Mapping[str, Any]) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(rate: Any, below: Any) -> Any:
            return jax.tree.map(lambda u: rate * u, below)

        return jax.tree.map(scaled, rates, updates), state

    def init(params: Any) -> Any:
        try:
            jax.tree.map(lambda rate, below: None, rates, params)
        except ValueError:
            raise ArgumentError.here(
                f"The learning rates of {sorted(rates)} do not fit the model: it needs one for "
                f"each of its outer entries, {jax.tree.structure(params)}."
            ) from None
        return optax.EmptyState()

    return optax.GradientTransformation(init, update)


def _require_proportional(made: Optimizer) -> None:
    """Refuse per-layer rates if some steps with a rate of 2 are not twice those with a rate of 1,
    in an optimizer that sees where they lead."""
    gradients = jnp.array([[0.3, 0.7], [-0.2, 0.5], [0.4, 0.1], [0.1, -0.6]])
    others = at(with_schedules(made.defaults), 0)

    def steps(rate: float, times: float) -> Any:
        one = made.make(**{**made.fixed, **others, "learning_rate": rate})
        x, updates = jnp.array([0.01, -0.02]), []
        state = one.init(x)
        for gradient in gradients:
            update, state = one.update(gradient, state, x)
            updates.append(times * update)
            x = x + updates[-1]
        return jnp.stack(updates)

    if not np.allclose(steps(1.0, 2.0), steps(2.0, 1.0), rtol=1e-3, atol=0):
        raise ArgumentError.here(
            f"The updates of {made.make.__name__} are not proportional to its learning rate, so it "
            "cannot have one for each layer. Give one number."
        )
