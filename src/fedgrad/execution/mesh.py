"""Clients spread over the devices of a mesh, in one process or in many (`jax.distributed`).

Each device runs its share of the clients in chunks, like the local executor, and sums what they
send; then one all-reduce per message completes the sum. Every device repeats the server's work.
Client values are split over the devices and stay there.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedgrad.aggregate.aggregator import Aggregator, plain
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError, known_fields_of, nearest
from fedgrad.core.program import Program
from fedgrad.execution import sharded
from fedgrad.execution.devices import Devices
from fedgrad.execution.local import compile_program, require_positive
from fedgrad.execution.placing import placed


@known_fields_of("mesh")
@dataclasses.dataclass(frozen=True)
class Mesh:
    """Runs a program with its clients spread over one axis of a `jax.sharding.Mesh`.

    Args:
        mesh: The mesh; by default one axis over all devices of all processes.
        axis: The axis over which clients are spread; other axes repeat the same work.
        chunk: The number of clients that a device runs at a time, as in `local`.
        aggregator: How sums are computed.
    """

    mesh: jax.sharding.Mesh | None = None
    axis: str = "clients"
    chunk: int | None = None
    aggregator: Aggregator = dataclasses.field(default=plain, repr=False)

    def __post_init__(self) -> None:
        require_positive("mesh", "chunk", self.chunk)
        if self.mesh is None:
            return
        if not isinstance(self.mesh, jax.sharding.Mesh):
            raise ArgumentError.here(
                f"mesh(mesh={self.mesh!r}): give a jax.sharding.Mesh, for example "
                f'jax.make_mesh((8,), ("{self.axis}",)), or None for all devices.'
            )
        if self.axis not in self.mesh.axis_names:
            known = [str(name) for name in self.mesh.axis_names]
            raise ArgumentError.here(
                f"mesh(axis={self.axis!r}): the mesh has no such axis." + nearest(self.axis, known)
            )

    @property
    def devices(self) -> Devices:
        """The devices over which clients are spread."""
        if self.mesh is None:
            mesh = jax.sharding.Mesh(jax.devices(), (self.axis,))
        else:  # not JAX's "explicit" axes, whose sharding types reject our loops
            mesh = jax.sharding.Mesh(self.mesh.devices, self.mesh.axis_names)
        return Devices(mesh, self.axis, resident=True)

    def compile(self, program: Program) -> Callable[[dict[str, Any]], Any]:
        """Return the program as a function of its arguments by name."""
        devices = self.devices
        run = compile_program(program, self.chunk, devices, self.aggregator)
        return lambda arguments: run(placed(program, devices, arguments))

    def shard(self, own: Any) -> Any:
        """Combine the values of this process's clients with those of all other processes.

        Clients are numbered by process. No data leaves the process.

        Args:
            own: A pytree of arrays with one row per client of this process. Every process has the
                same number of clients, a multiple of the number of its devices.

        Returns:
            A pytree of global arrays, split over the mesh.
        """
        return sharded.shard(own, self.devices)

    def population(self, own: Sequence[Any]) -> Population:
        """Make a population of the clients of all processes whose examples stay where they are.

        The clients are spread over the devices of their process, and numbered by process. Sampling
        gives the same cohorts as from an `fg.population` of all clients.

        Args:
            own: The clients of this process, as for `fg.population`.
        """
        return sharded.population(own, self.devices, self)
