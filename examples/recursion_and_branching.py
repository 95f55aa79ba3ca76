"""Recursion, branches and loops around communication, and derivatives through all of them."""

from typing import Any

import jax
import jax.numpy as jnp

import fedgrad as fg

DEPTH = 2


def slope_and_curve(w: jax.Array, z: jax.Array) -> Any:
    """First and second derivative of the clients' log cosh(w - z), averaged: one round."""
    t = jnp.tanh(fg.broadcast(w) - z)
    return fg.mean((t, 1 - t**2))


def newton(w: jax.Array, z: jax.Array, depth: int) -> jax.Array:
    """Recursion in Python: every level is a round, and half a step of Newton's method."""
    if depth == 0:
        return w
    slope, curve = slope_and_curve(w, z)
    return newton(w - 0.5 * slope / curve, z, depth - 1)


@fg.program(z=fg.CLIENTS)
def loss(w: jax.Array, z: jax.Array) -> jax.Array:
    center = newton(w, z, DEPTH)
    spread = fg.mean(jnp.abs(fg.broadcast(center) - z))

    def squares() -> jax.Array:
        return fg.mean((fg.broadcast(center) - z) ** 2)

    # The server decides which of the two happens: only one of them communicates.
    return jax.lax.cond(spread > 1.0, lambda: spread, squares)


program = loss


def arguments() -> tuple[jax.Array, jax.Array]:
    return jnp.float32(1.5), jnp.array([-0.4, 0.1, 0.2, 0.7, 1.3])


def centralized(w: jax.Array, z: jax.Array) -> jax.Array:
    for _ in range(DEPTH):
        t = jnp.tanh(w - z)
        w = w - 0.5 * jnp.mean(t) / jnp.mean(1 - t**2)
    spread = jnp.mean(jnp.abs(w - z))
    return jnp.where(spread > 1.0, spread, jnp.mean((w - z) ** 2))


@fg.program(z=fg.CLIENTS)
def until_settled(w: jax.Array, z: jax.Array) -> jax.Array:
    """As many rounds as the data ask for."""

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        slope, _ = slope_and_curve(state[0], z)
        return state[0] - slope, slope

    return jax.lax.while_loop(lambda s: jnp.abs(s[1]) > 0.01, step, (w, jnp.ones_like(w)))[0]


def main() -> None:
    w, z = arguments()
    print(fg.plan(loss, w, z), "\n")
    expected = jax.grad(centralized)(w, z)
    print(f"loss {loss(w, z):.6f}; by centralized JAX {centralized(w, z):.6f}")
    for mode in ("forward", "reverse", "mixed", "auto"):
        gradient = fg.grad(loss, mode=mode)
        error = abs(gradient(w, z) - expected)
        print(f"{mode:8} error {error:.0e}  {fg.plan(gradient, w, z).rounds} rounds")

    value, gradient = fg.value_and_grad(until_settled, mode="forward")(w, z)
    print(f"\nuntil_settled: {value:.4f}, derivative {gradient:.4f} (forward)")
    try:
        fg.grad(until_settled, mode="reverse")(w, z)
    except fg.PlanError as error:
        print(f"reverse: {error}")


if __name__ == "__main__":
    main()
