"""What a client does in a round: steps of its own optimizer on its own examples."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms.objective import Loss, batch_loss, takes_key
from fedgrad.algorithms.optimizer import Optimizer, apply
from fedgrad.clients.examples import Examples
from fedgrad.core.errors import ArgumentError

# (params, model of the server, batch, mask, hyper, key) -> (loss, gradient)
Gradient = Callable[[Any, Any, Any, jax.Array, Any, jax.Array | None], tuple[jax.Array, Any]]
# (model of the server, examples, hyper, key) -> (how far the client went: start - end, its loss)
Training = Callable[[Any, Examples, Any, jax.Array], tuple[Any, jax.Array]]


def plain_gradient(loss: Loss) -> Gradient:
    """The gradient of the mean loss of a batch."""

    def gradient(
        params: Any, start: Any, batch: Any, mask: jax.Array, hyper: Any, key: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        return jax.value_and_grad(lambda p: batch_loss(loss, p, batch, mask, key))(params)

    return gradient


def local_training(
    loss: Loss,
    client: Optimizer,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    shuffle: bool = True,
    gradient: Callable[[Loss], Gradient] = plain_gradient,
) -> Training:
    """Epochs, or a number of steps, of an optimizer that starts anew in every round."""
    for name, value in (("batch_size", batch_size), ("epochs", epochs), ("steps", steps)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ArgumentError.here(f"{name}={value!r}: give a whole number of at least 1.")
    slope = gradient(loss)

    def train(start: Any, examples: Examples, hyper: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        optimizer = client.build(hyper["client"])
        order, noise = jax.random.split(key)

        def step(carry: Any, batch: Any, mask: jax.Array) -> Any:
            params, state, total, seen, i = carry
            fresh = jax.random.fold_in(noise, i) if takes_key(loss) else None
            value, g = slope(params, start, batch, mask, hyper, fresh)
            params, state = apply(optimizer, g, state, params)
            here = jnp.sum(mask).astype(total.dtype)
            return params, state, total + (value * here).astype(total.dtype), seen + here, i + 1

        zero = jnp.zeros((), jnp.result_type(jnp.float32, *jax.tree.leaves(start)))
        carry = (start, optimizer.init(start), zero, zero, jnp.int32(0))
        end, _, total, seen, _ = examples.fold(
            step, carry, batch_size, epochs, order if shuffle else None, steps
        )
        return jax.tree.map(jnp.subtract, start, end), total / seen

    return train
