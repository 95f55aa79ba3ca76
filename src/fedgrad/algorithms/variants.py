"""The named algorithms, each stated as its difference from `fed_opt`."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from fedgrad.algorithms import server_optimizers
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.fed_dyn import fed_dyn
from fedgrad.algorithms.fed_nova import fed_nova
from fedgrad.algorithms.fed_opt import fed_opt
from fedgrad.algorithms.local_training import Gradient, WholeGradient, following, plus
from fedgrad.algorithms.named import BELONGS_TO_LOCAL_TRAINING, named
from fedgrad.algorithms.objective import Loss, batch_loss
from fedgrad.algorithms.optimizer import optimizer
from fedgrad.algorithms.scaffold import scaffold
from fedgrad.algorithms.settings import titled
from fedgrad.core.errors import known_arguments
from fedgrad.core.types import Batch, Hyper, Params


@named
def fed_avg(
    loss: Loss, client: Any = 0.1, server_learning_rate: Any = 1.0, *, weighting: str = "examples"
) -> Algorithm:
    """FedAvg: local SGD, then the mean of the models.

    Args:
        loss: The loss `(params, batch)`, one number per example.
        client: A learning rate, an optimizer, or `fg.local_training(...)`. Its usual options can be
            given as keywords instead: `client_learning_rate`, `batch_size`, `epochs`.
        server_learning_rate: The learning rate of the server; 1 is the plain mean.
        weighting: How clients are weighted, as for `fed_opt`.

    Returns:
        An algorithm.

    Example:

        algorithm = fg.fed_avg(loss, client_learning_rate=0.1, batch_size=10)

    Reference: McMahan et al. 2017, "Communication-efficient learning of deep networks from
    decentralized data".
    """
    server = optimizer(optax.sgd, learning_rate=server_learning_rate)
    return fed_opt(loss, server=server, client=client, weighting=weighting)


@named
def fed_avgm(
    loss: Loss,
    client: Any = 0.1,
    server_learning_rate: Any = 1.0,
    momentum: Any = 0.9,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """FedAvgM: server momentum, m = momentum m + Δ, x -= server_learning_rate m.

    Args:
        momentum: The momentum of the server, a hyperparameter.

    The other arguments are as for `fed_avg`. Reference: Hsu et al. 2019.
    """
    server = optimizer(optax.sgd, learning_rate=server_learning_rate, momentum=momentum)
    return fed_opt(loss, server=server, client=client, weighting=weighting)


@named
def fed_adam(
    loss: Loss,
    client: Any = 0.1,
    server_learning_rate: Any = 0.1,
    b1: Any = 0.9,
    b2: Any = 0.99,
    adaptivity: Any = 1e-3,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """FedAdam as published: no bias correction, and τ = `adaptivity` outside the square root.

    m = b1 m + (1 - b1) Δ;  v = b2 v + (1 - b2) Δ², from v = τ²;  x -= lr m / (sqrt(v) + τ)

    Args:
        b1: The decay of the first moment m.
        b2: The decay of the second moment v.
        adaptivity: The constant τ; smaller means more adaptive.

    The other arguments are as for `fed_avg`. Reference: Reddi et al. 2021, "Adaptive federated
    optimization", Algorithm 2.
    """
    rates = {"learning_rate": server_learning_rate, "b1": b1, "b2": b2, "adaptivity": adaptivity}
    server = optimizer(server_optimizers.adaptive, second_moment="adam", **rates)
    return fed_opt(loss, server=server, client=client, weighting=weighting)


@named
def fed_yogi(
    loss: Loss,
    client: Any = 0.1,
    server_learning_rate: Any = 0.1,
    b1: Any = 0.9,
    b2: Any = 0.99,
    adaptivity: Any = 1e-3,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """FedYogi as published: `fed_adam` with v -= (1 - b2) Δ² sign(v - Δ²).

    The arguments are those of `fed_adam`. Reference: Reddi et al. 2021.
    """
    rates = {"learning_rate": server_learning_rate, "b1": b1, "b2": b2, "adaptivity": adaptivity}
    server = optimizer(server_optimizers.adaptive, second_moment="yogi", **rates)
    return fed_opt(loss, server=server, client=client, weighting=weighting)


@named
def fed_adagrad(
    loss: Loss,
    client: Any = 0.1,
    server_learning_rate: Any = 0.1,
    b1: Any = 0.0,
    adaptivity: Any = 1e-3,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """FedAdagrad as published: `fed_adam` with v += Δ², and no b2.

    The arguments are those of `fed_adam`. Reference: Reddi et al. 2021.
    """
    server = optimizer(
        server_optimizers.adaptive,
        second_moment="adagrad",
        learning_rate=server_learning_rate,
        b1=float(b1) if type(b1) is int else b1,  # 0 means 0.0
        adaptivity=adaptivity,
    )
    return fed_opt(loss, server=server, client=client, weighting=weighting)


@named
def fed_prox(
    loss: Loss,
    client: Any = 0.1,
    server_learning_rate: Any = 1.0,
    proximal_weight: Any = 0.1,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """FedProx: clients minimize F_i(w) + proximal_weight/2 |w - w_server|².

    Args:
        proximal_weight: The weight of the proximal term, a hyperparameter.

    The other arguments are as for `fed_avg`. Reference: Li et al. 2020.
    """

    def proximal(params: Params, start: Params, hyper: Hyper) -> Any:
        return jax.tree.map(lambda w, w0: hyper["proximal_weight"] * (w - w0), params, start)

    server = optimizer(optax.sgd, learning_rate=server_learning_rate)
    client, hyper = following(client, plus(proximal)), {"proximal_weight": proximal_weight}
    return fed_opt(loss, server=server, client=client, weighting=weighting, hyper=hyper)


@named
def per_fed_avg(
    loss: Loss,
    client: Any = 0.1,
    server_learning_rate: Any = 1.0,
    adaptation_rate: Any = 0.01,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """Per-FedAvg: learns a model that is good after one step at each client.

    Local steps follow the exact gradient of F(w - adaptation_rate ∇F(w)), second order included;
    both F are the loss of the step's batch.

    Args:
        adaptation_rate: The step size of the adaptation, a hyperparameter.

    The other arguments are as for `fed_avg`. Reference: Fallah et al. 2020.
    """

    def adapted(loss: Loss) -> Gradient:
        def gradient(
            params: Params, start: Params, batch: Batch, mask: jax.Array, hyper: Hyper, key: Any
        ) -> tuple[jax.Array, Any]:
            def after(w: Any) -> jax.Array:
                slope = jax.grad(lambda w: batch_loss(loss, w, batch, mask, key))(w)
                rate = hyper["adaptation_rate"]
                moved = jax.tree.map(lambda a, g: (a - rate * g).astype(a.dtype), w, slope)
                return batch_loss(loss, moved, batch, mask, key)

            return jax.value_and_grad(after)(params)

        return gradient

    server = optimizer(optax.sgd, learning_rate=server_learning_rate)
    client, hyper = following(client, adapted), {"adaptation_rate": adaptation_rate}
    return fed_opt(loss, server=server, client=client, weighting=weighting, hyper=hyper)


@titled
@known_arguments(
    {
        name: "It has no local training: clients send the gradient of all of their examples."
        for name in ("client", *BELONGS_TO_LOCAL_TRAINING)
    }
)
def fed_sgd(
    loss: Loss,
    server_learning_rate: Any = 0.1,
    batch_size: int = 20,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """FedSGD: one server step along the gradient of the loss of all clients in the round.

    Args:
        loss: The loss `(params, batch)`, one number per example.
        server_learning_rate: The learning rate of the server.
        batch_size: How many examples a client processes at a time; the gradient is of all of them.
        weighting: How clients are weighted, as for `fed_opt`.

    Returns:
        An algorithm.
    """
    server = optimizer(optax.sgd, learning_rate=server_learning_rate)
    return fed_opt(loss, server=server, client=WholeGradient(batch_size), weighting=weighting)


@named
def fed_exp(loss: Loss, client: Any = 0.1, *, weighting: str = "uniform") -> Algorithm:
    """FedExP: the server extrapolates its rate from how much the clients' updates disagree.

    lr = max(1, mean |Δ_i|² / (2 (|Δ|² + ε))). Each client sends one more number. `client` and
    `weighting` are as for `fed_avg`. Reference: Jhunjhunwala et al. 2023.
    """
    server = optimizer(server_optimizers.fed_exp, epsilon=1e-3)
    measure = server_optimizers.squared_norm
    return fed_opt(loss, server=server, client=client, weighting=weighting, measure=measure)


@named
def fed_hyper(loss: Loss, client: Any = 0.1, *, weighting: str = "examples") -> Algorithm:
    """FedHyper-G: the server's rate follows the inner product of consecutive updates.

    `client` and `weighting` are as for `fed_avg`. Reference: Wang et al. 2024.
    """
    server = optimizer(server_optimizers.fed_hyper_global, low=-0.8, high=4.0)
    return fed_opt(loss, server=server, client=client, weighting=weighting)


@named
def fed_hypergradient(
    loss: Loss,
    client: Any = 0.1,
    server_learning_rate: Any = 1.0,
    hyper_learning_rate: Any = 0.01,
    *,
    weighting: str = "examples",
) -> Algorithm:
    """Hypergradient descent on pseudo-gradients: lr += κ <g_t, g_{t-1}>, then x -= lr g_t.

    It costs no communication, but follows the clients' updates instead of the loss.

    Args:
        server_learning_rate: The initial learning rate lr of the server.
        hyper_learning_rate: The step size κ of the rate.

    The other arguments are as for `fed_avg`. Reference: Baydin et al. 2018.
    """
    server = optimizer(
        server_optimizers.hypergradient_descent,
        learning_rate=server_learning_rate,
        hyper_learning_rate=hyper_learning_rate,
    )
    return fed_opt(loss, server=server, client=client, weighting=weighting)


@named
def fed_prodigy(loss: Loss, client: Any = 0.1, *, weighting: str = "examples") -> Algorithm:
    """Prodigy of optax.contrib as the server's optimizer: it estimates its own learning rate."""
    server = optimizer(optax.contrib.prodigy, learning_rate=1.0)
    return fed_opt(loss, server=server, client=client, weighting=weighting)


