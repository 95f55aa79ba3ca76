"""Class 1 of the paper step by step: one gradient, three modes, three bills.

The server computes f1 and broadcasts, every client computes f2, the server sums and computes f3.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

import fedgrad as fg

D, M, P, CLIENTS = 6, 4, 2, 5  # sizes of x, of what is broadcast, of what is summed; clients


def f1(x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.sin(jnp.arange(M * D)).reshape(M, D) @ x)


def f2(u: jax.Array, z: jax.Array) -> jax.Array:
    return jnp.sin(z @ u)


def f3(total: jax.Array) -> jax.Array:
    return jnp.sum(total**2)


@fg.program(z=fg.CLIENTS)
def loss(x: jax.Array, z: jax.Array) -> jax.Array:
    v2 = f1(x)  # server
    v3 = fg.broadcast(v2)  # server -> clients
    v4 = f2(v3, z)  # each client, with its own z
    v5 = fg.sum(v4)  # clients -> server
    return f3(v5)  # server


program = loss


def arguments() -> tuple[jax.Array, jax.Array]:
    x, z = jax.random.split(jax.random.key(0))
    return jax.random.normal(x, (D,)), jax.random.normal(z, (CLIENTS, P, M))


def centralized(x: jax.Array, z: jax.Array) -> jax.Array:
    """The same in plain JAX, with all data in one place."""
    return f3(jnp.sum(jax.vmap(f2, in_axes=(None, 0))(f1(x), z), axis=0))


def main() -> None:
    args = arguments()
    Path("out").mkdir(exist_ok=True)
    plan = fg.plan(loss, *args)
    plan.draw("out/class_one.svg")
    print(plan, "\n")

    expected = jax.grad(centralized)(*args)
    for mode in ("forward", "reverse", "mixed"):
        gradient = fg.grad(loss, mode=mode)
        plan = fg.plan(gradient, *args)
        plan.draw(f"out/class_one_{mode}.svg")
        error = jnp.max(jnp.abs(gradient(*args) - expected))
        print(f"{mode}: {plan.rules[0]}, error against centralized JAX {error:.0e}")
        for t in plan.traffic:
            print(f"  round {t.round}: each client receives {t.down} floats and sends {t.up}")
        print(f"  asked again: {', '.join(plan.readdressed) or 'nobody'}")
    print("\nGraphs are in out/class_one*.svg\n")
    print(fg.explain(loss, *args).reason)


if __name__ == "__main__":
    main()
