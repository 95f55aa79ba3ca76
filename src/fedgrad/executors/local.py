"""The default executor: the whole plan in one jit, many clients at a time.

Clients are vectorised, as many at once as fit into the processor's cache, and their sums are
accumulated; so a cohort of any size runs in the memory of one chunk. Clients of different sizes
are sorted by size, so that those that run together are about equally long. Where there are several
local devices, each takes its share of the clients.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from fedgrad.aggregate.aggregator import Aggregator, plain
from fedgrad.core.errors import ArgumentError
from fedgrad.core.program import Program
from fedgrad.executors.devices import Devices
from fedgrad.executors.placing import placed
from fedgrad.executors.vectorised import compile_program


@dataclass(frozen=True)
class Local:
    """Runs a program on this machine.

    `chunk`: how many clients run at a time; by default as many as fit into the cache. If you set
    it, clients also remember nothing between rounds (they compute it again), so that memory does
    not grow with the cohort in any mode of differentiation.
    `devices`: over how many local devices the clients are dealt; by default all.
    `aggregator`: how sums are computed.
    """

    chunk: int | None = None
    devices: int | None = None
    aggregator: Aggregator = field(default=plain, repr=False)

    def __post_init__(self) -> None:
        for name in ("chunk", "devices"):
            require_positive("local", name, getattr(self, name))

    def compile(self, program: Program) -> Callable[[dict[str, Any]], Any]:
        """The program as a function of its arguments by name."""
        chosen = jax.local_devices()[: self.devices]
        devices = Devices(jax.sharding.Mesh(chosen, ("devices",)), "devices")
        over = devices if len(chosen) > 1 else None
        run = compile_program(program, self.chunk, over, self.aggregator)
        if len(chosen) == len(jax.local_devices()):
            return run
        return lambda arguments: run(placed(program, devices, arguments))


def require_positive(executor: str, name: str, value: Any) -> None:
    """An option of an executor is None or a number of at least 1."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ArgumentError.here(f"{executor}({name}={value!r}): give a number of at least 1.")