@named
def fed_dog(loss: Loss, client: Any = 0.1, *, weighting: str = "examples") -> Algorithm:
    """DoG (distance over gradients) of optax.contrib as the server's optimizer."""
    server = optimizer(optax.contrib.dog, learning_rate=1.0)
    return fed_opt(loss, server=server, client=client, weighting=weighting)


@named
def fed_mechanic(
    loss: Loss, client: Any = 0.1, momentum: Any = 0.9, *, weighting: str = "examples"
) -> Algorithm:
    """Mechanic of optax.contrib around the server's SGD with momentum."""

    def mechanic(momentum: Any, weight_decay: Any = 0.0) -> optax.GradientTransformation:
        return optax.contrib.mechanize(optax.sgd(1.0, momentum=momentum), weight_decay=weight_decay)

    server = optimizer(mechanic, momentum=momentum, weight_decay=0.0)
    return fed_opt(loss, server=server, client=client, weighting=weighting)


# By the name on the command line.
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedadagrad": fed_adagrad,
    "fedadam": fed_adam,
    "fedavg": fed_avg,
    "fedavgm": fed_avgm,
    "feddog": fed_dog,
    "feddyn": fed_dyn,
    "fedexp": fed_exp,
    "fedhyper": fed_hyper,
    "fedhypergradient": fed_hypergradient,
    "fedmechanic": fed_mechanic,
    "fednova": fed_nova,
    "fedprodigy": fed_prodigy,
    "fedprox": fed_prox,
    "fedsgd": fed_sgd,
    "fedyogi": fed_yogi,
    "perfedavg": per_fed_avg,
    "scaffold": scaffold,
}
