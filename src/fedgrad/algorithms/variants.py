"""The named algorithms, each only its difference from `fed_opt`."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from fedgrad.algorithms import server_optimizers
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.fed_opt import fed_opt
from fedgrad.algorithms.local_training import Gradient, plain_gradient
from fedgrad.algorithms.objective import Loss, batch_loss, client_loss
from fedgrad.algorithms.optimizer import Optimizer, optimizer
from fedgrad.clients.examples import Examples


def fed_avg(
    loss: Loss, client_learning_rate: Any = 0.1, server_learning_rate: Any = 1.0, **options: Any
) -> Algorithm:
    """FedAvg (McMahan et al. 2017): local SGD, then the mean. `options` are those of `fed_opt`;
    `client=` replaces local SGD by another optimizer."""
    server = optimizer(optax.sgd, learning_rate=server_learning_rate)
    return _trained(loss, server, client_learning_rate, options)


def fed_avgm(
    loss: Loss,
    client_learning_rate: Any = 0.1,
    server_learning_rate: Any = 1.0,
    momentum: Any = 0.9,
    **options: Any,
) -> Algorithm:
    """FedAvgM (Hsu et al. 2019): m = momentum m + Δ, x -= server_learning_rate m."""
    server = optimizer(optax.sgd, learning_rate=server_learning_rate, momentum=momentum)
    return _trained(loss, server, client_learning_rate, options)


def fed_adam(
    loss: Loss,
    client_learning_rate: Any = 0.1,
    server_learning_rate: Any = 0.1,
    b1: Any = 0.9,
    b2: Any = 0.99,
    adaptivity: Any = 1e-3,
    **options: Any,
) -> Algorithm:
    """FedAdam as published (Reddi et al. 2021): no bias correction, `adaptivity` (τ) outside of the
    root: x -= lr m / (sqrt(v) + τ), v starts at τ²."""
    server = _adaptive("adam", server_learning_rate, b1, b2, adaptivity)
    return _trained(loss, server, client_learning_rate, options)


def fed_yogi(
    loss: Loss,
    client_learning_rate: Any = 0.1,
    server_learning_rate: Any = 0.1,
    b1: Any = 0.9,
    b2: Any = 0.99,
    adaptivity: Any = 1e-3,
    **options: Any,
) -> Algorithm:
    """FedYogi as published (Reddi et al. 2021); see `fed_adam` for where `adaptivity` sits."""
    server = _adaptive("yogi", server_learning_rate, b1, b2, adaptivity)
    return _trained(loss, server, client_learning_rate, options)


def fed_adagrad(
    loss: Loss,
    client_learning_rate: Any = 0.1,
    server_learning_rate: Any = 0.1,
    b1: Any = 0.0,
    adaptivity: Any = 1e-3,
    **options: Any,
) -> Algorithm:
    """FedAdagrad as published (Reddi et al. 2021); see `fed_adam` for where `adaptivity` sits."""
    server = optimizer(
        _make_adaptive("adagrad"),
        learning_rate=server_learning_rate,
        b1=float(b1) if type(b1) is int else b1,  # 0 is meant as 0.0
        adaptivity=adaptivity,
    )
    return _trained(loss, server, client_learning_rate, options)


def fed_prox(
    loss: Loss,
    client_learning_rate: Any = 0.1,
    server_learning_rate: Any = 1.0,
    proximal_weight: Any = 0.1,
    **options: Any,
) -> Algorithm:
    """FedProx (Li et al. 2020): clients minimise F_i(w) + proximal_weight/2 |w - w_server|²."""

    def proximal(loss: Loss) -> Gradient:
        plain = plain_gradient(loss)

        def gradient(
            params: Any, start: Any, batch: Any, mask: jax.Array, hyper: Any, key: Any
        ) -> tuple[jax.Array, Any]:
            value, slope = plain(params, start, batch, mask, hyper, key)
            weight = hyper["proximal_weight"]
            return value, jax.tree.map(
                lambda g, w, w0: (g + weight * (w - w0)).astype(g.dtype), slope, params, start
            )

        return gradient

    server = optimizer(optax.sgd, learning_rate=server_learning_rate)
    options = {**options, "gradient": proximal, "hyper": {"proximal_weight": proximal_weight}}
    return _trained(loss, server, client_learning_rate, options)


def per_fed_avg(
    loss: Loss,
    client_learning_rate: Any = 0.1,
    server_learning_rate: Any = 1.0,
    adaptation_rate: Any = 0.01,
    **options: Any,
) -> Algorithm:
    """Per-FedAvg (Fallah et al. 2020): learns a model that is good after one step at each client.

    Local steps follow the exact gradient of F(w - adaptation_rate ∇F(w)), second order included;
    both F are the loss of the step's batch.
    """

    def adapted(loss: Loss) -> Gradient:
        def gradient(
            params: Any, start: Any, batch: Any, mask: jax.Array, hyper: Any, key: Any
        ) -> tuple[jax.Array, Any]:
            def after(w: Any) -> jax.Array:
                slope = jax.grad(lambda w: batch_loss(loss, w, batch, mask, key))(w)
                rate = hyper["adaptation_rate"]
                moved = jax.tree.map(lambda a, g: (a - rate * g).astype(a.dtype), w, slope)
                return batch_loss(loss, moved, batch, mask, key)

            return jax.value_and_grad(after)(params)

        return gradient

    server = optimizer(optax.sgd, learning_rate=server_learning_rate)
    options = {**options, "gradient": adapted, "hyper": {"adaptation_rate": adaptation_rate}}
    return _trained(loss, server, client_learning_rate, options)


def fed_sgd(
    loss: Loss, server_learning_rate: Any = 0.1, batch_size: int = 20, **options: Any
) -> Algorithm:
    """FedSGD: a step of the server along the gradient of the loss of all clients.

    `batch_size` is how many examples a client works on at a time; the gradient is of all of them.
    """

    def training(start: Any, examples: Examples, hyper: Any, key: jax.Array) -> Any:
        value, slope = jax.value_and_grad(
            lambda params: client_loss(loss, batch_size, params, examples, key)
        )(start)
        return slope, value

    server = optimizer(optax.sgd, learning_rate=server_learning_rate)
    return fed_opt(loss, server=server, client=optax.identity(), training=training, **options)


def fed_exp(loss: Loss, client_learning_rate: Any = 0.1, **options: Any) -> Algorithm:
    """FedExP (Jhunjhunwala et al. 2023): the server's rate is extrapolated from how much clients
    disagree, at the price of one more number from each."""
    server = optimizer(server_optimizers.fed_exp, epsilon=1e-3)
    options = {"weighting": "uniform", **options, "measure": server_optimizers.squared_norm}
    return _trained(loss, server, client_learning_rate, options)


def fed_hyper(loss: Loss, client_learning_rate: Any = 0.1, **options: Any) -> Algorithm:
    """FedHyper-G (Wang et al. 2024): the server's rate follows the product of two updates."""
    server = optimizer(server_optimizers.fed_hyper_global, low=-0.8, high=4.0)
    return _trained(loss, server, client_learning_rate, options)


