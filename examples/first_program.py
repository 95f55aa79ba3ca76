"""A federated program end to end: its plan, its graph, twenty rounds, and a mistake caught."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import fedgrad as fg

FEATURES, CLASSES = 20, 5


def loss(weights: jax.Array, batch: Any, mask: jax.Array) -> jax.Array:
    x, label = batch
    log_p = jax.nn.log_softmax(x @ weights)
    return -jnp.sum(jnp.where(mask, log_p[jnp.arange(len(label)), label], 0.0))


def local_sgd(weights: jax.Array, lr: jax.Array, mine: fg.Examples) -> jax.Array:
    def step(w: jax.Array, batch: Any, mask: jax.Array) -> jax.Array:
        return w - lr * jax.grad(loss)(w, batch, mask) / jnp.sum(mask)

    return mine.fold(step, weights, batch_size=10)


@fg.program(mine=fg.CLIENTS)
def fed_avg(weights: jax.Array, lr: jax.Array, mine: fg.Examples) -> tuple[jax.Array, jax.Array]:
    """One round: clients train on their own examples; their weights and losses are averaged."""
    start, lr = fg.broadcast((weights, lr))
    before = mine.fold(lambda total, *batch: total + loss(start, *batch), 0.0, batch_size=10)
    return fg.mean((local_sgd(start, lr, mine), before / mine.count), weights=mine.count)


@fg.program(mine=fg.CLIENTS)
def forgetful(weights: jax.Array, mine: fg.Examples) -> jax.Array:
    """No broadcast: clients would use weights that nobody sent them."""
    return fg.mean(loss(weights, *mine.batch(0, 10)))


def synthetic_clients(rng: np.random.Generator, clients: int) -> list[Any]:
    """Clients with 5 to 120 examples each, and each with its own taste in classes."""
    truth = rng.normal(size=(FEATURES, CLASSES))
    data = []
    for size in rng.integers(5, 121, clients):
        x = rng.normal(size=(size, FEATURES)).astype(np.float32)
        scores = x @ truth + rng.normal(size=CLASSES)
        data.append((x, np.argmax(scores, axis=1).astype(np.int32)))
    return data


program = fed_avg


def arguments() -> tuple[Any, ...]:
    everyone = fg.population(synthetic_clients(np.random.default_rng(0), clients=500))
    return jnp.zeros((FEATURES, CLASSES)), jnp.float32(0.1), everyone.sample(jax.random.key(0), 50)


def main(rounds: int = 20) -> None:
    console = Console(highlight=False)
    everyone = fg.population(synthetic_clients(np.random.default_rng(0), clients=500))
    weights, lr = jnp.zeros((FEATURES, CLASSES)), jnp.float32(0.1)
    key = jax.random.key(0)
    console.rule("The plan, before anything runs")
    plan = fg.plan(fed_avg, weights, lr, everyone.sample(key, 50))
    print(plan)
    Path("out").mkdir(exist_ok=True)
    plan.draw("out/first_program.svg")
    console.print("\nIts graph is in [bold]out/first_program.svg[/]\n")

    console.rule(f"{rounds} rounds, 50 of {len(everyone)} clients in each")
    for i, round_key in enumerate(jax.random.split(key, rounds), 1):
        weights, now = fed_avg(weights, lr, everyone.sample(round_key, 50))
        console.print(f"round {i:2}  loss {now:.3f}  [green]{'━' * int(30 * now)}[/]")

    console.rule("A mistake, and what fedgrad says")
    try:
        forgetful(weights, everyone.sample(key, 50))
    except fg.PlacementError as error:
        console.print(f"PlacementError: {error}", style="red", markup=False)


if __name__ == "__main__":
    main()
