"""Hand-written JAX on the paper's tasks, FedAvgM. Only a task's loss and its random numbers are
fedgrad's; clients are padded with masks. Variants:

loop   Python over clients and batches, one jitted step
scan   one jit, clients one after another, each as many steps as it has batches
vmap   one jit, all clients side by side, as many steps as the largest client has batches
dealt  as scan, the clients dealt over 2 host devices, a call for each

`conv`: convolutions as the task has them ("lax"), or as matrix products ("im2col"), because XLA's
are slow in loops on a CPU (jax#12868).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from paper_tasks import MOMENTUM, SERVER_RATE, Workload, client_keys, shuffled, workload

from fedgrad.algorithms.objective import takes_key
from fedgrad.tasks import layers

# (params, momentum, clients, key) -> (params, momentum, mean loss)
Round = Callable[[Any, Any, np.ndarray, jax.Array], tuple[Any, Any, jax.Array]]


def build(
    name: str, variant: str = "scan", conv: str = "lax", **size: Any
) -> Callable[[int], Callable[[], np.ndarray]]:
    """A round of the task, in the given variant."""
    jax.config.update("jax_num_cpu_devices", 2 if variant == "dealt" else 1)
    if conv == "im2col":
        layers.conv = _im2col
    made = workload(name, **size)
    clients = Clients(made)
    run = {"loop": _loop, "scan": _scan, "vmap": _vmap, "dealt": _dealt}[variant](clients)
    params = made.first_params()
    momentum = jax.tree.map(jnp.zeros_like, params)

    def play(i: int) -> Callable[[], np.ndarray]:
        nonlocal params, momentum
        params, momentum, loss = run(params, momentum, made.cohort(i), made.key(i))
        end = jax.block_until_ready((params, momentum, loss))[0]
        return lambda: made.change(end)

    return play


class Clients:
    """All examples end to end, and one step of a client."""

    def __init__(self, made: Workload) -> None:
        self.counts = np.array([len(c["y"]) for c in made.clients], np.int32)
        self.offsets = (np.cumsum(self.counts) - self.counts).astype(np.int32)
        self.capacity = int(self.counts.max())
        self.store = jax.tree.map(lambda *x: np.concatenate(x), *made.clients)
        self.loss, self.random = made.loss, takes_key(made.loss)
        self.rate = made.task.defaults.client_learning_rate
        self.size = made.task.defaults.batch_size
        self.dtype = np.dtype(made.dtype)  # a sum of losses is of the model's type, as a loss is

    def steps(self, counts: Any) -> Any:
        """How many batches a client has."""
        return -(-counts // self.size)

    def order(self, key: jax.Array, client: Any) -> tuple[jax.Array, jax.Array]:
        """Rows of the store in the order of this round, and the key of the loss."""
        index, offset, count = client
        mixed, noise = client_keys(key, index)
        rows = offset + jnp.minimum(shuffled(mixed, count, self.capacity), count - 1)
        spare = self.steps(self.capacity) * self.size - self.capacity
        return jnp.pad(rows, (0, spare), mode="edge"), noise

    def slope(
        self, params: Any, store: Any, rows: jax.Array, noise: jax.Array, count: Any, i: Any
    ) -> tuple[jax.Array, jax.Array, Any]:
        """(number of examples, mean loss, gradient) of batch i."""
        here = lax.dynamic_slice_in_dim(rows, i * self.size, self.size)
        batch = jax.tree.map(lambda leaf: leaf[here], store)
        mask = i * self.size + jnp.arange(self.size) < count
        there = jnp.maximum(mask.sum(), 1)
        key = (jax.random.fold_in(noise, i),) if self.random else ()

        def mean(params: Any) -> jax.Array:
            return jnp.where(mask, self.loss(params, batch, *key), 0).sum() / there

        value, gradient = jax.value_and_grad(mean)(params)
        return mask.sum(), value, gradient

    def views(self, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Index, offset and number of examples of clients."""
        return chosen, self.offsets[chosen], self.counts[chosen]


def _moved(params: Any, gradient: Any, rate: Any) -> Any:
    return jax.tree.map(lambda w, g: w - rate * g, params, gradient)


def _served(params: Any, momentum: Any, update: Any) -> tuple[Any, Any]:
    momentum = jax.tree.map(lambda m, u: MOMENTUM * m + u, momentum, update)
    return _moved(params, momentum, SERVER_RATE), momentum


