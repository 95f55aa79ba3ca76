"""Tasks by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedgrad.core.errors import nearest
from fedgrad.tasks.digits import digits
from fedgrad.tasks.synthetic import synthetic
from fedgrad.tasks.task import Task, TaskError

TASKS: Mapping[str, Callable[..., Task]] = {"digits": digits, "synthetic": synthetic}


def task(name: str, **options: Any) -> Task:
    """The task of this name, made with these options (those of its function in `TASKS`)."""
    if name not in TASKS:
        raise TaskError.here(f"There is no task {name!r}.{nearest(name, list(TASKS))}")
    known = list(inspect.signature(TASKS[name]).parameters)
    for option in options:
        if option not in known:
            raise TaskError.here(f"Task {name!r} has no option {option!r}.{nearest(option, known)}")
    return TASKS[name](**options)
