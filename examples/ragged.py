"""Clients of different sizes: a population stored once, a cohort a round, local SGD with `fold`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedgrad as fg

FEATURES, CLIENTS, COHORT, BATCH = 10, 300, 30, 8
TRACES: list[str] = []  # one entry each time JAX traces the round


def squared_error(w: jax.Array, batch: Any, mask: jax.Array) -> jax.Array:
    """The last batch of a client may be short: the mask says which examples exist."""
    return jnp.sum(mask * (batch["x"] @ w - batch["y"]) ** 2) / jnp.sum(mask)


@fg.program(mine=fg.CLIENTS)
def fed_avg(w: jax.Array, key: jax.Array, mine: fg.Examples) -> jax.Array:
    """One round: two epochs of SGD at each client, in its own random order; then the mean."""
    TRACES.append("fed_avg")

    def step(w: jax.Array, batch: Any, mask: jax.Array) -> jax.Array:
        return w - 0.005 * jax.grad(squared_error)(w, batch, mask)

    own_key = fg.client_key(key)  # one key is sent, every client makes its own of it
    trained = mine.fold(step, fg.broadcast(w), BATCH, epochs=2, key=own_key)
    return fg.mean(trained, weights=mine.count)


@fg.program(mine=fg.CLIENTS)
def loss(w: jax.Array, mine: fg.Examples) -> jax.Array:
    here = fg.broadcast(w)

    def add(total: jax.Array, batch: Any, mask: jax.Array) -> jax.Array:
        return total + jnp.sum(mask) * squared_error(here, batch, mask)

    return fg.mean(mine.fold(add, 0.0, BATCH) / mine.count, weights=mine.count)


program = fed_avg


def make_population() -> fg.Population:
    """Clients with 3 to about 400 examples; most have few, some have many."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=FEATURES)
    clients = []
    for size in np.clip(rng.lognormal(3, 1.2, CLIENTS).astype(int), 3, 400):
        x = rng.normal(size=(size, FEATURES)).astype(np.float32)
        shift = truth + 0.3 * rng.normal(size=FEATURES)
        clients.append({"x": x, "y": (x @ shift).astype(np.float32)})
    return fg.population(clients)


def arguments() -> tuple[Any, ...]:
    cohort = make_population().sample(jax.random.key(1), COHORT)
    return jnp.zeros(FEATURES), jax.random.key(0), cohort


def main(rounds: int = 13) -> None:
    population = make_population()
    w = jnp.zeros(FEATURES)
    print(population, f"sizes {population.counts.min()} to {population.counts.max()}")
    print(fg.plan(fed_avg, *arguments()), "\n")
    TRACES.clear()
    for i, key in enumerate(jax.random.split(jax.random.key(0), rounds)):
        if i % 4 == 0:
            print(f"round {i:2}  loss over everyone {loss(w, population.everyone):.3f}")
        sampling, training = jax.random.split(key)
        w = fed_avg(w, training, population.sample(sampling, COHORT))
    print(f"\n{rounds} cohorts of {COHORT} clients, traced {len(TRACES)} time")


if __name__ == "__main__":
    main()
