"""Split an ordinary data set over clients: evenly, by labels in one of three ways, or by a column.

Each function returns one array of example indices per client. Together they are a partition: every
example belongs to exactly one client, and every client has at least one.

    parts = split.dirichlet(labels, clients=100, concentration=0.3, rng=np.random.default_rng(0))
    clients = fg.population(split.divide({"x": images, "y": labels}, parts))
"""

from typing import Any

import jax
import numpy as np

from fedgrad.core import lossless
from fedgrad.core.errors import known_arguments
from fedgrad.tasks.task_checks import TaskError


@known_arguments()
def iid(labels: Any, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Distribute examples at random; all clients get the same number (or one more)."""
    labels = _checked(labels, clients, at_least=1)
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


@known_arguments()
def dirichlet(
    labels: Any, clients: int, concentration: float, rng: np.random.Generator, at_least: int = 1
) -> list[np.ndarray]:
    """Divide each class over the clients in proportions drawn from Dirichlet(concentration).

    Args:
        labels: One label per example.
        clients: The number of clients.
        concentration: A small one (0.1) gives most of a class to a few clients, a large one (100)
            nearly equal shares to all. Sizes differ too.
        rng: The random generator.
        at_least: The least number of examples of a client. Smaller clients get examples, at random,
            from the largest one.

    Returns:
        The indices of each client's examples.
    """
    labels = _checked(labels, clients, at_least)
    if not concentration > 0:
        raise TaskError.here(f"A concentration is positive, got {concentration}.")
    owner = np.empty(len(labels), int)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, concentration))
        # Round the running total rather than each share, so that the counts add up.
        ends = np.round(np.cumsum(shares) * len(members)).astype(int)
        ends[-1] = len(members)
        owner[members] = np.repeat(np.arange(clients), np.diff(ends, prepend=0))
    counts = np.bincount(owner, minlength=clients)
    while counts.min() < at_least:
        poorest, richest = int(counts.argmin()), int(counts.argmax())
        owner[rng.choice(np.flatnonzero(owner == richest))] = poorest
        counts[poorest] += 1
        counts[richest] -= 1
    return _parts(owner, clients)


@known_arguments()
def pathological(
    labels: Any, clients: int, classes_per_client: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Give each client exactly `classes_per_client` classes, at random; larger classes go to more.

    A class is cut into equal shards, one for each client that has it.
    """
    labels = _checked(labels, clients, at_least=1)
    classes, sizes = np.unique(labels, return_counts=True)
    shards = _shards_per_class(sizes, clients, classes_per_client)
    room = np.full(clients, classes_per_client)
    owner = np.empty(len(labels), int)
    # The class with the most shards first, to the clients with the most room: this fills every
    # client (Gale and Ryser). Ties are broken at random.
    for c in sorted(range(len(classes)), key=lambda c: -shards[c]):
        chosen = np.lexsort((rng.random(clients), -room))[: shards[c]]
        room[chosen] -= 1
        members = rng.permutation(np.flatnonzero(labels == classes[c]))
        for client, shard in zip(chosen, np.array_split(members, shards[c]), strict=True):
            owner[shard] = client
    return _parts(owner, clients)


@known_arguments()
def pachinko(
    labels: Any,
    superclasses: Any,
    clients: int,
    rng: np.random.Generator,
    concentrations: tuple[float, float] = (0.1, 10.0),
) -> list[np.ndarray]:
    """Split by Pachinko allocation, as federated CIFAR-100 is, into clients of equal size.

    A client draws its preferences for superclasses, and for the classes within each, from Dirichlet
    distributions. Then it draws examples, each by superclass and class, without replacement. All
    clients get the same number of examples (or one more).

    Args:
        labels: One label per example.
        superclasses: One superclass per example, the same for all examples of a class.
        clients: The number of clients.
        rng: The random generator.
        concentrations: Of the Dirichlet distributions over superclasses and over classes.

    Returns:
        The indices of each client's examples.

    Reference: Li and McCallum 2006, "Pachinko allocation".
    """
    labels = _checked(labels, clients, at_least=1)
    above = _array(superclasses, "Superclasses")
    if above.shape != labels.shape:
        raise TaskError.here(
            f"Every label has a superclass: got {labels.shape} labels, {above.shape} superclasses."
        )
    if not min(concentrations) > 0:
        raise TaskError.here(f"A concentration is positive, got {concentrations}.")
    classes, label = np.unique(labels, return_inverse=True)
    tops, top_of_example = np.unique(above, return_inverse=True)
    top = np.empty(len(classes), int)
    top[label] = top_of_example
    if (top[label] != top_of_example).any():
        raise TaskError.here("A class has one superclass; got examples of a class in several.")
    waiting = [list(rng.permutation(np.flatnonzero(label == c))) for c in range(len(classes))]
    left = np.array([len(examples) for examples in waiting])
    left_above = np.bincount(top, left)
    inside = [np.flatnonzero(top == t) for t in range(len(tops))]
    parts = []
    for size in (len(part) for part in np.array_split(labels, clients)):
        likes = rng.dirichlet(np.full(len(tops), concentrations[0]))
        within = [rng.dirichlet(np.full(len(members), concentrations[1])) for members in inside]
        mine = []
        for _ in range(size):
            t = _drawn(likes, left_above > 0, rng)
            c = inside[t][_drawn(within[t], left[inside[t]] > 0, rng)]
            left[c] -= 1
            left_above[t] -= 1
            mine.append(waiting[c].pop())
        parts.append(np.sort(np.array(mine, int)))
    return parts


@known_arguments()
def by_column(values: Any) -> list[np.ndarray]:
    """Make a client for each value of a column, such as the author, in the order of `np.unique`."""
    values = _array(values, "A column")
    if values.ndim != 1 or not len(values):
        raise TaskError.here(
            f"A column is a vector, one value per example, got shape {values.shape}."
        )
    _, owner = np.unique(values, return_inverse=True)
    return _grouped(owner)


@known_arguments()
def divide(examples: Any, parts: list[np.ndarray]) -> list[Any]:
    """Return each client's examples (of a pytree with one row for each), for `fg.population`."""
    if why := lossless.masked(examples):
        raise TaskError.here(f"Examples{why}")
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(examples)]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        raise TaskError.here(f"Every array has one row per example, got arrays of shapes {shapes}.")
    return [jax.tree.map(lambda leaf: np.asarray(leaf)[part], examples) for part in parts]  # noqa: B023


