"""Clients over the devices of a mesh, of one process or of many (`jax.distributed`).

Every device runs its share of the clients in chunks, as the local executor does, and adds up what
they send; then there is one all-reduce for each message to the server. What the server does, every
device does for itself. Client values are split over the devices and stay there.
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

    `mesh`: by default one axis over all devices of all processes.
    `axis`: the one that clients are spread over; along others the same work is repeated.
    `chunk`: how many clients a device runs at a time, as in `local`.
    `aggregator`: how sums are computed.
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
        """The devices that clients are spread over."""
        if self.mesh is None:
            mesh = jax.sharding.Mesh(jax.devices(), (self.axis,))
        else:  # without JAX's "explicit" axes, whose types say what is split and reject our loops
            mesh = jax.sharding.Mesh(self.mesh.devices, self.mesh.axis_names)
        return Devices(mesh, self.axis, resident=True)

    def compile(self, program: Program) -> Callable[[dict[str, Any]], Any]:
        """The program as a function of its arguments by name."""
        devices = self.devices
        run = compile_program(program, self.chunk, devices, self.aggregator)
        return lambda arguments: run(placed(program, devices, arguments))

    def shard(self, own: Any) -> Any:
        """Values of this process's clients as values of all processes' clients.

        `own` is a pytree of arrays with one row for each client of this process; every process has
        the same number of clients, a multiple of its devices. Gives global arrays, split over the
        mesh: nothing leaves the process. Clients are numbered by process.
        """
        return sharded.shard(own, self.devices)

    def population(self, own: Sequence[Any]) -> Population:
        """A population whose examples stay where they are: of all processes' clients, of which this
        process has `own` (as for `fg.population`), and spread over the devices of each process.

        Clients are numbered by process. Sampling is as from `fg.population` of all of them.
        """
        return sharded.population(own, self.devices, self)
