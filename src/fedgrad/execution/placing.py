"""Moves arguments to the devices of a program."""

import dataclasses
from typing import Any

import jax
import numpy as np

from fedgrad.core.arguments import ClientData, map_parts
from fedgrad.core.program import Program
from fedgrad.execution.devices import Devices
from fedgrad.execution.multi_process import make_global, require_equal
from fedgrad.execution.sharded import ShardedCohort


def placed(program: Program, devices: Devices, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as arrays on the devices; arrays already there and tracers are
    unchanged.

    Client values are split where possible. Server values are replicated.
    """
    leaves, tree = jax.tree.flatten(arguments)
    wanted = jax.tree.leaves(
        {
            name: _client(argument, devices)
            if name in program.placements
            else jax.tree.map(lambda _: devices.whole, argument)
            for name, argument in arguments.items()
        }
    )
    away = [i for i, x in enumerate(leaves) if _is_away(x, devices)]
    if len(devices.devices_of) == 1:
        moved = jax.device_put([leaves[i] for i in away], [wanted[i] for i in away])
    else:
        _require_equal(program, devices, arguments)
        moved = [make_global(leaves[i], wanted[i]) for i in away]
    for i, x in zip(away, moved, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(tree, leaves)


def _client(argument: Any, devices: Devices) -> Any:
    def part(x: Any) -> Any:
        if isinstance(x, ClientData):  # small vectors, and a store with the examples of all clients
            everywhere = jax.tree.map(lambda _: devices.whole, x)
            if not isinstance(x, ShardedCohort):
                return everywhere
            return dataclasses.replace(
                everywhere, store=jax.tree.map(lambda _: devices.split, x.store)
            )
        even = np.ndim(x) and np.shape(x)[0] % devices.count == 0
        return devices.split if even else devices.whole

    return map_parts(part, argument)


def _is_away(x: Any, devices: Devices) -> bool:
    if isinstance(x, jax.core.Tracer):
        return False
    if not isinstance(x, jax.Array):  # leave other types to JAX
        return isinstance(x, (np.ndarray, np.generic)) and x.dtype != object
    # The same devices in another mesh would cause a recompilation.
    return getattr(x.sharding, "mesh", None) != devices.mesh


def _require_equal(program: Program, devices: Devices, arguments: dict[str, Any]) -> None:
    """Raise unless values that are local to each process are the same in all of them."""

    def is_own(x: Any) -> bool:
        if isinstance(x, jax.Array):
            return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
        return isinstance(x, (np.ndarray, np.generic, bool, int, float, complex))

    own = {name: [*filter(is_own, jax.tree.leaves(a))] for name, a in arguments.items()}
    if any(own.values()):
        require_equal(devices, own, program.name)
