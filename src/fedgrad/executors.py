"""Executors run a plan: `local` is the default, `reference` the definition, `mesh` is for many
devices and processes, and `flower` for a real federation."""

from fedgrad.core.program import Executor, default, default_executor, install_default
from fedgrad.execution.local import Local as local
from fedgrad.execution.mesh import Mesh as mesh
from fedgrad.execution.reference import Reference as reference
from fedgrad.federation.protocol.executor import Flower as flower

__all__ = ["Executor", "default", "default_executor", "flower", "local", "mesh", "reference"]

install_default(local())
