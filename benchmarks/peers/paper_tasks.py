"""The paper's tasks as workloads: what is trained on in which round, for everybody alike.

Data are those that a task makes itself; the server is FedAvgM's. Whoever has no fedgrad (pfl) reads
all of it from a file that this one writes as a script: `paper_tasks.py <workload> <size> <file>`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedgrad as fg
from fedgrad.tasks import emnist

NAMES = ("emnist", "cifar100", "shakespeare", "stackoverflow_words", "stackoverflow_tags")
SERVER_RATE, MOMENTUM = 1.0, 0.9
ROUNDS = 64  # that are written to the file


@dataclass(frozen=True)
class Workload:
    """A task, of whose clients some take part in each round."""

    task: fg.tasks.Task
    loss: Callable[..., jax.Array]
    clients: list[dict[str, np.ndarray]]
    cohort_size: int
    dtype: str = "float32"  # of the model, and so of all that is computed with it

    def first_params(self) -> Any:
        """The model before round 0."""
        return jax.tree.map(lambda w: w.astype(self.dtype), self.task.init(jax.random.key(0)))

    def cohort(self, i: int) -> np.ndarray:
        """Who takes part in round i."""
        rng = np.random.default_rng((1, i))
        return rng.choice(len(self.clients), self.cohort_size, replace=False).astype(np.int32)

    def key(self, i: int) -> jax.Array:
        """What clients shuffle with in round i, and drop out with."""
        return jax.random.key(i)

    def change(self, params: Any) -> np.ndarray:
        """How far the model has come, as one vector. Compared instead of the model, because all
        begin with the same one, which after a few rounds is most of it still."""
        ends, starts = (jax.tree.leaves(jax.device_get(p)) for p in (params, self.first_params()))
        return np.concatenate([np.ravel(a - b) for a, b in zip(ends, starts, strict=True)])


def workload(
    name: str,
    size: str = "paper",
    clients: int = 30,
    cohort: int = 10,
    most: int | None = None,
    dropout: bool = True,
    dtype: str = "float32",
) -> Workload:
    """A task of so many clients, each with `most` examples at most."""
    jax.config.update("jax_enable_x64", dtype == "float64")
    task = fg.tasks.task(name, size=size, clients=clients)
    everyone = task.train.everyone
    rows = [slice(o, o + c) for o, c in zip(everyone.offset, everyone.count, strict=True)]
    store = jax.tree.map(np.asarray, everyone.store)
    own = [jax.tree.map(lambda leaf, row=row: leaf[row][:most], store) for row in rows]
    loss = task.loss if dropout or name != "emnist" else emnist.plain_loss
    return Workload(task, loss, own, min(cohort, len(own)), dtype)


def shuffled(key: jax.Array, count: jax.Array, capacity: int) -> jax.Array:
    """The order in which a client takes its examples, followed by places that do not exist."""
    nothing = fg.Examples((), jnp.int32(0), count, capacity)
    return nothing.shuffled(key)


def client_keys(key: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A client's keys of a round: to shuffle, and for its loss."""
    order, noise = jax.random.split(jax.random.fold_in(key, index))
    return order, noise


def write(made: Workload, path: Path) -> None:
    """All of it as arrays of numpy."""
    counts = np.array([len(c["y"]) for c in made.clients], np.int32)
    capacity = int(counts.max())

    @jax.jit
    @jax.vmap
    def orders(index: jax.Array, count: jax.Array, key: jax.Array) -> jax.Array:
        return shuffled(client_keys(key, index)[0], count, capacity)

    cohorts = np.stack([made.cohort(i) for i in range(ROUNDS)])
    keys = jnp.repeat(jax.vmap(jax.random.key)(jnp.arange(ROUNDS)), made.cohort_size)
    order = orders(cohorts.ravel(), counts[cohorts.ravel()], keys)
    weights, _ = jax.tree_util.tree_flatten_with_path(made.first_params())
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in weights]
    np.savez(
        path,
        x=np.concatenate([c["x"] for c in made.clients]),
        y=np.concatenate([c["y"] for c in made.clients]),
        counts=counts,
        cohorts=cohorts,
        orders=np.asarray(order).reshape(*cohorts.shape, capacity),
        names=np.array(names),
        rate=made.task.defaults.client_learning_rate,
        batch_size=made.task.defaults.batch_size,
        momentum=MOMENTUM,
        **{f"weights/{name}": w for name, (_, w) in zip(names, weights, strict=True)},
    )


if __name__ == "__main__":
    write(workload(sys.argv[1], **json.loads(sys.argv[2])), Path(sys.argv[3]))
