"""Executors run a plan. `local` is the default, `reference` is the definition, `mesh` is for many
devices and processes."""

from fedgrad.core.program import Executor, default, default_executor, install_default
from fedgrad.executors.flower import Flower as flower
from fedgrad.executors.local import Local as local
from fedgrad.executors.mesh import Mesh as mesh
from fedgrad.executors.reference import Reference as reference

__all__ = ["Executor", "default", "default_executor", "flower", "local", "mesh", "reference"]

install_default(local())
