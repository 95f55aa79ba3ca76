"""Checks of a task when it is made; they evaluate shapes and compute nothing."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms.objective import per_example
from fedgrad.clients.cohort import Cohort
from fedgrad.clients.population import Population
from fedgrad.core.errors import FederatedError, known_fields

# (params, batch) or (params, batch, key) -> one number per example
PerExample = Callable[..., Any]


class TaskError(FederatedError):
    """A task is unknown, invalid, or cannot be made with these options."""


@known_fields
@dataclass(frozen=True)
class Defaults:
    """Settings with which a task trains well, as a starting point."""

    cohort_size: int = 10
    batch_size: int = 20
    client_learning_rate: float = 0.1
    rounds: int = 100


def require_task(task: Any) -> None:
    """Refuse a task that cannot be trained, with the line of the user's code that makes it."""
    _require_populations(task)
    _require_defaults(task)
    named = isinstance(task.metrics, Mapping) and all(isinstance(m, str) for m in task.metrics)
    if not named:
        raise TaskError.here(
            f"metrics= takes functions by name, such as {{'accuracy': is_right}}, got "
            f"{task.metrics!r:.60}."
        )
    functions = {"init": task.init, "loss": task.loss, **_named(task.metrics)}
    for what, function in functions.items():
        if not callable(function):
            raise TaskError.here(f"{what} is a function, got {type(function).__name__}.")
    params = _params(task.init)
    rows = _row_shapes(task.train)
    if rows is None:
        return
    batch = jax.tree.map(lambda row: jax.ShapeDtypeStruct((2, *row.shape), row.dtype), rows)
    for what in [name for name in functions if name != "init"]:
        _require_per_example(what, functions[what], params, batch)
    for what in ("test", "validation"):
        other = getattr(task, what)
        there = None if other is None else _row_shapes(other)
        if there is not None and there != rows:
            raise TaskError.here(
                f"Examples of {what} are {_shown(there)}, those of train {_shown(rows)}. Only the "
                "number of examples may differ."
            )


def _require_populations(task: Any) -> None:
    for what in ("train", "test", "validation"):
        clients = getattr(task, what)
        if isinstance(clients, Population) or (clients is None and what != "train"):
            continue
        raise TaskError.here(
            f"{what}= takes a population, got {type(clients).__name__}. Write "
            f"{what}=fg.population([client_0, client_1, ...])."
        )


def _require_defaults(task: Any) -> None:
    given = task.defaults
    if not isinstance(given, Defaults):
        raise TaskError.here(
            f"defaults= takes fg.tasks.Defaults(cohort_size=10, ...), got {type(given).__name__}."
        )
    for name, value in vars(given).items():
        kind = (int, float) if name == "client_learning_rate" else int
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            raise TaskError.here(f"defaults: {name}={value!r} is not a number above 0.")
    if given.cohort_size > len(task.train):
        raise TaskError.here(
            f"defaults: cohort_size={given.cohort_size}, but there are {len(task.train)} clients."
        )


def _params(init: Callable[..., Any]) -> Any:
    try:
        params = jax.eval_shape(init, jax.random.key(0))
    except Exception as error:
        raise _failed("init", init, "a key", error) from error
    leaves = jax.tree.leaves(params)
    wrong = [leaf for leaf in leaves if not jnp.issubdtype(leaf.dtype, jnp.floating)]
    if wrong or not leaves:
        got = f"{wrong[0].dtype}{list(wrong[0].shape)} in it" if wrong else "nothing"
        raise TaskError.here(
            f"init{_at(init)} gives the first model, a tree of floating-point arrays; got {got}."
        )
    return params


def _require_per_example(what: str, function: Any, params: Any, batch: Any) -> None:
    def each(params: Any, batch: Any, key: Any) -> Any:
        return per_example(function, params, batch, key)

    try:
        given = jax.eval_shape(each, params, batch, jax.random.key(0))
    except Exception as error:
        raise _failed(what, function, f"a batch of 2 examples, {_shown(batch)}", error) from error
    if what == "loss" and not jnp.issubdtype(given.dtype, jnp.floating):
        raise TaskError.here(
            f"loss{_at(function)} gives {given.dtype}, which cannot be differentiated. Give "
            "floating-point numbers."
        )


def _failed(what: str, function: Any, on: str, error: Exception) -> TaskError:
    if isinstance(error, FederatedError):
        return TaskError(str(error))  # it names the line already
    reason = str(error).partition("\n")[0]
    return TaskError.here(f"{what}{_at(function)} fails on {on}: {type(error).__name__}: {reason}")


def _row_shapes(clients: Population) -> Any:
    """Return the shape of one example, if it is available."""
    if not len(clients):
        return None
    one = clients.select(np.array([0]))
    if not isinstance(one, Cohort):
        return None
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), one.store)


def _shown(tree: Any) -> str:
    named = jax.tree_util.tree_leaves_with_path(tree)
    return ", ".join(
        f"{jax.tree_util.keystr(path, simple=True) or 'array'} {leaf.dtype}{list(leaf.shape)}"
        for path, leaf in named
    )


def _named(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {f"metrics[{name!r}]": function for name, function in metrics.items()}


def _at(function: Any) -> str:
    """Return the location of a function's source, if known."""
    code = getattr(function, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
