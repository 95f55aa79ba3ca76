"""Who takes part in which round: a function of the run's key and the round, and of nothing else.

So runs with the same key train on the same cohorts in the same order, whatever they learn, and a
run that is resumed goes on with the cohorts that it would have had.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.cohort import Cohort, Population
from fedgrad.core.errors import ArgumentError

# Rounds whose cohorts are drawn, and put on the devices, together: the less often, the cheaper.
# With another number the same key gives other cohorts.
BLOCK = 8


class Clients(Protocol):
    """What cohorts are drawn from: a `fg.Population`, or the clients of a real federation.

    With `take(positions, size)` and `candidates(size)` besides, a federation trains with the same
    clients as a simulation of it.
    """

    def sample(self, key: jax.Array, size: int, /) -> Any:
        """A cohort of `size` different clients."""
        ...

    def __len__(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Draw:
    """The cohorts of a round by the name of the argument they go to, and its key."""

    cohorts: dict[str, Any]
    key: jax.Array

    @property
    def further(self) -> dict[str, Any]:
        """The cohorts beside the one that trains."""
        return {name: cohort for name, cohort in self.cohorts.items() if name != "cohort"}


def cohort_sizes(populations: Mapping[str, Clients], cohort_size: int) -> dict[str, int]:
    """How many clients of each population take part in a round: of one that is smaller than a
    cohort all of them, except for the one that is trained on (for the argument `cohort`)."""
    there = len(populations["cohort"])
    if not 1 <= cohort_size <= there:
        raise ArgumentError.here(
            f"cohort_size={cohort_size!r}: there are {there} clients. Ask for 1 to {there}."
        )
    return {name: min(cohort_size, len(clients)) for name, clients in populations.items()}


def draws(
    populations: Mapping[str, Clients], sizes: Mapping[str, int], key: jax.Array
) -> Callable[[int], Draw]:
    """A function that gives the cohorts and the key of a round."""
    words, wrap = _words(key)
    stored = {name: c for name, c in populations.items() if type(c) is Population}
    ready: dict[int, Draw] = {}

    def draw(round: int) -> Draw:
        if round not in ready:
            ready.clear()
            ready.update(_block(stored, sizes, words, wrap, range(round, round + BLOCK)))
        cohorts = dict(ready[round].cohorts)
        for name, clients in populations.items():
            if name not in stored:  # asked in their own round: who is there may change
                cohorts[name] = _asked(clients, sizes[name], words, wrap, round, name)
        return Draw(cohorts, ready[round].key)

    return draw


def _block(
    stored: Mapping[str, Population],
    sizes: Mapping[str, int],
    words: tuple[int, ...],
    wrap: Callable[[Any], jax.Array],
    block: range,
) -> dict[int, Draw]:
    """Draw on the host, which takes microseconds, and put all of it on the devices at once."""
    keys = [_bits(words, round, "") for round in block]
    chosen: dict[str, list[Any]] = {name: [] for name in stored}
    for name, clients in stored.items():
        for round in block:
            index = positions(words, round, name, len(clients), sizes[name])
            chosen[name].append((clients.offsets[index], clients.counts[index], index))
    sharding = next(map(sharding_of, stored.values()), None)
    keys, chosen = _placing(wrap, sharding)(keys, chosen)
    return {
        round: Draw({name: _cohort(stored[name], c[i]) for name, c in chosen.items()}, keys[i])
        for i, round in enumerate(block)
    }


def _asked(
    clients: Any,
    size: int,
    words: tuple[int, ...],
    wrap: Callable[[Any], jax.Array],
    round: int,
    name: str,
) -> Any:
    """A cohort of other clients: the same ones as of a simulation, if they can be named."""
    if isinstance(clients, Population):
        return clients.select(positions(words, round, name, len(clients), size))
    if hasattr(clients, "take"):
        # More than `size` may be asked, of whom the first to answer count.
        asked = positions(words, round, name, len(clients), clients.candidates(size))
        return clients.take(asked, size)
    return clients.sample(wrap(_bits(words, round, name)), size)


def sharding_of(clients: Clients) -> Any:
    """Where the clients' data are, if that is several devices: the model belongs there too."""
    if type(clients) is not Population:
        return None
    sharding = clients.everyone.count.sharding
    return sharding if len(sharding.device_set) > 1 else None


@functools.cache
def _placing(wrap: Callable[[Any], jax.Array], sharding: Any) -> Callable[..., Any]:
    # The compiled identity moves many small arrays several times faster than jax.device_put.
    def put(keys: list[Any], vectors: Any) -> Any:
        return [wrap(k) for k in keys], vectors

    return jax.jit(put) if sharding is None else jax.jit(put, out_shardings=sharding)


def positions(words: tuple[int, ...], round: int, name: str, there: int, wanted: int) -> np.ndarray:
    """Different numbers below `there`, drawn uniformly. Whoever wants fewer gets the first ones."""
    block, row = divmod(round, BLOCK)
    picks = list(_picks(words, block, name, there, wanted)[row])
    # The first steps of a shuffle of range(there), remembering only what has moved.
    moved: dict[int, int] = {}
    for i, pick in enumerate(picks):
        picks[i] = moved.get(pick, pick)
        moved[pick] = moved.get(i, i)
    return np.asarray(picks, np.int32)


# Randomness is made for a block of rounds at a time, because it takes some time to set up.


@functools.lru_cache(16)
def _picks(
    words: tuple[int, ...], block: int, name: str, there: int, wanted: int
) -> list[list[int]]:
    """For each round of a block, numbers from i ... there - 1 for i = 0 ... wanted - 1."""
    random = np.random.Generator(np.random.PCG64(_seeds(words, block, name, 0)))
    least = np.broadcast_to(np.arange(wanted)[:, None], (wanted, BLOCK))
    return random.integers(least, there).T.tolist()


@functools.lru_cache(16)
def _bits_of(words: tuple[int, ...], block: int, name: str) -> np.ndarray:
    seeds = _seeds(words, block, name, 1)
    return seeds.generate_state(BLOCK * len(words)).reshape(BLOCK, len(words))


def _bits(words: tuple[int, ...], round: int, name: str) -> np.ndarray:
    return _bits_of(words, round // BLOCK, name)[round % BLOCK]


def _seeds(words: tuple[int, ...], block: int, name: str, use: int) -> np.random.SeedSequence:
    return np.random.SeedSequence((*words, block, zlib.crc32(name.encode()), use))


def _cohort(clients: Population, vectors: Any) -> Cohort:
    offset, count, index = vectors
    return dataclasses.replace(clients.everyone, offset=offset, count=count, index=index)


def _words(key: Any) -> tuple[tuple[int, ...], Callable[[Any], jax.Array]]:
    """The numbers in a key, and how to make a key of the same kind from numbers."""
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
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


@functools.cache
def _typed(implementation: str) -> Callable[[Any], jax.Array]:
    return functools.partial(jax.random.wrap_key_data, impl=implementation)