def fed_hypergradient(
    loss: Loss,
    client_learning_rate: Any = 0.1,
    server_learning_rate: Any = 1.0,
    hyper_learning_rate: Any = 0.01,
    **options: Any,
) -> Algorithm:
    """Hypergradient descent (Baydin et al. 2018) on pseudo-gradients: free, but it follows the
    clients' updates instead of the loss."""
    server = optimizer(
        server_optimizers.hypergradient_descent,
        learning_rate=server_learning_rate,
        hyper_learning_rate=hyper_learning_rate,
    )
    return _trained(loss, server, client_learning_rate, options)


def fed_prodigy(loss: Loss, client_learning_rate: Any = 0.1, **options: Any) -> Algorithm:
    """Prodigy of optax.contrib as the server's optimizer: it estimates its own learning rate."""
    server = optimizer(optax.contrib.prodigy, learning_rate=1.0)
    return _trained(loss, server, client_learning_rate, options)


def fed_dog(loss: Loss, client_learning_rate: Any = 0.1, **options: Any) -> Algorithm:
    """DoG (distance over gradients) of optax.contrib as the server's optimizer."""
    server = optimizer(optax.contrib.dog, learning_rate=1.0)
    return _trained(loss, server, client_learning_rate, options)


def fed_mechanic(
    loss: Loss, client_learning_rate: Any = 0.1, momentum: Any = 0.9, **options: Any
) -> Algorithm:
    """Mechanic of optax.contrib around the server's SGD with momentum."""

    def mechanic(momentum: Any, weight_decay: Any = 0.0) -> optax.GradientTransformation:
        return optax.contrib.mechanize(optax.sgd(1.0, momentum=momentum), weight_decay=weight_decay)

    server = optimizer(mechanic, momentum=momentum, weight_decay=0.0)
    return _trained(loss, server, client_learning_rate, options)


# By the name on the command line.
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedadagrad": fed_adagrad,
    "fedadam": fed_adam,
    "fedavg": fed_avg,
    "fedavgm": fed_avgm,
    "feddog": fed_dog,
    "fedexp": fed_exp,
    "fedhyper": fed_hyper,
    "fedhypergradient": fed_hypergradient,
    "fedmechanic": fed_mechanic,
    "fedprodigy": fed_prodigy,
    "fedprox": fed_prox,
    "fedsgd": fed_sgd,
    "fedyogi": fed_yogi,
    "perfedavg": per_fed_avg,
}


def _trained(loss: Loss, server: Optimizer, rate: Any, options: dict[str, Any]) -> Algorithm:
    options = {"client": optimizer(optax.sgd, learning_rate=rate), **options}
    return fed_opt(loss, server=server, **options)


def _make_adaptive(second_moment: str) -> Callable[..., optax.GradientTransformation]:
    def make(
        learning_rate: Any, b1: Any, b2: Any = 0.0, adaptivity: Any = 1e-3
    ) -> optax.GradientTransformation:
        return server_optimizers.adaptive(learning_rate, b1, b2, adaptivity, second_moment)

    make.__name__ = second_moment
    return make


def _adaptive(kind: str, rate: Any, b1: Any, b2: Any, adaptivity: Any) -> Optimizer:
    return optimizer(_make_adaptive(kind), learning_rate=rate, b1=b1, b2=b2, adaptivity=adaptivity)
