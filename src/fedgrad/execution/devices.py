"""Several devices: one axis of a mesh, over which clients are spread and summed."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import ArgumentError

Array = jax.Array


@dataclass(frozen=True)
class Devices:
    """The axis of a mesh over which clients are spread. Other axes repeat the same work.

    With `resident`, values live on these devices: client values are split, server values
    replicated. Otherwise the devices only share the work, and JAX decides where values live.
    """

    mesh: jax.sharding.Mesh
    axis: str
    resident: bool = False

    @property
    def count(self) -> int:
        return int(self.mesh.shape[self.axis])

    @functools.cached_property
    def devices_of(self) -> dict[int, int]:
        """The number of devices of each process, by its index."""
        return dict(sorted(Counter(d.process_index for d in self.mesh.devices.flat).items()))

    @functools.cached_property
    def own(self) -> list[int]:
        """The positions along the axis that belong to this process."""
        places = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(self.axis), 0)
        owners = [{d.process_index for d in place} for place in places.reshape(self.count, -1)]
        if any(len(found) > 1 for found in owners):
            raise ArgumentError.here(
                f"Several processes share a place along the axis {self.axis!r} of the mesh, so it "
                "is not said whose clients are there. Let every process have places of its own."
            )
        return [i for i, found in enumerate(owners) if found == {jax.process_index()}]

    @property
    def split(self) -> jax.sharding.NamedSharding:
        """The sharding of a client value: each device has its share of the clients."""
        return jax.sharding.NamedSharding(self.mesh, jax.P(self.axis))

    @property
    def whole(self) -> jax.sharding.NamedSharding:
        """The sharding of a server value: replicated."""
        return jax.sharding.NamedSharding(self.mesh, jax.P())

    def total(self, fun: Callable[..., Any], *args: Any, split: tuple[bool, ...]) -> Any:
        """Run `fun` on each device with its share of the split arguments and all of the others. It
        returns (values to be summed over devices, values that stay split)."""

        def here(*args: Any) -> Any:
            totals, kept = fun(*args)
            return sum_over_devices(totals, self.axis, self.count), kept

        return self._shard_map(here, split, (jax.P(), jax.P(self.axis)))(*args)

    def own_rows(self, fun: Callable[..., Any], *args: Any) -> Any:
        """Apply `fun` to each device's own rows of split values; the result is split, too."""
        return self._shard_map(fun, (True,) * len(args), jax.P(self.axis))(*args)

    def _shard_map(self, fun: Any, split: tuple[bool, ...], out: Any) -> Callable[..., Any]:
        # Stages are traced and differentiated before they get here. JAX's tracking of what differs
        # between devices (check_vma) would reject their loops; and to a derivative with respect to
        # a replicated value it adds a sum over devices, which would be silently wrong for a
        # client's own derivative.
        specs = tuple(jax.P(self.axis) if s else jax.P() for s in split)
        return jax.shard_map(fun, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)


# --- one message, one all-reduce ----------------------------------------------------------------


def sum_over_devices(xs: list[Array], axis: str, devices: int) -> list[Array]:
    """Sum all values of a message, of any dtypes, in one all-reduce.

    They travel in one vector of the widest floating-point dtype among them. Integers are cut into
    digits small enough that their sums are exact in it.
    """
    if not xs:
        return []
    carrier = _carrier([x.dtype for x in xs])
    packed = [_pack(x, carrier, devices) for x in xs]
    total = jax.lax.psum(jnp.concatenate([p.reshape(-1) for p in packed]), axis)
    sums, start = [], 0
    for x, p in zip(xs, packed, strict=True):
        part = jax.lax.slice_in_dim(total, start, start + p.size).reshape(p.shape)
        sums.append(_unpack(part, x.dtype, devices))
        start += p.size
    return sums


def _carrier(dtypes: list[Any]) -> Any:
    floating = [jnp.finfo(d).dtype for d in dtypes if jnp.issubdtype(d, jnp.inexact)]
    if floating:
        return max(floating, key=lambda d: d.itemsize)
    return jnp.dtype(f"int{8 * max(d.itemsize for d in dtypes)}")


def _pack(x: Array, carrier: Any, devices: int) -> Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([x.real, x.imag]).astype(carrier)
    if jnp.issubdtype(x.dtype, jnp.inexact) or jnp.issubdtype(carrier, jnp.integer):
        return x.astype(carrier)
    shifts, mask = _digits(x.dtype, carrier, devices)
    bits = x.astype(mask.dtype)
    return jnp.stack([(bits >> s & mask).astype(carrier) for s in shifts])


def _unpack(total: Array, dtype: Any, devices: int) -> Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(total[0], total[1]).astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact) or jnp.issubdtype(total.dtype, jnp.integer):
        return total.astype(dtype)
    shifts, mask = _digits(dtype, total.dtype, devices)
    digits = [digit.astype(mask.dtype) << s for digit, s in zip(total, shifts, strict=True)]
    return functools.reduce(jnp.add, digits).astype(dtype)


def _digits(dtype: Any, carrier: Any, devices: int) -> tuple[list[Any], Any]:
    """Return the shift of each digit and the mask of one: as many bits as fit into both dtypes,
    minus those that the sum over devices adds."""
    width = 8 * dtype.itemsize
    unsigned = jnp.dtype(f"uint{width}").type
    bits = min(jnp.finfo(carrier).nmant + 1, width) - (devices - 1).bit_length()
    shifts = [unsigned(s) for s in range(0, width, bits)]
    return shifts, unsigned(2**bits - 1)
