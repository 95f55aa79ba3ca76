"""FedNova: clients that take more steps do not pull the model toward their own optimum."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms import server_optimizers
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.fed_opt import fed_opt
from fedgrad.algorithms.local_training import LocalTraining, Training, as_local, require_sgd
from fedgrad.algorithms.named import named
from fedgrad.algorithms.objective import Loss
from fedgrad.algorithms.optimizer import Optimizer, optimizer
from fedgrad.clients.examples import Examples
from fedgrad.core.primitives import promoting
from fedgrad.core.types import Hyper, Key, Params

# Below so many steps times (1 - momentum), the closed form of a sum of powers is a difference of
# numbers that are nearly the same; a series of so many terms is exact to float64 there.
NEAR, TERMS = 0.09, 9


def _series(gap: Any, steps: jax.Array) -> jax.Array:
    """Return Σ_{n=1}^{steps} Σ_{k<n} (1 - gap)^k by its binomial series."""
    term = total = steps * (steps + 1) / 2
    for i in range(1, TERMS):
        term = -term * gap * (steps - i) / (i + 2)
        total = total + term
    return total


@dataclass(frozen=True)
class PerStep:
    """Local training in which clients report their update per step."""

    work: LocalTraining

    @property
    def optimizer(self) -> Optimizer:
        """The clients' optimizer."""
        return self.work.optimizer

    @property
    def hyper(self) -> dict[str, Any]:
        """The amount of work, where it is a schedule."""
        return self.work.hyper

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the underlying local training."""
        return self.work.settings

    def require(self, hyper: Hyper) -> None:
        """Refuse whatever local training refuses."""
        self.work.require(hyper)

    def steps(self, examples: Examples, hyper: Hyper) -> jax.Array:
        """Return |a_i|₁, the sum of how often each gradient has moved a client's model. With
        momentum, an early gradient moves it in all later steps too."""
        steps = jnp.asarray(self.work.steps_of(examples, hyper), jnp.result_type(float))
        decay = hyper["client"].get("momentum")
        if decay is None:
            return steps
        with promoting():
            gap = 1 - decay
            safe = jnp.where(gap == 0, 1, gap)
            closed = (steps - decay * (1 - decay**steps) / safe) / safe
            return jnp.where(gap * steps < NEAR, _series(gap, steps), closed)

    def training(self, loss: Loss) -> Training:
        """Return the function that does all of a client's work in a round."""
        train = self.work.training(loss)

        def one(start: Params, examples: Examples, hyper: Hyper, key: Key) -> tuple[Any, jax.Array]:
            update, value = train(start, examples, hyper, key)
            steps = self.steps(examples, hyper)
            with promoting():
                return jax.tree.map(lambda u: (u / steps).astype(u.dtype), update), value

        return one


@named
def fed_nova(
    loss: Loss, client: Any = 0.1, server_learning_rate: Any = 1.0, *, weighting: str = "examples"
) -> Algorithm:
    """FedNova: normalizes client updates by the number of local steps.

    With client weights p_i, total steps |a_i|₁ and updates Δ_i = start - end,

    x -= server_learning_rate (Σ p_i |a_i|₁) Σ p_i Δ_i / |a_i|₁

    If all clients take the same number of steps, it is FedAvg; if clients with more examples take
    more steps, it still minimizes the mean of their losses.

    Args:
        loss: The loss `(params, batch)`, one number per example.
        client: Local training with SGD, where |a_i|₁ is the number of steps, or with momentum:
            `fg.optimizer(optax.sgd, learning_rate=0.1, momentum=0.9)`.
        server_learning_rate: The learning rate of the server.
        weighting: How clients are weighted, as for `fed_opt`.

    Returns:
        An algorithm.

    Reference: Wang et al. 2020, "Tackling the objective inconsistency problem".
    """
    local = as_local(client)
    known = {"learning_rate", "momentum"}
    require_sgd(local, "fed_nova", "it is known what one step counts", known)
    work = PerStep(local)

    def measure(update: Any, examples: Examples, hyper: Hyper) -> dict[str, jax.Array]:
        return {"steps": work.steps(examples, hyper)}

    server = optimizer(server_optimizers.fed_nova, learning_rate=server_learning_rate)
    return fed_opt(loss, server=server, client=work, weighting=weighting, measure=measure)
