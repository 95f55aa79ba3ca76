"""Tasks by name: those of this table, and a user's own as module:name."""

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedgrad.core.errors import FederatedError, nearest, public
from fedgrad.core.imported import imported
from fedgrad.tasks.cifar100 import cifar100
from fedgrad.tasks.digits import digits
from fedgrad.tasks.emnist import emnist
from fedgrad.tasks.shakespeare import shakespeare
from fedgrad.tasks.stackoverflow_tags import stackoverflow_tags
from fedgrad.tasks.stackoverflow_words import stackoverflow_words
from fedgrad.tasks.synthetic import synthetic
from fedgrad.tasks.task import Task
from fedgrad.tasks.task_checks import TaskError

TASKS: Mapping[str, Callable[..., Task]] = {
    "cifar100": cifar100,
    "digits": digits,
    "emnist": emnist,
    "shakespeare": shakespeare,
    "stackoverflow_tags": stackoverflow_tags,
    "stackoverflow_words": stackoverflow_words,
    "synthetic": synthetic,
}


@public
def task(name: str, **options: Any) -> Task:
    """Return the task with this name.

    Args:
        name: A name in `TASKS`, or `module:name` of your own `Task` or of a function that makes
            one.
        **options: The options of the function in `TASKS`.

    Returns:
        A task.

    Raises:
        TaskError: If there is no such task or option.

    Example:

        fg.tasks.task("digits", clients=50)
    """
    if not isinstance(name, str):
        raise TaskError.here(f"A task is named by a text, got {type(name).__name__}.")
    if ":" in name:
        return _own(name, options)
    if name not in TASKS:
        raise TaskError.here(
            f"There is no task {name!r} (one of your own is module:name)."
            f"{nearest(name, list(TASKS))}"
        )
    _require_options(name, TASKS[name], options)
    return TASKS[name](**options)


def _own(name: str, options: dict[str, Any]) -> Task:
    _, made = imported(name, "a task as module:name")
    if isinstance(made, Task) and options:
        raise TaskError.here(
            f"{name} is a Task as it is, so {', '.join(options)} has no effect. Name a function "
            "that takes it and gives a Task."
        )
    if not isinstance(made, Task) and callable(made):
        _require_options(name, made, options)
        made = _made(name, made, options)
    if not isinstance(made, Task):
        raise TaskError.here(
            f"{name} is neither a Task nor a function that gives one, but {type(made).__name__}. "
            "See fg.tasks.Task."
        )
    return made if made.name else replace(made, name=name)


def _made(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    try:
        return make(**options)
    except FederatedError:
        raise  # it names the line already
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskError.here(
            f"{name} fails: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        ) from error


def _require_options(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(make).parameters
    except ValueError:  # a function not written in Python
        return
    for its in parameters.values():
        always = its.kind not in (its.VAR_KEYWORD, its.VAR_POSITIONAL) and its.default is its.empty
        if always and its.name not in options:
            raise TaskError.here(f"Task {name!r} needs the option {its.name!r}.")
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for option in options:
        if option not in parameters:
            known = list(parameters)
            raise TaskError.here(f"Task {name!r} has no option {option!r}.{nearest(option, known)}")
