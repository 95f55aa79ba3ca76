"""Conversion of a task's data, once, for `fedgrad data prepare`."""

import os
from collections.abc import Mapping
from pathlib import Path

from fedgrad.core.errors import known_arguments
from fedgrad.tasks.data import prepared_folder
from fedgrad.tasks.data.conversion import converted, learned
from fedgrad.tasks.data.dataset import Asked, DataSet
from fedgrad.tasks.data.opening import opened
from fedgrad.tasks.data.source import Tick
from fedgrad.tasks.from_data import FromData
from fedgrad.tasks.registry import TASKS
from fedgrad.tasks.task_checks import TaskError

PREPARED: Mapping[str, DataSet] = {
    name: task.data for name, task in TASKS.items() if isinstance(task, FromData)
}


@known_arguments()
def prepare(
    name: str,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    clients: int | None = None,
    validation: float = 0.0,
    seed: int = 0,
    tick: Tick | None = None,
) -> dict[str, int]:
    """Convert the data of a task to a folder, which the task then takes as `data=`.

    The folder appears when it is complete; after an interrupt there is none.

    Args:
        name: The name of the task.
        data: The data, as `data=` of the task takes them.
        out: The new folder.
        clients: The most clients of each part.
        validation: The fraction of training clients to set aside for validation.
        seed: The seed of random choices.
        tick: A function that is called to report progress.

    Returns:
        The number of clients of each part.

    Raises:
        TaskError: If the data cannot be read, or the folder exists.
    """
    if name not in PREPARED:
        raise TaskError.here(f"The task {name!r} has no data to prepare.", name, PREPARED)
    dataset, path = PREPARED[name], Path(out)
    prepared_folder.require_free(path)
    if prepared_folder.is_prepared(Path(data)):
        raise TaskError.here(f"{data} is prepared already.")
    asked = Asked(clients, validation, seed)
    with opened(dataset, data, asked, tick) as source:
        known = learned(dataset, source, tick)
        each = converted(dataset, source, asked, known, tick)
        return prepared_folder.written(path, name, each, known)
