"""Federated learning tasks: data split over clients, a model, a loss, and settings that work."""

from fedgrad.tasks import split
from fedgrad.tasks.registry import TASKS, task
from fedgrad.tasks.task import Defaults, Task, TaskError

__all__ = ["TASKS", "Defaults", "Task", "TaskError", "split", "task"]
