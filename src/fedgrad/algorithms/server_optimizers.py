"""Server optimizers that are missing in optax, as optax transformations of the mean update.

The "gradient" that they receive is the update start - end of the clients, so they subtract it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedgrad.core.primitives import accumulator

# (v, squared update, b2) -> v: the update of the second moment.
SECOND_MOMENTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "adagrad": lambda v, square, b2: v + square,
    "adam": lambda v, square, b2: b2 * v + (1 - b2) * square,
    "yogi": lambda v, square, b2: v - (1 - b2) * square * jnp.sign(v - square),
}


class AdaptiveState(NamedTuple):
    first: Any
    second: Any


def adaptive(
    second_moment: str, learning_rate: Any, b1: Any, b2: Any = 0.0, adaptivity: Any = 1e-3
) -> optax.GradientTransformation:
    """Algorithm 2 of Reddi et al. 2021: x -= lr m / (sqrt(v) + adaptivity), from v = adaptivity².

    Unlike optax.adam and Keras there is no bias correction, and `adaptivity` is outside the square
    root.
    """
    follow = SECOND_MOMENTS[second_moment]

    def init(params: Any) -> AdaptiveState:
        start = jax.tree.map(lambda p: jnp.full_like(p, adaptivity**2), params)
        return AdaptiveState(jax.tree.map(jnp.zeros_like, params), start)

    def update(updates: Any, state: AdaptiveState, params: Any = None) -> tuple[Any, AdaptiveState]:
        first = jax.tree.map(lambda m, u: b1 * m + (1 - b1) * u, state.first, updates)
        second = jax.tree.map(lambda v, u: follow(v, u**2, b2), state.second, updates)

        def step(m: Any, v: Any) -> Any:
            return -learning_rate * m / (jnp.sqrt(v) + adaptivity)

        return jax.tree.map(step, first, second), AdaptiveState(first, second)

    return optax.GradientTransformation(init, update)


class FollowedState(NamedTuple):
    moved: jax.Array  # the change of the rate since its start, which stays an argument
    previous: Any


def hypergradient_descent(
    learning_rate: Any = 1.0, hyper_learning_rate: Any = 0.01
) -> optax.GradientTransformation:
    """Baydin et al. 2018 on pseudo-gradients: lr += κ <g_t, g_{t-1}>, then x -= lr g_t."""
    return _follow_product(
        learning_rate, lambda moved, product: moved + hyper_learning_rate * product
    )


def fed_hyper_global(low: Any = -0.8, high: Any = 4.0) -> optax.GradientTransformation:
    """FedHyper-G: a = clip(a + <d_{t-1}, d_t>, low, high), then x += (1 + a) d_t."""
    return _follow_product(1.0, lambda moved, product: jnp.clip(moved + product, low, high))


def fed_exp(epsilon: Any = 1e-3) -> optax.GradientTransformationExtraArgs:
    """FedExP: lr = max(1, mean |Δ_i|² / (2 (|Δ|² + ε))), which needs each client's |Δ_i|²."""

    def update(
        updates: Any, state: Any, params: Any = None, *, squared_norm: jax.Array, **extra: Any
    ) -> tuple[Any, Any]:
        rate = jnp.maximum(1.0, squared_norm / (2 * (_dot(updates, updates) + epsilon)))
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def squared_norm(update: Any, examples: Any, hyper: Any) -> dict[str, jax.Array]:
    """Return the statistic of each client that FedExP needs."""
    return {"squared_norm": _dot(update, update)}


def fed_nova(learning_rate: Any = 1.0) -> optax.GradientTransformationExtraArgs:
    """FedNova: the updates per step, times the mean number of steps of the clients."""

    def update(
        updates: Any, state: Any, params: Any = None, *, steps: jax.Array, **extra: Any
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda u: -learning_rate * steps * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _follow_product(
    start: Any, follow: Callable[[jax.Array, jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """A learning rate that follows the inner product of this update and the previous one.

    `start` enters in every round. If it only initialized the state, a round could neither change it
    nor have a derivative by it.
    """

    def init(params: Any) -> FollowedState:
        return FollowedState(
            jnp.zeros((), accumulator(params)), jax.tree.map(jnp.zeros_like, params)
        )

    def update(updates: Any, state: FollowedState, params: Any = None) -> tuple[Any, FollowedState]:
        moved = follow(state.moved, _dot(updates, state.previous))
        rate = start + moved
        return jax.tree.map(lambda u: -rate * u, updates), FollowedState(moved, updates)

    return optax.GradientTransformation(init, update)


def _dot(a: Any, b: Any) -> jax.Array:
    dtype = accumulator(a)
    products = jax.tree.map(lambda x, y: jnp.sum(x.astype(dtype) * y.astype(dtype)), a, b)
    return sum(jax.tree.leaves(products), start=jnp.zeros((), dtype))
