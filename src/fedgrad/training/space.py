"""Search spaces: ranges and choices of hyperparameters, sampled at random or as a grid."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.clients.sampling import read_key
from fedgrad.core.errors import ArgumentError, known_arguments, public
from fedgrad.core.lossless import require_lossless
from fedgrad.core.types import Hyper, Key

EXAMPLE = "fg.log_uniform(1e-3, 10), or fg.choice([0.1, 1.0])"


@public
@dataclass(frozen=True, repr=False)
class Range:
    """A distribution of a hyperparameter: see `uniform`, `log_uniform` and `choice`."""

    text: str
    draw: Callable[[jax.Array, int], jax.Array]
    values: tuple[float, ...] = ()  # all values, if there are finitely many
    logarithmic: bool | None = None  # whether the scale is logarithmic, if known

    def __repr__(self) -> str:
        return f"fg.{self.text}"

    def __call__(self, key: Key, trials: int) -> jax.Array:
        """Draw one value for each trial."""
        return self.draw(key, trials)


# A range, or any function (key, number of trials) -> one value per trial.
Draws = Range | Callable[[jax.Array, int], jax.Array]


@known_arguments()
def uniform(low: float, high: float) -> Range:
    """Return the uniform distribution between two numbers."""
    _require_ordered("uniform", low, high)
    return Range(
        f"uniform({low}, {high})",
        lambda key, n: jax.random.uniform(key, (n,), minval=low, maxval=high),
        logarithmic=False,
    )


@known_arguments()
def log_uniform(low: float, high: float) -> Range:
    """Return the log-uniform distribution between two positive numbers."""
    _require_ordered("log_uniform", low, high)
    if low <= 0:
        raise ArgumentError.here(f"log_uniform({low}, {high}): both must be positive.")
    return Range(
        f"log_uniform({low}, {high})",
        lambda key, n: jnp.exp(
            jax.random.uniform(key, (n,), minval=jnp.log(low), maxval=jnp.log(high))
        ),
        logarithmic=True,
    )


@known_arguments()
def choice(values: Iterable[float]) -> Range:
    """Return the uniform distribution over these values. `fg.grid_search` tries each of them."""
    found = tuple(values) if isinstance(values, Iterable) else (values,)
    if not found or not all(map(_is_number, found)):
        raise ArgumentError.here(
            f"choice({values!r:.60}): give the values to choose from, which are finite numbers: "
            "fg.choice([0.1, 0.3, 1.0])."
        )
    numbers = tuple(map(float, found))
    return Range(
        f"choice({list(numbers)})",
        lambda key, n: jax.random.choice(key, jnp.asarray(numbers), (n,)),
        numbers,
    )


def drawn(
    algorithm: Algorithm, space: Mapping[str, Draws], trials: int, key: Key
) -> dict[str, jax.Array]:
    """Draw one value of each hyperparameter for each trial."""
    _require_names(algorithm, space)
    for name, one in space.items():
        if not callable(one):
            raise ArgumentError.here(
                f"space={{{name!r}: {one!r}}}: give a range, such as {EXAMPLE}."
            )
    read_key(key)
    keys = jax.random.split(jax.random.fold_in(key, 1), len(space))
    return {
        name: _values(name, space[name], k, trials)
        for name, k in zip(sorted(space), keys, strict=True)
    }


def combined(algorithm: Algorithm, space: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return all combinations of the values of the hyperparameters, one for each trial."""
    _require_names(algorithm, space)
    every = {}
    for name in sorted(space):
        one = space[name]
        if not isinstance(one, Range) and not callable(one):
            one = choice(one)
        if not getattr(one, "values", ()):
            raise ArgumentError.here(
                f"space={{{name!r}: {getattr(one, 'text', one)}}}: a grid has values that can be "
                "counted. Write fg.choice([0.1, 0.3, 1.0]), or draw at random: fg.random_search."
            )
        every[name] = one.values
    require_lossless(every, "space=")
    columns = zip(*itertools.product(*every.values()), strict=True)
    return {name: jnp.asarray(column) for name, column in zip(every, columns, strict=True)}


def with_trial(hyper: Hyper, tried: Mapping[str, Any], trial: Any) -> Hyper:
    """Return the hyperparameters of one trial, or of several."""
    return names_of.replace(hyper, {name: values[trial] for name, values in tried.items()})


def _values(name: str, one: Draws, key: Key, trials: int) -> jax.Array:
    try:
        found = jnp.asarray(one(key, trials))
    except TypeError as error:
        raise ArgumentError.here(
            f"space={{{name!r}: {one!r}}} is called with (key, number of trials), which fails: "
            f"{error}. Write a range, such as {EXAMPLE}."
        ) from error
    if found.shape != (trials,) or not np.isfinite(np.asarray(found, float)).all():
        raise ArgumentError.here(
            f"space={{{name!r}: {one!r}}} gives {found.dtype}{list(found.shape)}, and not one "
            f"finite number for each of {trials} trials."
        )
    return found


def _require_names(algorithm: Algorithm, space: Any) -> None:
    if not isinstance(space, Mapping) or not space:
        raise ArgumentError.here(
            f"A search needs something to try, by name, got {space!r:.60}: "
            f'space={{"server.learning_rate": fg.log_uniform(1e-3, 10)}}.'
        )
    known, scheduled = names_of.paths(algorithm.hyper), names_of.schedules(algorithm.hyper)
    for name in space:
        names_of.require_number(name, scheduled.get(name), "drawn")
        if name not in known:
            raise ArgumentError.here(f"There is no hyperparameter {name!r}.", str(name), known)
        if shape := jnp.shape(known[name]):
            raise ArgumentError.here(
                f"{name!r} is {jnp.result_type(known[name])}{list(shape)}, and a search tries "
                "numbers: a list has one for each trial. Give each entry of the array a name, "
                f"{{{name!r}: {{'a': 0.1, 'b': 1.0}}}}, or search over a number that multiplies it."
            )


def _require_ordered(what: str, low: Any, high: Any) -> None:
    if not (_is_number(low) and _is_number(high) and low < high):
        raise ArgumentError.here(
            f"{what}({low!r}, {high!r}): a range is of two finite numbers, the smaller one first."
        )


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.number) and not isinstance(x, bool) and math.isfinite(x)
