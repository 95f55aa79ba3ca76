"""A Flax NNX model with dropout, trained by FedAvg that sets its clients' learning rate.

What is trained is the state of its parameters; the graph of the model stays with the loss. The loss
is random: it has an argument `key`, and gets another one in every step of every client.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fedgrad as fg

FEATURES, CLASSES, CLIENTS, COHORT = 8, 3, 60, 10


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(FEATURES, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.out = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = jax.nn.relu(self.hidden(x))
        return self.out(self.dropout(x, deterministic=rngs is None, rngs=rngs))


graph, params = nnx.split(Classifier(nnx.Rngs(0)), nnx.Param)


def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """One loss for each example of the batch."""
    scores = nnx.merge(graph, params)(batch["x"], nnx.Rngs(key))
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])


algorithm = fg.self_tuning(
    fg.fed_avg(loss, client=0.01), learn="client", optimizer=optax.adam(0.01)
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
    for name in ("loss", "hyper.client.learning_rate"):
        print(f"{name:27} {result.history[name][0]:.3f} -> {result.history[name][-1]:.3f}")
    trained = nnx.merge(graph, result.params)
    scores = trained(jnp.zeros(FEATURES))
    print("scores of an example:", *(f"{score:.2f}" for score in scores))


if __name__ == "__main__":
    main()
