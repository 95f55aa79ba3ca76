"""Clients on disk: a store like Stack Overflow's, opened, trained on and evaluated."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import table
from timing import isolated

import fedgrad as fg

CLIENTS = 342_477  # of Stack Overflow; at 35 kB each 12 GB
TENTH = 10  # a quick run has so many times fewer
COHORT = 50
ROUNDS = 30
WORDS, LENGTH, WIDTH = 1_000, 20, 32
FEW = 3_000  # clients whose rounds are compared with the same in memory
MEAN, DEVIATION, MOST = 5.8, 0.9, 1_000  # of the logarithm of a client's number of sentences


def run(quick: bool) -> dict[str, Any]:
    """Write the store, then use it in a new process, whose memory is measured."""
    clients = CLIENTS // TENTH if quick else CLIENTS
    counts = _counts(clients)
    size = int(counts.sum()) * (LENGTH + 1) * 4
    where = Path(tempfile.gettempdir())
    free = shutil.disk_usage(where).free
    if free < 1.2 * size:
        raise OSError(f"{where} has {free / 1e9:.1f} GB left, of {1.2 * size / 1e9:.1f} needed.")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "clients")
        print(f"[stored] writing {clients:,} clients, {size / 1e9:.1f} GB", flush=True)
        start = time.perf_counter()
        fg.store(path, _clients(counts))
        written = time.perf_counter() - start
        print(f"[stored] {written:.0f} s; training", flush=True)
        rounds = ROUNDS // 3 if quick else ROUNDS
        found = isolated("sections.stored", "measure", path=path, rounds=rounds)
        found["peak of nothing"] = isolated("sections.stored", "imported")
    return {"clients": clients, "bytes": size, "seconds to write": written, **found}


def imported() -> float:
    """The memory of a process that has imported fedgrad and done nothing."""
    jnp.zeros(()).block_until_ready()
    return _peak()


def measure(path: str, rounds: int) -> dict[str, Any]:
    """Open, train with nothing and with everything in the system's cache, evaluate."""
    start = time.perf_counter()
    clients = fg.stored(path)
    opened = time.perf_counter() - start
    algorithm = fg.fed_avg(loss, fg.local_training(0.1, batch_size=32))
    key = jax.random.key(0)
    first = algorithm.init(_model())
    hyper = jax.tree.map(jnp.asarray, algorithm.hyper)

    def train(draw: Callable[[int], Any]) -> dict[str, float]:
        state, waited, took = first, [], []
        with closing(draw):
            for round in range(1, rounds + 1):
                start = time.perf_counter()
                cohort = draw(round)
                there = time.perf_counter()
                state, _ = algorithm.round(state, hyper, cohort, jax.random.key(round))
                jax.block_until_ready(state)
                waited.append(there - start)
                took.append(time.perf_counter() - start)
        return {
            "seconds": statistics.median(took[1:]),  # the first one compiles
            "waited": sum(waited[1:]) / sum(took[1:]),
            "first wait": waited[0],
        }

    train(clients.draws(jax.random.key(9), COHORT))
    _forget(Path(path))
    ways = {"on disk, nothing cached": train(clients.draws(key, COHORT))}
    ways["on disk, cached"] = train(clients.draws(key, COHORT))
    peak = _peak()
    evaluation = fg.Evaluation({"loss": loss}, clients)
    start = time.perf_counter()
    done: list[tuple[int, float]] = []
    try:
        evaluation(_model(), lambda n, there: _until(done, n, start))
    except TimeoutError:
        pass
    evaluated = {"clients": done[-1][0], "seconds": done[-1][1], "peak": _peak()}
    ways |= _both(train, clients, Path(path).with_name("few"), key)
    return {"opened": opened, "rounds": rounds, "ways": ways, "peak": peak, "evaluated": evaluated}


def _both(
    train: Callable[[Any], dict[str, float]], clients: Any, path: Path, key: Any
) -> dict[str, Any]:
    """The same cohorts of a few of the clients, from disk and in memory."""
    some = clients.select(np.arange(min(FEW, len(clients))))
    arrays, counts = jax.tree.map(np.asarray, some.store), np.asarray(some.count)
    ends = np.cumsum(counts)
    spans = zip((ends - counts).tolist(), ends.tolist(), strict=True)
    few = [jax.tree.map(lambda x, a=a, b=b: x[a:b], arrays) for a, b in spans]
    on_disk, in_memory = fg.store(path, few), fg.population(few)
    return {
        "a few, on disk": train(on_disk.draws(key, COHORT)),
        "a few, in memory": train(_Closable(in_memory.draws(key, COHORT))),
    }


class _Closable:
    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def __call__(self, round: int) -> Any:
        return self.draw(round)

    def close(self) -> None:
        """There is nothing to close."""


def _until(done: list[tuple[int, float]], clients: int, start: float) -> None:
    """Note how far an evaluation is; a minute of it says enough."""
    done.append((clients, time.perf_counter() - start))
    if done[-1][1] > 60:
        raise TimeoutError


def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """The next word, from the mean of a sentence's: a small model, so that waiting would show."""
    seen = jnp.mean(params["embed"][batch["words"]], axis=1)
    scores = seen @ params["out"]
    chosen = jnp.take_along_axis(scores, batch["next"][:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(scores, axis=1) - chosen


def _model() -> dict[str, jax.Array]:
    a, b = jax.random.split(jax.random.key(1))
    return {
        "embed": jax.random.normal(a, (WORDS, WIDTH)),
        "out": 0.1 * jax.random.normal(b, (WIDTH, WORDS)),
    }


def _counts(clients: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return np.clip(random.lognormal(MEAN, DEVIATION, clients), 1, MOST).astype(np.int64)


def _clients(counts: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    words = random.integers(0, WORDS, (200_000, LENGTH)).astype(np.int32)
    starts = random.integers(0, len(words) - MOST, len(counts))
    for count, start in zip(counts.tolist(), starts.tolist(), strict=True):
        some = words[start : start + count]
        yield {"words": some, "next": some[:, 0]}


def _forget(folder: Path) -> None:
    """Let the system forget what it has read of these files, where it can be asked to."""
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _peak() -> float:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = [
        [name, f"{1e3 * one['seconds']:.0f}", f"**{one['waited']:.1%}**"]
        for name, one in data["ways"].items()
    ]
    evaluated, own = data["evaluated"], data["peak of nothing"]
    return "\n\n".join(
        [
            f"A store of {data['clients']:,} clients and {data['bytes'] / 1e9:.1f} GB (sentences "
            f"of {LENGTH} words, a client has up to {MOST:,}), written in "
            f"{data['seconds to write']:.0f} s. It opens in **{1e3 * data['opened']:.0f} ms**.",
            f"FedAvg on a small model, {COHORT} clients a round, {data['rounds']} rounds; a few "
            f"are {FEW:,} of them. The goal: below 10 % of the time is spent waiting for "
            "data.",
            table(["clients", "ms a round", "of it waiting"], rows),
            f"The process had at most {data['peak'] / 2**20:,.0f} MiB while it trained on disk "
            f"({own / 2**20:,.0f} when it had only imported JAX), and "
            f"{evaluated['peak'] / 2**20:,.0f} MiB after an evaluation, portion by portion, which "
            f"went over {evaluated['clients']:,} clients in {evaluated['seconds']:.0f} s.",
        ]
    )
