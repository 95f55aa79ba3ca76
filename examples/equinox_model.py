"""An Equinox model, trained by FedAvgM that sets its own server learning rate and momentum.

What is trained are the model's floating arrays; the rest of it (activations, sizes) stays with the
loss.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedgrad as fg

FEATURES, CLASSES, CLIENTS, COHORT = 8, 3, 60, 10

model = eqx.nn.MLP(FEATURES, CLASSES, width_size=16, depth=1, key=jax.random.key(0))
params, rest = eqx.partition(model, eqx.is_inexact_array)


def loss(params: Any, batch: Any) -> jax.Array:
    """One loss for each example of the batch."""
    scores = jax.vmap(eqx.combine(params, rest))(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])


algorithm = fg.self_tuning(
    fg.fed_avgm(loss, client=0.1, server_learning_rate=0.1, momentum=0.5),
    learn="server",
    optimizer=optax.adam(0.05),
)
program = algorithm.round


def make_population() -> fg.Population:
    """Clients with 5 to 59 examples, of classes that are drawn around a center each."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(CLASSES, FEATURES))
    clients = []
    for size in rng.integers(5, 60, CLIENTS):
        y = rng.integers(0, CLASSES, size)
        x = centers[y] + rng.normal(size=(size, FEATURES))
        clients.append({"x": x.astype(np.float32), "y": y})
    return fg.population(clients)


def arguments() -> tuple[Any, ...]:
    population = make_population()
    key, *keys = jax.random.split(jax.random.key(1), 3)
    cohort, gradient_cohort = (population.sample(k, COHORT) for k in keys)
    return algorithm.init(params), algorithm.hyper, cohort, key, gradient_cohort


def main(rounds: int = 40) -> None:
    result = fg.fit(
        algorithm,
        make_population(),
        params=params,
        rounds=rounds,
        cohort_size=COHORT,
        key=jax.random.key(1),
        progress=False,
    )
    for name in ("loss", "hyper.server.learning_rate", "hyper.server.momentum"):
        print(f"{name:27} {result.history[name][0]:.3f} -> {result.history[name][-1]:.3f}")
    trained = eqx.combine(result.params, rest)
    scores = trained(jnp.zeros(FEATURES))
    print("scores of an example:", *(f"{score:.2f}" for score in scores))


if __name__ == "__main__":
    main()
