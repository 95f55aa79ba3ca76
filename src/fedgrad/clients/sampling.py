"""The sampler of cohorts: the clients of a round depend on the key and the round, and nothing else.

Runs with the same key therefore train on the same cohorts in the same order, whatever they learn
and wherever their clients are, and a resumed run continues with the cohorts that it would have had.
Sampling runs on the host, where it takes microseconds.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import ArgumentError
from fedgrad.core.types import Key

# Rounds whose random numbers are generated together: larger is cheaper. Another value gives other
# cohorts for the same key.
BLOCK = 8
TOGETHER = 16  # rounds whose cohorts and keys are put on the devices together

T = TypeVar("T")
Words = tuple[int, ...]  # the numbers in a key


def chosen(key: Key, there: int, wanted: int, round: int, role: str) -> Any:
    """Return the indices of the clients of a round, as a vector; also under jit.

    `there` clients exist and `wanted` of them are drawn. `role`: the argument of the round that
    they are drawn for.
    """
    if not isinstance(key, jax.core.Tracer):
        return positions(read_key(key)[0], round, role, there, wanted)
    data = jax.random.key_data(key) if _is_typed(key) else key
    return jax.pure_callback(
        lambda words: positions(tuple(np.asarray(words).tolist()), round, role, there, wanted),
        jax.ShapeDtypeStruct((wanted,), jnp.int32),
        data,
        vmap_method="sequential",
    )


def positions(words: Words, round: int, role: str, there: int, wanted: int) -> np.ndarray:
    """Return `wanted` different numbers below `there`, uniformly; fewer are a prefix of more."""
    block, row = divmod(round, BLOCK)
    picks = list(_picks(words, block, role, there, wanted)[row])
    # A partial Fisher-Yates shuffle of range(there) that stores only the moved entries.
    moved: dict[int, int] = {}
    for i, pick in enumerate(picks):
        picks[i] = moved.get(pick, pick)
        moved[pick] = moved.get(i, i)
    return np.asarray(picks, np.int32)


def round_keys(key: Key, sharding: Any = None) -> Callable[[int], jax.Array]:
    """Return a function that maps a round to its key."""
    words, wrap = read_key(key)
    put = _wrapping(wrap, sharding)
    return ahead(lambda rounds: put([_bits(words, round) for round in rounds]))


def ahead(make: Callable[[range], Sequence[T]]) -> Callable[[int], T]:
    """Return a function of the round whose values are made for several rounds at a time."""
    ready: dict[int, T] = {}

    def of(round: int) -> T:
        if round not in ready:
            rounds = range(round, round + TOGETHER)
            ready.clear()
            ready.update(zip(rounds, make(rounds), strict=True))
        return ready[round]

    return of


@functools.cache
def placing(sharding: Any) -> Callable[[Any], Any]:
    """Return a function that puts arrays where they are used. A compiled identity moves many small
    arrays several times faster than jax.device_put."""
    return jax.jit(lambda tree: tree, out_shardings=sharding)


def read_key(key: jax.Array) -> tuple[Words, Callable[[Any], jax.Array]]:
    """Return the numbers in a key, and a function that makes such a key from numbers."""
    if _is_typed(key):
        data = np.asarray(jax.random.key_data(key))
        wrap = _typed(str(jax.random.key_impl(key)))
    elif hasattr(key, "dtype") and key.dtype == np.uint32:
        data, wrap = np.asarray(key), jnp.asarray
    else:
        raise ArgumentError.here(
            f"key= takes a key of JAX, got {key!r}. Write key=jax.random.key(0)."
        )
    if data.ndim != 1:
        raise ArgumentError.here(
            f"key= takes one key, got an array of shape {key.shape}. Give one of them."
        )
    return tuple(data.tolist()), wrap


def _is_typed(key: jax.Array) -> bool:
    return isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


@functools.cache
def _typed(implementation: str) -> Callable[[Any], jax.Array]:
    return functools.partial(jax.random.wrap_key_data, impl=implementation)


@functools.cache
def _wrapping(wrap: Callable[[Any], jax.Array], sharding: Any) -> Callable[[list[Any]], Any]:
    return jax.jit(lambda keys: [wrap(k) for k in keys], out_shardings=sharding)


# Random numbers are generated for a block of rounds at a time, because the setup is slow.


@functools.lru_cache(16)
def _picks(words: Words, block: int, role: str, there: int, wanted: int) -> list[list[int]]:
    """Return for each round of a block a number from i ... there - 1, for i = 0 ... wanted - 1."""
    random = np.random.Generator(np.random.PCG64(_seeds(words, block, role, 0)))
    least = np.broadcast_to(np.arange(wanted)[:, None], (wanted, BLOCK))
    return random.integers(least, there).T.tolist()


@functools.lru_cache(16)
def _bits_of(words: Words, block: int) -> np.ndarray:
    seeds = _seeds(words, block, "", 1)
    return seeds.generate_state(BLOCK * len(words)).reshape(BLOCK, len(words))


def _bits(words: Words, round: int) -> np.ndarray:
    return _bits_of(words, round // BLOCK)[round % BLOCK]


def _seeds(words: Words, block: int, role: str, use: int) -> np.random.SeedSequence:
    return np.random.SeedSequence((*words, block, zlib.crc32(role.encode()), use))
