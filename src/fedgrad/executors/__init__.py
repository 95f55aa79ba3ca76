"""Executors run a plan. `local` is the default, `reference` is the definition, `mesh` is for many
devices and processes."""

from collections.abc import Callable
from typing import Any

from fedgrad.core.program import Executor, default, default_executor, install_default
from fedgrad.executors.local import Local as local
from fedgrad.executors.mesh import Mesh as mesh
from fedgrad.executors.reference import Reference as reference

__all__ = ["Executor", "default", "default_executor", "flower", "local", "mesh", "reference"]

flower: Callable[..., Any]  # fedgrad.federation puts it here: a room that imports this one

install_default(local())
