"""One round of FedAvg and a held-out loss, as a function of three hyperparameters, in three hands.

    (server lr, exponent q, client lr) -> loss of  p + server lr * mean of client updates

Softmax regression 60 -> 10; every client makes full-batch steps on its own 100 examples and counts
with weight n_i^q. The same function in fedgrad, in DrJAX and in plain JAX, for the same arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import softmax
from jax import lax
from workloads import first_weights, population, unflatten

import fedgrad as fg

EXAMPLES, HELD_OUT, STEPS = 100, 1000, 10
BLOCK = 5  # clients whose examples fit the cache, as in peers/plain_logistic.py
HYPER = {"server lr": 0, "weight exponent": 1, "client lr": 2}  # the argument that each one is
Loss = Callable[..., jax.Array]
Loop = Callable[[Callable, Any, int], Any]


def arguments(clients: int) -> tuple[Any, ...]:
    """(server lr, exponent, client lr, weights, held-out data, clients' data), on the device."""
    own = population("logistic", clients)
    x, y = own.x.reshape(clients, EXAMPLES, -1), own.y.reshape(clients, EXAMPLES)
    # All have as many examples; the sizes that weigh them differ, or an exponent would do nothing.
    n = np.random.default_rng(5).integers(50, 150, clients).astype(np.float32)
    other = population("logistic", HELD_OUT // EXAMPLES, seed=1)
    weights = unflatten("logistic", first_weights("logistic"))
    hyper = [jnp.float32(value) for value in (1.0, 0.5, 0.1)]
    return jax.device_put((*hyper, weights, (other.x, other.y), (x, y, n)))


def _fori(step: Callable, p: Any, steps: int) -> Any:
    return lax.fori_loop(0, steps, lambda _, p: step(p), p)


def _unrolled(step: Callable, p: Any, steps: int) -> Any:
    for _ in range(steps):
        p = step(p)
    return p


def _update(p: Any, lr: Any, x: jax.Array, y: jax.Array, steps: int, loop: Loop = _fori) -> Any:
    trained = loop(lambda q: softmax.step(q, x, y, lr), p, steps)
    return jax.tree.map(jnp.subtract, trained, p)


def _after(p: Any, server_lr: Any, update: Any, held_out: Any) -> jax.Array:
    return softmax.loss(jax.tree.map(lambda w, u: w + server_lr * u, p, update), *held_out)


def with_fedgrad(steps: int = STEPS, chunk: int | None = None) -> fg.Program:
    """As a user of fedgrad writes it."""

    @fg.program(clients=fg.CLIENTS)
    def loss(server_lr: Any, q: Any, lr: Any, p: Any, held_out: Any, clients: Any) -> jax.Array:
        x, y, n = clients
        start, rate, exponent = fg.broadcast((p, lr, q))
        update = fg.mean(_update(start, rate, x, y, steps), weights=n**exponent)
        return _after(p, server_lr, update, held_out)

    return loss.on(fg.executors.local(chunk=chunk))


def with_drjax(clients: int, steps: int = STEPS) -> Loss:
    """As a user of DrJAX writes it."""
    import drjax

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns that there is no mesh

    @drjax.program(placements={"clients": clients})
    def loss(server_lr: Any, q: Any, lr: Any, p: Any, held_out: Any, clients: Any) -> jax.Array:
        x, y, n = clients
        updates = drjax.map_fn(
            lambda p, lr, x, y: _update(p, lr, x, y, steps), (*drjax.broadcast((p, lr)), x, y)
        )
        weights = drjax.map_fn(lambda n, q: n**q, (n, drjax.broadcast(q)))
        update = drjax.reduce_weighted_mean(updates, jax.tree.map(lambda _: weights, updates))
        return _after(p, server_lr, update, held_out)

    return loss


def by_hand(steps: int = STEPS, loop: Loop = _fori, block: int | None = None) -> Loss:
    """Plain JAX: all clients in one `vmap`, or in blocks, each of which stays in the cache."""

    def loss(server_lr: Any, q: Any, lr: Any, p: Any, held_out: Any, clients: Any) -> jax.Array:
        x, y, n = clients
        weights = n**q

        def one(client: tuple[jax.Array, jax.Array]) -> Any:
            return _update(p, lr, *client, steps, loop)

        updates = lax.map(one, (x, y), batch_size=block) if block else jax.vmap(one)((x, y))
        total = jax.tree.map(lambda u: jnp.tensordot(weights, u, 1), updates)
        update = jax.tree.map(lambda t: t / weights.sum(), total)
        return _after(p, server_lr, update, held_out)

    return loss


# The reasonable ways to write it by hand; a ratio is against the fastest of them.
BY_HAND: dict[str, Callable[[], Loss]] = {
    "jax vmap": by_hand,
    "jax vmap, unrolled": lambda: by_hand(loop=_unrolled),
    "jax blocks": lambda: by_hand(block=BLOCK),
}


def forward(loss: Loss, argnum: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(value, derivative by one scalar argument) by `jax.jvp`, not yet jitted."""

    def value_and_derivative(*args: Any) -> tuple[jax.Array, jax.Array]:
        def of_one(z: jax.Array) -> jax.Array:
            return loss(*args[:argnum], z, *args[argnum + 1 :])

        return jax.jvp(of_one, (args[argnum],), (jnp.ones_like(args[argnum]),))

    return value_and_derivative


def reverse(loss: Loss, argnum: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The same by `jax.value_and_grad`."""
    return jax.value_and_grad(loss, argnum)
