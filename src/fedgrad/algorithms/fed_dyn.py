"""FedDyn: clients keep the gradient of their own loss, so that all converge to one optimum."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.fed_opt import ServerState, fed_opt, leaving, now, trained
from fedgrad.algorithms.local_training import following, plus
from fedgrad.algorithms.metrics import Metrics
from fedgrad.algorithms.named import named
from fedgrad.algorithms.objective import Loss
from fedgrad.algorithms.optimizer import Optimizer, widened
from fedgrad.core.graph import CLIENTS
from fedgrad.core.primitives import promoting
from fedgrad.core.program import mean, program, sum
from fedgrad.core.types import Hyper, Key, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FedDynState:
    """The server's state: `gradient` is the mean of the gradients of all clients."""

    server: ServerState
    gradient: Any

    @property
    def params(self) -> Params:
        """The model."""
        return self.server.params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FedDynClient:
    """A client's state: the gradient of its loss where its last local training ended."""

    gradient: Any
    clients: Any  # the number of all clients


@named
def fed_dyn(
    loss: Loss, client: Any = 0.1, proximal_weight: Any = 0.1, *, weighting: str = "uniform"
) -> Algorithm:
    """FedDyn, with m clients and α = `proximal_weight`; client k ends at θ_k:

    θ_k minimizes F_k(θ) - <g_k, θ> + α/2 |θ - θ_server|²;   g_k -= α (θ_k - θ_server)
    h -= α/m Σ (θ_k - θ_server);                             θ_server = mean(θ_k) - h / α

    Clients approximate θ_k by local training. Each keeps one model and sends one (two, unless
    `weighting` is uniform). With α = 0 it is FedAvg.

    Args:
        loss: The loss `(params, batch)`, one number per example.
        client: Local training or a learning rate, as for `fed_avg`.
        proximal_weight: The weight α, a hyperparameter.
        weighting: How clients are weighted in the mean, as for `fed_opt`.

    Returns:
        An algorithm whose clients keep a state.

    Reference: Acar et al. 2021, "Federated learning based on dynamic regularization".
    """

    def dynamic(params: Params, start: Params, hyper: Hyper) -> Any:
        weight, own = hyper["proximal_weight"], hyper["gradient"]
        return jax.tree.map(lambda w, w0, g: weight * (w - w0) - g, params, start, own)

    work = following(client, plus(dynamic))
    ours = Optimizer(optax.sgd, {}, {"learning_rate": 1.0})  # not a hyperparameter
    plain = fed_opt(
        loss,
        server=ours,
        client=work,
        weighting=weighting,
        hyper={"proximal_weight": proximal_weight},
    )

    def init(params: Params, hyper: Hyper | None = None) -> FedDynState:
        server = plain.init(params, hyper)
        return FedDynState(server, jax.tree.map(jnp.zeros_like, widened(server.params)))

    def client_init(params: Params, clients: int) -> FedDynClient:
        # In nothing narrower than float32: it moves by a little in every round.
        zeros = jax.tree.map(jnp.zeros_like, widened(jax.tree.map(jnp.asarray, params)))
        return FedDynClient(zeros, jnp.int32(clients))

    @program(cohort=CLIENTS, client_state=CLIENTS)
    def round(
        state: FedDynState, hyper: Hyper, cohort: Any, key: Key, client_state: FedDynClient
    ) -> tuple[FedDynState, Metrics, FedDynClient]:
        hyper = now(state.server, hyper)
        own = client_state.gradient
        done = trained(work, loss, state.params, hyper, cohort, key, gradient=own)
        got = leaving(weighting, done, {"model update": done.update, "training loss": done.loss})
        far = widened(done.update)
        # With uniform weights this repeats the sum above, which is not sent twice.
        with jax.named_scope("model update"):
            went = sum(far)
        with jax.named_scope("number of all clients"):
            clients = mean(client_state.clients)
        with promoting():
            weight, theirs = hyper["proximal_weight"], done.hyper["proximal_weight"]
            safe = jnp.where(weight != 0, weight, 1)

            def moved(old: jax.Array, by: jax.Array) -> jax.Array:
                return (old + by).astype(old.dtype)

            kept = jax.tree.map(lambda g, u: moved(g, theirs * u), own, far)
            total = jax.tree.map(lambda h, u: moved(h, weight * u / clients), state.gradient, went)
            step = jax.tree.map(
                lambda u, h: moved(u, jnp.where(weight != 0, h / safe, 0)),
                got["model update"],
                total,
            )
        server = state.server.step(ours.build({}), step)
        metrics = Metrics(loss=got["training loss"])
        return FedDynState(server, total), metrics, FedDynClient(kept, client_state.clients)

    return replace(plain, init=init, round=round, client_init=client_init)
