"""SCAFFOLD: clients correct their drift by control variates, which they keep between rounds."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.fed_opt import fed_opt, leaving, now, trained
from fedgrad.algorithms.local_training import following, plus, require_sgd
from fedgrad.algorithms.metrics import Metrics
from fedgrad.algorithms.named import named
from fedgrad.algorithms.objective import Loss
from fedgrad.algorithms.optimizer import optimizer, widened
from fedgrad.core.graph import CLIENTS
from fedgrad.core.primitives import accumulator, promoting
from fedgrad.core.program import broadcast, program, sum
from fedgrad.core.types import Hyper, Key, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaffoldState:
    """The server's state: `control` is the mean of the control variates of all clients."""

    server: Any
    control: Any

    @property
    def params(self) -> Params:
        """The model."""
        return self.server.params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaffoldClient:
    """A client's state: the estimate of its own gradient."""

    control: Any
    share: Any  # 1 / the number of all clients


@named
def scaffold(
    loss: Loss, client: Any = 0.1, server_learning_rate: Any = 1.0, *, weighting: str = "uniform"
) -> Algorithm:
    """SCAFFOLD (option II), with N clients of which S take part:

    y_i -= lr (∇F_i(y_i) - c_i + c), K times from y_i = x;  c_i⁺ = c_i - c + (x - y_i) / (K lr)
    x += server_learning_rate mean(y_i - x);                c += |S| / N mean(c_i⁺ - c_i)

    Args:
        loss: The loss `(params, batch)`, one number per example.
        client: Local training with plain SGD, as for `fed_avg`.
        server_learning_rate: The learning rate of the server.
        weighting: How clients are weighted in the mean, as for `fed_opt`.

    Returns:
        An algorithm whose clients keep a state.

    Reference: Karimireddy et al. 2020.
    """

    work = following(client, plus(lambda params, start, hyper: hyper["correction"]))
    require_sgd(work, "scaffold", "(x - y) / (K lr) is the mean of their gradients")
    ours = optimizer(optax.sgd, learning_rate=server_learning_rate)
    plain = fed_opt(loss, server=ours, client=work, weighting=weighting)

    def init(params: Params, hyper: Hyper | None = None) -> ScaffoldState:
        server = plain.init(params, hyper)
        return ScaffoldState(server, _zeros(server.params))

    def client_init(params: Params, clients: int) -> ScaffoldClient:
        zeros = _zeros(jax.tree.map(jnp.asarray, params))
        return ScaffoldClient(zeros, jnp.asarray(1 / clients, accumulator(zeros)))

    @program(cohort=CLIENTS, client_state=CLIENTS)
    def round(
        state: ScaffoldState, hyper: Hyper, cohort: Any, key: Key, client_state: ScaffoldClient
    ) -> tuple[ScaffoldState, Metrics, ScaffoldClient]:
        hyper = now(state.server, hyper)
        correction = jax.tree.map(jnp.subtract, broadcast(state.control), client_state.control)
        done = trained(work, loss, state.params, hyper, cohort, key, correction=correction)
        steps = work.steps_of(done.examples, done.hyper)
        with promoting():

            def controls(rate: Any, *parts: Any) -> Any:
                # With a rate of 0 the step carries no information on the gradient: c_i stays.
                moves, safe = rate != 0, jnp.where(rate != 0, rate, 1)

                def one(u: jax.Array, shift: jax.Array, old: jax.Array) -> jax.Array:
                    return jnp.where(moves, (u / (steps * safe)).astype(old.dtype) - shift, old)

                return jax.tree.map(one, *parts)

            rates, share = done.hyper["client"]["learning_rate"], client_state.share
            control = jax.tree.map(controls, rates, done.update, correction, client_state.control)
            moved = jax.tree.map(
                lambda a, old: ((a - old) * share).astype(old.dtype), control, client_state.control
            )
        got = leaving(weighting, done, {"model update": done.update, "training loss": done.loss})
        with jax.named_scope("control variate"):
            moved = sum(moved)
        server = state.server.step(ours.build(hyper["server"]), got["model update"])
        new = ScaffoldState(server, jax.tree.map(jnp.add, state.control, moved))
        return new, Metrics(loss=got["training loss"]), ScaffoldClient(control, share)

    return replace(plain, init=init, round=round, client_init=client_init)


def _zeros(params: Params) -> Any:
    """In nothing narrower than float32: the mean moves by a little in every round."""
    return jax.tree.map(jnp.zeros_like, widened(params))
