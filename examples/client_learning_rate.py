"""The learning rate of local SGD, tuned by its own hypergradient, on clients of different sizes.

The derivative goes through every local step of every client. Forward mode takes it along: one
number in, so one tangent as large as the model, however many steps there are. The loss is that of
other clients, who hold out theirs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedgrad as fg

TRAIN, EVAL = fg.Placement("train"), fg.Placement("eval")
FEATURES, CLIENTS, COHORT, BATCH = 8, 200, 20, 5


def squared_error(w: jax.Array, batch: Any, mask: jax.Array) -> jax.Array:
    return jnp.sum(mask * (batch["x"] @ w - batch["y"]) ** 2) / jnp.sum(mask)


@fg.program(mine=TRAIN, held_out=EVAL)
def fed_avg(log_lr: jax.Array, w: jax.Array, mine: fg.Examples, held_out: fg.Examples) -> Any:
    """One round of FedAvg, then the loss of its result at other clients: (loss, new weights)."""
    lr = jnp.exp(fg.broadcast(log_lr, TRAIN))

    def step(w: jax.Array, batch: Any, mask: jax.Array) -> jax.Array:
        return w - lr * jax.grad(squared_error)(w, batch, mask)

    local = mine.fold(step, fg.broadcast(w, TRAIN), BATCH)
    new = fg.mean(local, weights=mine.count, at=TRAIN)
    batch, mask = held_out.batch(0, held_out.capacity)
    loss = squared_error(fg.broadcast(new, EVAL), batch, mask)
    return fg.mean(loss, weights=held_out.count, at=EVAL), new


@fg.program(mine=TRAIN, held_out=EVAL)
def loss_after(log_lr: jax.Array, w: jax.Array, mine: fg.Examples, held_out: fg.Examples) -> Any:
    return fed_avg(log_lr, w, mine, held_out)[0]


program = loss_after
# ((loss, new weights), derivative of the loss), along with the round that is done anyway
hyper = fg.value_and_grad(fed_avg, argnums="log_lr", mode="forward", has_aux=True)


def make_population() -> fg.Population:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=FEATURES)
    clients = []
    for size in np.clip(rng.lognormal(2.5, 1.0, CLIENTS).astype(int), 4, 120):
        x = rng.normal(size=(size, FEATURES)).astype(np.float32)
        noise = 0.5 * rng.normal(size=size)
        clients.append({"x": x, "y": (x @ truth + noise).astype(np.float32)})
    return fg.population(clients)


def arguments() -> tuple[Any, ...]:
    population = make_population()
    train, held_out = (population.sample(jax.random.key(i), COHORT) for i in range(2))
    return jnp.log(0.001), jnp.zeros(FEATURES), train, held_out


def run(tune: bool, rounds: int) -> list[tuple[float, float]]:
    """Rounds of FedAvg from a learning rate that is far too small: (learning rate, loss)."""
    population = make_population()
    log_lr, w, history = jnp.log(0.001), jnp.zeros(FEATURES), []
    for key in jax.random.split(jax.random.key(0), rounds):
        train, held_out = (population.sample(k, COHORT) for k in jax.random.split(key))
        (loss, w), slope = hyper(log_lr, w, train, held_out)
        history.append((float(jnp.exp(log_lr)), float(loss)))
        if tune:  # the sign is enough: a step of a fifth, up or down
            log_lr = log_lr - 0.2 * jnp.sign(slope)
    return history


def main(rounds: int = 30) -> None:
    args = arguments()
    print(fg.plan(hyper, *args), "\n")

    small = 1e-2  # a finite difference, to see that it is the derivative
    log_lr, *rest = args
    ahead, behind = (loss_after(log_lr + h, *rest) for h in (small, -small))
    _, slope = hyper(*args)
    print(f"hypergradient {slope:.4f}, finite difference {(ahead - behind) / 2 / small:.4f}")

    print("\nround   learning rate   loss when tuned   loss when fixed")
    both = zip(run(True, rounds), run(False, rounds), strict=True)
    for i, ((lr, tuned), (_, fixed)) in enumerate(both):
        if i % 5 == 0 or i == rounds - 1:
            print(f"{i + 1:5} {lr:15.4f} {tuned:17.3f} {fixed:17.3f}")


if __name__ == "__main__":
    main()
