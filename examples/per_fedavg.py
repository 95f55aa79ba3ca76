"""PerFedAvg's exact meta-gradient: find a model that is good after one step at each client.

The meta-loss differentiates through each client's step, so its gradient holds the client's
Hessian. It is computed where the data are; a client sends one gradient, as in FedSGD.
"""

from typing import Any

import jax
import jax.numpy as jnp

import fedgrad as fg

CLIENTS, SHOTS, HIDDEN, STEP = 40, 10, 24, 0.1


def local_loss(w: Any, data: Any) -> jax.Array:
    hidden = jnp.tanh(data["x"][:, None] * w["in"] + w["bias"])
    return jnp.mean((hidden @ w["out"] - data["y"]) ** 2)


def adapt(w: Any, data: Any) -> Any:
    slope = jax.grad(local_loss)(w, data)
    return jax.tree.map(lambda a, b: a - STEP * b, w, slope)


@fg.program(support=fg.CLIENTS, query=fg.CLIENTS)
def meta_loss(w: Any, support: Any, query: Any) -> jax.Array:
    return fg.mean(local_loss(adapt(fg.broadcast(w), support), query))


@fg.program(support=fg.CLIENTS, query=fg.CLIENTS)
def plain_loss(w: Any, support: Any, query: Any) -> jax.Array:
    """What FedSGD minimizes: the loss of one model for all."""
    return fg.mean(local_loss(fg.broadcast(w), query))


program = meta_loss


def arguments() -> tuple[Any, Any, Any]:
    """Every client has a sine of its own height and phase."""
    keys = jax.random.split(jax.random.key(0), 4)
    height = jax.random.uniform(keys[0], (CLIENTS, 1), minval=0.5, maxval=2.0)
    phase = jax.random.uniform(keys[1], (CLIENTS, 1), minval=0.0, maxval=2.0)
    x = jax.random.uniform(keys[2], (CLIENTS, 2 * SHOTS), minval=-3.0, maxval=3.0)
    data = {"x": x, "y": height * jnp.sin(x + phase)}
    support = jax.tree.map(lambda leaf: leaf[:, :SHOTS], data)
    query = jax.tree.map(lambda leaf: leaf[:, SHOTS:], data)
    a, b, c = jax.random.split(keys[3], 3)
    w = {
        "in": jax.random.normal(a, (HIDDEN,)),
        "bias": jax.random.normal(b, (HIDDEN,)),
        "out": 0.2 * jax.random.normal(c, (HIDDEN,)),
    }
    return w, support, query


def centralized(w: Any, support: Any, query: Any) -> jax.Array:
    """The same in plain JAX, with all data in one place."""
    losses = jax.vmap(lambda s, q: local_loss(adapt(w, s), q))(support, query)
    return jnp.mean(losses)


def main(rounds: int = 400) -> None:
    w, support, query = arguments()
    exact = fg.grad(meta_loss)
    print(fg.plan(exact, w, support, query), "\n")
    expected = jax.grad(centralized)(w, support, query)
    errors = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), exact(w, support, query), expected)
    print(f"error against centralized JAX: {max(jax.tree.leaves(errors)):.0e}\n")

    print("loss after one local step, having trained for   rounds 0    " + f"{rounds}")
    for name, gradient in {"the loss itself": fg.grad(plain_loss), "the meta-loss": exact}.items():
        now = w
        for _ in range(rounds):
            slope = gradient(now, support, query)
            now = jax.tree.map(lambda a, b: a - 0.1 * b, now, slope)
        before, after = meta_loss(w, support, query), meta_loss(now, support, query)
        print(f"{name:47} {before:8.3f} {after:6.3f}")


if __name__ == "__main__":
    main()
