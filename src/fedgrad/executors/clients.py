"""Running one client's stage for all clients of a device and summing what they send.

Two ways, by what is faster: all at once (vmap) and chunk by chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.aggregate import sums

Array = jax.Array
# (sent down, shared stores, this client's values) -> (values to sum, values that stay)
OneClient = Callable[[list[Any], list[Any], list[Any]], tuple[list[Any], list[Any]]]


@dataclass(frozen=True)
class Work:
    """What one client does. `to_derive` does the same in a form that JAX can differentiate, where
    `run` is one that it cannot: for those who call `jax.grad` on a program that is being run."""

    run: OneClient
    to_derive: OneClient | None = None


# Bytes that a chunk of clients may touch. A device of several has one core, to which its clients
# should stay near. A single device uses all cores, but only on operations that are large enough.
CACHE = 160 * 2**10
LARGE = 2 * 2**20
SMALL_CLIENT = 2**20  # above that, one client's operations are large enough by themselves
RAGGED_BLOCK = 5  # clients of different sizes that run together wait for the longest of them


@dataclass(frozen=True)
class Clients:
    """How many clients a device has and how they are to be run."""

    count: int
    ragged: bool
    chunk: int | None
    alone: bool  # the device is the only one of its processor
    bytes: int  # of one client's own data and messages
    sums: tuple[Any, ...]  # what each sends, as shapes and dtypes

    @property
    def at_a_time(self) -> int:
        """How many run together."""
        if self.chunk is not None:
            return min(self.chunk, self.count)
        if jax.default_backend() != "cpu":
            return self.count  # an accelerator wants as much at once as there is
        large = self.alone and self.bytes <= SMALL_CLIENT
        fits = max(1, (LARGE if large else CACHE) // max(self.bytes, 1))
        most = min(self.count, fits, RAGGED_BLOCK if self.ragged else self.count)
        # A chunk that divides the cohort needs no masks, and is nearly as good as the largest.
        return next((c for c in range(most, most // 2, -1) if self.count % c == 0), most)


def map_sum(
    work: Work,
    clients: Clients,
    counts: Array | None,
    down: list[Any],
    shared: list[Any],
    each: list[Any],
) -> tuple[list[Array], list[Array]]:
    """The sums over the clients of a device, in the dtype in which they were added up, and what
    stays with each of them (stacked). `counts`: who counts in the sums; None: everybody."""
    n, chunk = clients.count, clients.at_a_time
    if chunk == n:
        up, kept = _vmap(work, n, down, shared, each)
        return [sums.stacked(x, counts) for x in up], kept

    def step(carry: Any, _: None) -> tuple[Any, list[Array]]:
        i, totals = carry
        start = jnp.minimum(i * chunk, n - chunk)
        # The last chunk is moved back to be full; the clients it repeats are left out of its sum.
        now = start + jnp.arange(chunk, dtype=jnp.int32) >= i * chunk if n % chunk else None
        if counts is not None:
            here = jax.lax.dynamic_slice_in_dim(counts, start, chunk)
            now = here if now is None else here & now
        mine = [jax.lax.dynamic_slice_in_dim(x, start, chunk) for x in each]
        up, kept = _vmap(work, chunk, down, shared, mine)
        more = [sums.stacked(x, now) for x in up]
        added = [sums.add(c, s, steps) for c, s in zip(totals, more, strict=True)]
        return (i + 1, added), kept

    steps = -(-n // chunk)
    # The chunks are counted along: a list of their numbers would grow with the cohort.
    first = (jnp.int32(0), [sums.zero(s) for s in clients.sums])
    (_, totals), kept = jax.lax.scan(step, first, None, length=steps)
    return [sums.finish(s, s[0].dtype) for s in totals], [_joined(k, n, chunk) for k in kept]


def _vmap(
    work: Work, n: int, down: list[Any], shared: list[Any], each: list[Any]
) -> tuple[list[Array], list[Array]]:
    if work.to_derive is None:
        return _for_all(work.run, n)(down, shared, each)
    fast = jax.custom_jvp(_for_all(work.run, n))
    plain = _for_all(work.to_derive, n)
    fast.defjvp(lambda primals, tangents: (fast(*primals), jax.jvp(plain, primals, tangents)[1]))
    return fast(down, shared, each)


def _for_all(one: OneClient, n: int) -> Callable[..., tuple[list[Array], list[Array]]]:
    if n > 1:
        return jax.vmap(one, in_axes=(None, None, 0), axis_size=n)

    def single(down: list[Any], shared: list[Any], each: list[Any]) -> Any:
        # One client needs no vectorised operations, and some of those are slow.
        return jax.tree.map(lambda x: jnp.asarray(x)[None], one(down, shared, [x[0] for x in each]))

    return single


def _joined(kept: Array, n: int, chunk: int) -> Array:
    """Chunks (steps, chunk, ...) as clients (n, ...), without those that the last one repeats."""
    if n % chunk == 0:
        return kept.reshape(n, *kept.shape[2:])
    full = (kept.shape[0] - 1) * chunk
    rest = n - full
    whole = kept[:-1].reshape(full, *kept.shape[2:])
    return jnp.concatenate([whole, kept[-1, chunk - rest :]])