def _share(clients: Clients) -> Callable[..., tuple[Any, jax.Array]]:
    """The sums of examples x (update, loss) over clients, one after another."""

    def share(params: Any, store: Any, views: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        def train(total: Any, client: Any) -> tuple[Any, None]:
            rows, noise = clients.order(key, client)
            count = client[2]

            def step(i: jax.Array, carry: Any) -> Any:
                params, loss = carry
                n, value, gradient = clients.slope(params, store, rows, noise, count, i)
                return _moved(params, gradient, clients.rate), loss + n * value

            end, loss = lax.fori_loop(
                0, clients.steps(count), step, (params, jnp.zeros((), clients.dtype))
            )
            updates = jax.tree.map(lambda t, a, b: t + count * (a - b), total[0], params, end)
            return (updates, total[1] + loss), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return lax.scan(train, (zeros, jnp.zeros((), clients.dtype)), views)[0]

    return share


def _scan(clients: Clients) -> Round:
    share, store = _share(clients), jax.device_put(clients.store)

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(params: Any, momentum: Any, store: Any, views: Any, key: jax.Array) -> Any:
        update, loss = share(params, store, views, key)
        update, loss = jax.tree.map(lambda t: t / views[2].sum(), (update, loss))
        return *_served(params, momentum, update), loss

    return lambda params, momentum, chosen, key: run(
        params, momentum, store, clients.views(chosen), key
    )


def _vmap(clients: Clients) -> Round:
    store = jax.device_put(clients.store)

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(params: Any, momentum: Any, store: Any, views: Any, key: jax.Array) -> Any:
        rows, noise = jax.vmap(partial(clients.order, key))(views)
        counts = views[2]
        steps = clients.steps(counts)

        def step(i: jax.Array, carry: Any) -> Any:
            ends, losses = carry
            n, value, gradient = jax.vmap(clients.slope, in_axes=(0, None, 0, 0, 0, None))(
                ends, store, rows, noise, counts, i
            )
            # A client that is done goes on with rate 0: no select over its weights.
            rates = jnp.where(i < steps, clients.rate, 0.0)
            return jax.vmap(_moved)(ends, gradient, rates), losses + n * value

        start = jax.tree.map(lambda w: jnp.broadcast_to(w, (len(counts), *w.shape)), params)
        ends, losses = lax.fori_loop(
            0, steps.max(), step, (start, jnp.zeros(len(counts), clients.dtype))
        )
        share = counts / counts.sum()
        update = jax.tree.map(lambda w, end: w - jnp.tensordot(share, end, 1), params, ends)
        return *_served(params, momentum, update), losses.sum() / counts.sum()

    return lambda params, momentum, chosen, key: run(
        params, momentum, store, clients.views(chosen), key
    )


def _loop(clients: Clients) -> Round:
    store = jax.device_put(clients.store)
    order = jax.jit(clients.order)
    served = jax.jit(_served, donate_argnums=(0, 1))

    @partial(jax.jit, donate_argnums=0)
    def step(carry: Any, store: Any, rows: Any, noise: Any, count: Any, i: Any) -> Any:
        params, loss = carry
        n, value, gradient = clients.slope(params, store, rows, noise, count, i)
        return _moved(params, gradient, clients.rate), loss + n * value

    @partial(jax.jit, donate_argnums=0)
    def add(total: Any, params: Any, end: Any, share: Any) -> Any:
        (update, loss), (end, its_loss) = total, end
        update = jax.tree.map(lambda t, a, b: t + share * (a - b), update, params, end)
        return update, loss + its_loss

    @jax.jit
    def copied(params: Any) -> Any:
        return jax.tree.map(jnp.copy, params), jnp.zeros((), clients.dtype)

    def run(params: Any, momentum: Any, chosen: np.ndarray, key: jax.Array) -> Any:
        total = jax.tree.map(jnp.zeros_like, (params, jnp.zeros((), clients.dtype)))
        everybody = np.float32(clients.counts[chosen].sum())
        for client in zip(*clients.views(chosen), strict=True):
            rows, noise = order(key, client)
            end = copied(params)
            for i in range(clients.steps(client[2])):
                end = step(end, store, rows, noise, client[2], i)
            total = add(total, params, end, client[2] / everybody)
        update, loss = total
        return *served(params, momentum, update), loss / everybody

    return run


def _dealt(clients: Clients) -> Round:
    stores = [jax.device_put(clients.store, device) for device in jax.devices()]
    share = jax.jit(_share(clients))
    served = jax.jit(_served, donate_argnums=(0, 1))

    def run(params: Any, momentum: Any, chosen: np.ndarray, key: jax.Array) -> Any:
        # A call returns before its device is done, so the devices run at the same time.
        parts = [
            share(jax.device_put(params, device), store, clients.views(hand), key_here)
            for device, store, hand in zip(
                jax.devices(), stores, _hands(chosen, clients), strict=True
            )
            for key_here in [jax.device_put(key, device)]
        ]
        everybody = clients.counts[chosen].sum()
        first = jax.devices()[0]
        parts = [jax.device_put(part, first) for part in parts]
        update, loss = jax.tree.map(lambda *p: sum(p) / everybody, *parts)
        return *served(params, momentum, update), loss

    return run


def _hands(chosen: np.ndarray, clients: Clients) -> list[np.ndarray]:
    """The longest client first, each to the device with the least work so far, and the same number
    to each, so that one compiled function does for both."""
    by_size = chosen[np.argsort(-clients.counts[chosen], kind="stable")]
    most, hands, load = -(-len(chosen) // 2), ([], []), [0, 0]
    for client in by_size:
        open_hands = [d for d in (0, 1) if len(hands[d]) < most]
        d = min(open_hands, key=lambda d: load[d])
        hands[d].append(client)
        load[d] += clients.steps(clients.counts[client])
    return [np.array(hand, np.int32) for hand in hands]


def _im2col(
    layer: dict[str, jax.Array], x: jax.Array, stride: int = 1, padding: str = "VALID"
) -> jax.Array:
    kernel = layer["kernel"]
    height, width = kernel.shape[:2]
    if padding == "SAME":
        edges = lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (stride, stride), "SAME")
        x = jnp.pad(x, ((0, 0), *edges, (0, 0)))
    rows, columns = ((x.shape[1] - height) // stride + 1, (x.shape[2] - width) // stride + 1)
    taps = [
        x[:, i : i + stride * rows : stride, j : j + stride * columns : stride][:, :rows, :columns]
        for i in range(height)
        for j in range(width)
    ]
    out = jnp.concatenate(taps, -1) @ kernel.reshape(-1, kernel.shape[-1])
    return out + layer["bias"] if "bias" in layer else out
