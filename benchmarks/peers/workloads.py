"""The three workloads, in numpy only: data, cohorts, first weights and the checksum.

Every competitor reads these and nothing else, so that all of them train on the same examples, in
the same order, from the same weights. Weights are one flat float32 vector, laid out as in `SHAPES`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BATCH = {"ragged": 10, "cnn": 20}
LR = {"logistic": 0.1, "ragged": 0.01, "cnn": 0.05}
LOCAL_STEPS = 10  # of `logistic`, full batch; the others make one epoch over their batches
FEATURES, CLASSES, IMAGE, LETTERS = 60, 10, 28, 62

Shapes = dict[str, tuple[int, ...]]
LINEAR: Shapes = {"w": (FEATURES, CLASSES), "b": (CLASSES,)}
SHAPES: dict[str, Shapes] = {
    "logistic": LINEAR,
    "ragged": LINEAR,
    "cnn": {
        "conv1": (3, 3, 1, 32),
        "bias1": (32,),
        "conv2": (3, 3, 32, 64),
        "bias2": (64,),
        "dense1": (12 * 12 * 64, 128),
        "bias3": (128,),
        "dense2": (128, LETTERS),
        "bias4": (LETTERS,),
    },
}


@dataclass(frozen=True)
class Population:
    """All clients' examples end to end; client c owns x[offset[c] : offset[c] + count[c]]."""

    x: np.ndarray
    y: np.ndarray
    offset: np.ndarray
    count: np.ndarray

    def client(self, c: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples and labels of client c."""
        own = slice(self.offset[c], self.offset[c] + self.count[c])
        return self.x[own], self.y[own]


def population(workload: str, clients: int | None = None, seed: int = 0) -> Population:
    """The clients of a workload. `logistic` takes their number, the others have their own."""
    rng = np.random.default_rng(seed)
    if workload == "logistic":
        count = np.full(clients or 50, 100)
        return _planted(rng, count)
    if workload == "ragged":
        count = np.minimum(50 + rng.lognormal(4, 2, clients or 1000).astype(int), 1000)
        return _planted(rng, count // BATCH["ragged"] * BATCH["ragged"])
    if workload == "cnn":
        count = np.full(clients or 40, 100)
        x = rng.random((count.sum(), IMAGE, IMAGE, 1), np.float32)
        y = rng.integers(0, LETTERS, count.sum()).astype(np.int32)
        return Population(x, y, _offsets(count), count)
    raise ValueError(f'no workload is called "{workload}"; there are: {", ".join(SHAPES)}')


def cohort(workload: str, i: int, clients: int | None = None) -> np.ndarray:
    """The clients of round i, in the order in which they were sampled."""
    if workload == "logistic":
        return np.arange(clients or 50)
    population_size, size = {"ragged": (1000, 50), "cnn": (40, 10)}[workload]
    rng = np.random.default_rng((1, i))
    return rng.choice(clients or population_size, size, replace=False)


def first_weights(workload: str) -> np.ndarray:
    """The weights before round 0: zeros for the convex models, scaled normals for the CNN."""
    shapes = SHAPES[workload]
    if workload != "cnn":
        return np.zeros(sum(int(np.prod(s)) for s in shapes.values()), np.float32)
    rng = np.random.default_rng(2)
    parts = [
        rng.standard_normal(s).astype(np.float32) * np.float32(np.sqrt(2 / np.prod(s[:-1])))
        if len(s) > 1
        else np.zeros(s, np.float32)
        for s in shapes.values()
    ]
    return np.concatenate([p.ravel() for p in parts])


def unflatten(workload: str, flat: np.ndarray) -> dict[str, np.ndarray]:
    """The named arrays of a flat weight vector."""
    shapes = SHAPES[workload]
    ends = np.cumsum([int(np.prod(s)) for s in shapes.values()])
    parts = np.split(np.asarray(flat), ends[:-1])
    return {name: p.reshape(s) for (name, s), p in zip(shapes.items(), parts, strict=True)}


def flatten(workload: str, weights: dict[str, np.ndarray]) -> np.ndarray:
    """The inverse of `unflatten`."""
    return np.concatenate([np.asarray(weights[name]).ravel() for name in SHAPES[workload]])


def checksum(flat: np.ndarray) -> float:
    """A projection on fixed random signs: unlike a norm, it sees weights that swap places."""
    flat = np.asarray(flat, np.float64)
    return float(flat @ np.random.default_rng(3).choice([-1.0, 1.0], flat.size))


def _planted(rng: np.random.Generator, count: np.ndarray) -> Population:
    total = int(count.sum())
    x = rng.standard_normal((total, FEATURES), np.float32)
    noise = rng.gumbel(size=(total, CLASSES)).astype(np.float32)
    truth = rng.standard_normal((FEATURES, CLASSES), np.float32) / np.float32(4)
    y = np.argmax(x @ truth + noise, axis=1).astype(np.int32)
    return Population(x, y, _offsets(count), count)


def _offsets(count: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(count)[:-1]])
