"""Executors run a plan. `local` is the default, `reference` is the definition."""

from fedgrad.core.program import Executor, default, default_executor, install_default
from fedgrad.executors.local import Local as local
from fedgrad.executors.reference import Reference as reference

__all__ = ["Executor", "default", "default_executor", "local", "reference"]

install_default(local())
