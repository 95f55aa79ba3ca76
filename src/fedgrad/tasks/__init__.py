"""Federated learning tasks: data split over clients, a model, a loss, and settings that work."""

from fedgrad.core.errors import public as _public
from fedgrad.tasks import classifier, split
from fedgrad.tasks.contract import Defaults, TaskError
from fedgrad.tasks.data.source import DataError
from fedgrad.tasks.preparing import prepare
from fedgrad.tasks.registry import TASKS, task
from fedgrad.tasks.task import Task

__all__ = [
    "TASKS",
    "DataError",
    "Defaults",
    "Task",
    "TaskError",
    "classifier",
    "prepare",
    "split",
    "task",
]

globals().update({name: _public(globals()[name]) for name in ("Task", "prepare", "task")})
