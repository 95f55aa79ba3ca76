"""Federated learning tasks: data split over clients, a model, a loss, and default settings."""

from fedgrad.tasks import classifier, split
from fedgrad.tasks.data.source import DataError
from fedgrad.tasks.preparing import prepare
from fedgrad.tasks.registry import TASKS, task
from fedgrad.tasks.task import Task
from fedgrad.tasks.task_checks import Defaults, TaskError

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
