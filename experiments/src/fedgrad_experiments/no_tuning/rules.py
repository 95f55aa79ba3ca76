"""Published rules that the library does not have: FATHOM's, Delta-SGD's, and a schedule-free
server. Each is written as a user would write it."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fedgrad as fg

RATE = "client.learning_rate"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FathomState:
    """The additional state of FATHOM's server: the smoothed direction of the rounds so far, and the
    change of the logarithm of the clients' rate."""

    inner: Any
    smoothed: Any
    moved: jax.Array

    @property
    def params(self) -> Any:
        """The model."""
        return self.inner.params


def fathom(algorithm: fg.Algorithm, step: float = 0.01, smoothing: float = 0.5) -> fg.Algorithm:
    """Apply FATHOM's rule (Nguyen et al. 2022) for the clients' learning rate only: after a round
    that moved the model by Δ, the rate is multiplied by exp(step cos(Δ, smoothed Δ of earlier
    rounds))."""

    def init(params: Any, hyper: Any = None) -> FathomState:
        inner = algorithm.init(params, hyper)
        return FathomState(inner, jax.tree.map(jnp.zeros_like, inner.params), jnp.float32(0))

    @fg.program(cohort=fg.CLIENTS)
    def round(state: FathomState, hyper: Any, cohort: Any, key: Any) -> Any:
        rate = jnp.asarray(fg.hyper.paths(hyper)[RATE], jnp.float32) * jnp.exp(state.moved)
        used = fg.hyper.replace(hyper, {RATE: rate})
        inner, metrics = algorithm.round(state.inner, used, cohort, key)
        delta = jax.tree.map(jnp.subtract, state.params, inner.params)
        moved = state.moved + step * _cosine(delta, state.smoothed)
        smoothed = jax.tree.map(
            lambda s, d: smoothing * s + (1 - smoothing) * d, state.smoothed, delta
        )
        return FathomState(inner, smoothed, moved), replace(metrics, hyper={RATE: rate})

    return replace(algorithm, init=init, round=round)


@dataclass(frozen=True)
class DeltaSgd(fg.LocalTraining):
    """Local training by Delta-SGD (Kim et al. 2024).

    The step size follows how much the gradient changes, starting from the optimizer's learning
    rate. Both gradients of a step use its batch.

        η_k = min(γ |x_k - x_{k-1}| / (2 |g_k - g_{k-1}|), sqrt(1 + δ θ_{k-1}) η_{k-1})
        θ_k = η_k / η_{k-1}
    """

    optimizer: Any = 0.2
    gamma: float = 2.0
    delta: float = 0.1

    def training(self, loss: Any) -> Any:
        """Return the function for all of a client's work in a round."""
        slope = self.gradient(loss)

        def train(start: Any, examples: fg.Examples, hyper: Any, key: Any) -> Any:
            def step(carry: Any, batch: Any, mask: jax.Array) -> Any:
                x, before, rate, growth, total, seen = carry
                value, g = slope(x, start, batch, mask, hyper, None)
                _, g_before = slope(before, start, batch, mask, hyper, None)
                change, turn = _distance(x, before), _distance(g, g_before)
                longest = jnp.sqrt(1 + self.delta * growth) * rate
                smooth = self.gamma * change / (2 * jnp.where(turn > 0, turn, 1))
                here = jnp.sum(mask).astype(total.dtype)
                # The first step has no predecessor.
                bounded = (seen > 0) & (turn > 0)
                new = jnp.where(bounded, jnp.minimum(smooth, longest), longest)
                new = jnp.where(seen > 0, new, rate)
                growth = jnp.where(seen > 0, new / jnp.maximum(rate, 1e-30), growth)
                moved = jax.tree.map(lambda a, s: (a - new * s).astype(a.dtype), x, g)
                return moved, x, new, growth, total + value.astype(total.dtype) * here, seen + here

            first = jnp.asarray(hyper["client"]["learning_rate"], jnp.float32)
            zero, one = jnp.float32(0), jnp.float32(1)
            order = jax.random.split(key)[0] if self.shuffle else None
            carry = (start, start, first, one, zero, zero)
            end, _, _, _, total, seen = examples.fold(
                step, carry, self.batch_size, self.epochs or 1, order, self.steps
            )
            return jax.tree.map(jnp.subtract, start, end), total / seen

        return train


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScheduleFreeState:
    """A state whose model is the evaluation model of a schedule-free optimizer."""

    inner: Any

    @property
    def params(self) -> Any:
        """The model."""
        return optax.contrib.schedule_free_eval_params(self.inner.optimizer, self.inner.params)


def schedule_free(loss: Any, client: Any, server_learning_rate: float = 1.0) -> fg.Algorithm:
    """Return FedOpt with schedule-free SGD (Defazio et al. 2024, optax.contrib) as server
    optimizer."""
    server = optax.contrib.schedule_free(
        optax.sgd(server_learning_rate), learning_rate=server_learning_rate
    )
    algorithm = fg.fed_opt(loss, server=server, client=client)

    def init(params: Any, hyper: Any = None) -> ScheduleFreeState:
        return ScheduleFreeState(algorithm.init(params, hyper))

    @fg.program(cohort=fg.CLIENTS)
    def round(state: ScheduleFreeState, hyper: Any, cohort: Any, key: Any) -> Any:
        inner, metrics = algorithm.round(state.inner, hyper, cohort, key)
        return ScheduleFreeState(inner), metrics

    return replace(algorithm, init=init, round=round)


def _cosine(a: Any, b: Any) -> jax.Array:
    """Return the cosine of the angle between two models; 0 if one of them is 0."""
    products = (_dot(a, b), jnp.sqrt(_dot(a, a)) * jnp.sqrt(_dot(b, b)))
    return jnp.where(products[1] > 0, products[0] / jnp.where(products[1] > 0, products[1], 1), 0)


def _distance(a: Any, b: Any) -> jax.Array:
    difference = jax.tree.map(jnp.subtract, a, b)
    return jnp.sqrt(_dot(difference, difference))


def _dot(a: Any, b: Any) -> jax.Array:
    products = jax.tree.map(lambda x, y: jnp.sum(x * y).astype(jnp.float32), a, b)
    return sum(jax.tree.leaves(products), start=jnp.float32(0))
