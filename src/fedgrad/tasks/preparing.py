"""The data of a task, converted once: what `fedgrad data prepare` does."""

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
    """Convert the data of a task (as `data=` of the task takes them) to a folder, which is `data=`
    of the task then. Gives how many clients there are of each part; `tick` is told on the way.

    The folder is there when all of it is; if this is interrupted, there is none.
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
