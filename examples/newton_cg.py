"""Federated Newton-CG: Hessian-vector products from clients, no Hessian anywhere.

`fg.jvp(fg.grad(loss))` is a program that takes a vector v and gives the gradient and H v. A step
solves H s = -g by conjugate gradients, so it is a round for g and a round for each product.
"""

from typing import Any

import jax
import jax.numpy as jnp

import fedgrad as fg

FEATURES, CLIENTS, EXAMPLES, PRODUCTS = 12, 30, 40, 8
RATE = 1.5  # of gradient descent: after 45 rounds the best of 0.3, 0.5, 0.8, 1, 1.5, 2 and 3


@fg.program(data=fg.CLIENTS)
def loss(w: jax.Array, data: Any) -> jax.Array:
    """Logistic regression with a little ridge."""
    margin = data["y"] * (data["x"] @ fg.broadcast(w))
    return fg.mean(jnp.mean(jax.nn.softplus(-margin))) + 0.5e-3 * w @ w


gradient = fg.value_and_grad(loss)
product = fg.jvp(fg.grad(loss))


@fg.program(data=fg.CLIENTS)
def newton_cg(w: jax.Array, data: Any) -> tuple[jax.Array, jax.Array]:
    """One step and the loss before it. Programs inside of a program are parts of it."""
    value, g = gradient(w, data)

    def improve(state: Any, _: None) -> Any:
        s, residual, direction, norm = state
        _, curved = product(w, data, direction)
        length = norm / (direction @ curved)
        s, residual = s + length * direction, residual - length * curved
        new = residual @ residual
        return (s, residual, residual + new / norm * direction, new), None

    start = (jnp.zeros_like(w), -g, -g, g @ g)
    (s, *_), _ = jax.lax.scan(improve, start, None, length=PRODUCTS)
    return w + s, value


program = loss


def arguments() -> tuple[jax.Array, Any]:
    """Clients of different difficulty: features on very different scales."""
    a, b, c = jax.random.split(jax.random.key(0), 3)
    scales = jnp.logspace(0.5, -1.5, FEATURES)
    x = jax.random.normal(a, (CLIENTS, EXAMPLES, FEATURES)) * scales
    score = x @ (jax.random.normal(b, (FEATURES,)) / scales)
    noise = jax.random.logistic(c, (CLIENTS, EXAMPLES))
    return jnp.zeros(FEATURES), {"x": x, "y": jnp.sign(score + noise)}


def main(steps: int = 5) -> None:
    start, data = arguments()
    plan = fg.plan(newton_cg, start, data)
    print(plan, "\n")

    rounds = plan.rounds
    newton, descent = start, start
    print("rounds   Newton-CG   gradient descent")
    for step in range(steps + 1):
        print(f"{step * rounds:6}   {loss(newton, data):9.6f}   {loss(descent, data):9.6f}")
        newton, _ = newton_cg(newton, data)
        for _ in range(rounds):
            _, g = gradient(descent, data)
            descent = descent - RATE * g
    _, g = gradient(newton, data)
    print(f"\nNorm of the gradient at the end: {jnp.linalg.norm(g):.0e}")


if __name__ == "__main__":
    main()