@known_arguments()
def hold_out(
    clients: list[Any], fraction: float, rng: np.random.Generator
) -> tuple[list[Any], list[Any]]:
    """Shuffle every client's examples and split them: (the rest, this fraction of them).

    Both get at least one example; otherwise the rest is rounded down.
    """
    if not 0 < fraction < 1:
        raise TaskError.here(f"The fraction held out lies between 0 and 1, got {fraction}.")
    rest, held_out = [], []
    for number, client in enumerate(clients):
        size = len(jax.tree.leaves(client)[0])
        if size < 2:
            raise TaskError.here(
                f"Client {number} has {size} example(s): nothing to hold out. Give it at least 2."
            )
        order = rng.permutation(size)
        # 1e-9 keeps 0.9 * 50 from being 44.999...
        kept = min(max(int(size * (1 - fraction) + 1e-9), 1), size - 1)
        parts = divide(client, [order[:kept], order[kept:]])
        rest.append(parts[0])
        held_out.append(parts[1])
    return rest, held_out


def _shards_per_class(sizes: np.ndarray, clients: int, classes_per_client: int) -> np.ndarray:
    """Return the number of shards of each class: proportional to its size, at least one, and at
    most its number of examples and the number of clients."""
    total = clients * classes_per_client
    if not 1 <= classes_per_client <= len(sizes):
        raise TaskError.here(
            f"A client has 1 to {len(sizes)} of the {len(sizes)} classes, got {classes_per_client}."
        )
    if total < len(sizes):
        raise TaskError.here(
            f"{clients} clients with {classes_per_client} class(es) each cannot hold all "
            f"{len(sizes)} classes. Take more clients or more classes for each."
        )
    most = np.minimum(sizes, clients)
    if total > most.sum():
        raise TaskError.here(
            f"{clients} clients with {classes_per_client} class(es) each want {total} shards, but "
            f"the classes can be cut into {most.sum()} at most. Take fewer clients or classes."
        )
    shards = np.ones(len(sizes), int)
    for _ in range(total - len(sizes)):
        per_shard = np.where(shards < most, sizes / shards, -1.0)
        shards[int(per_shard.argmax())] += 1
    return shards


def _drawn(shares: np.ndarray, possible: np.ndarray, rng: np.random.Generator) -> int:
    """Draw a possible index in proportion to its share; uniformly if all shares are 0."""
    shares = np.where(possible, shares, 0.0)
    if not shares.sum() > 0:
        shares = possible.astype(float)
    return int(np.searchsorted(np.cumsum(shares), rng.random() * shares.sum(), side="right"))


def _grouped(owner: np.ndarray) -> list[np.ndarray]:
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])


def _parts(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    return [np.flatnonzero(owner == client) for client in range(clients)]


def _array(x: Any, what: str) -> np.ndarray:
    if why := lossless.masked(x):
        raise TaskError.here(f"{what}{why}")
    return np.asarray(x)


def _checked(labels: Any, clients: int, at_least: int) -> np.ndarray:
    labels = _array(labels, "Labels")
    if labels.ndim != 1:
        raise TaskError.here(f"Labels are a vector, one per example, got shape {labels.shape}.")
    if clients < 1:
        raise TaskError.here(f"Examples are split over at least 1 client, got {clients}.")
    if at_least < 1:
        raise TaskError.here(f"Every client has at least 1 example, got at_least={at_least}.")
    if len(labels) < clients * at_least:
        raise TaskError.here(
            f"{len(labels)} examples are too few for {clients} clients with at least {at_least} "
            f"each. Take at most {len(labels) // at_least} clients."
        )
    return labels
