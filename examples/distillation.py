"""Distillation: learn a few labels at the server such that a model trained on them suits clients.

The gradient by n labels of a model of m parameters costs, in floats per client (and one for the
count of the mean): forward m + mn down and 1 + n up, reverse m + 1 and 1 + m, mixed m and 1 + m.
The plot shows what the plans say, for three modes and for what the planner takes.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fedgrad as fg

LABELS, CLIENTS, EXAMPLES = 8, 20, 30
LOOKS: dict[str, tuple[str, str, Any]] = {
    "forward": ("forward", "p0", "line"),
    "reverse": ("reverse, asks clients twice", "p2", "dashed"),
    "mixed": ("mixed", "p1", "line"),
    "auto": ("what auto takes", "p3", "broad"),
}


def train(inputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Twenty steps of gradient descent on what the server has made up."""

    def step(w: jax.Array, _: None) -> tuple[jax.Array, None]:
        return w - 0.5 * inputs.T @ (inputs @ w - labels) / len(labels), None

    return jax.lax.scan(step, jnp.zeros(inputs.shape[1]), None, length=20)[0]


@fg.program(z=fg.CLIENTS)
def loss(x: jax.Array, inputs: jax.Array, z: Any) -> jax.Array:
    model = fg.broadcast(train(inputs, x))
    return fg.mean(jnp.mean((z["x"] @ model - z["y"]) ** 2))


program = loss


def arguments(size: int = 5) -> tuple[Any, ...]:
    """Labels, inputs, and clients that agree on a model of `size` parameters, up to noise."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (CLIENTS, EXAMPLES, size))
    noise = 0.1 * jax.random.normal(keys[1], (CLIENTS, EXAMPLES))
    inputs = jax.random.normal(keys[2], (LABELS, size))
    y = x @ jax.random.normal(keys[3], (size,)) + noise
    return jnp.zeros(LABELS), inputs, {"x": x, "y": y}


def bills(sizes: list[int], cost: fg.CostModel) -> dict[str, list[float]]:
    """What the gradient costs in each mode. Shapes are enough: no model of 100,000 is made."""
    found: dict[str, list[float]] = {}
    for size in sizes:
        shapes = jax.eval_shape(lambda size=size: arguments(size))
        for row in fg.explain(loss, *shapes, cost=cost).rows:
            found.setdefault(row.mode, []).append(row.price)
    return found


def plot(path: str, sizes: list[int]) -> None:
    charts = []
    for up in (1, 20):
        prices = bills(sizes, fg.CostModel(down=1 / 4, up=up / 4))  # per float, not per byte
        curves = [
            fg.charts.Curve(name, sizes, prices[mode], color, look)
            for mode, (name, color, look) in LOOKS.items()
        ]
        title = f"a float up costs {'as much as' if up == 1 else f'{up} times'} one down"
        x_axis = fg.charts.axis(sizes, logarithmic=True)
        charts.append(
            fg.charts.Chart(title, curves, "model size m", "price per client", x_axis=x_axis)
        )
    fg.charts.Figure([fg.charts.alike(charts)]).save(path)
    print(f"The plot is in {path}")


def main(sizes: list[int] | None = None, steps: int = 40) -> None:
    labels, inputs, z = arguments()
    print(fg.explain(loss, labels, inputs, z))
    value_and_grad = fg.value_and_grad(loss)
    for i in range(steps + 1):
        now, gradient = value_and_grad(labels, inputs, z)
        if i % 10 == 0:
            print(f"step {i:2}  loss of a model trained on the labels {now:.4f}")
        labels = labels - 2.0 * gradient
    Path("out").mkdir(exist_ok=True)
    plot("out/distillation.svg", sizes or [2, 4, 8, 16, 32, 64, 512, 65536])


if __name__ == "__main__":
    main()
