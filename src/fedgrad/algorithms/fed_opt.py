"""FedOpt: clients train, and the server applies the mean of their updates as a gradient.

This is the only implementation; each named algorithm (variants.py) states only how it differs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.local_training import Work, as_work
from fedgrad.algorithms.metrics import Metrics
from fedgrad.algorithms.named import BELONGS_TO_LOCAL_TRAINING
from fedgrad.algorithms.objective import OF_THE_LOSS, Loss, require_loss, sent
from fedgrad.algorithms.optimizer import apply, as_optimizer, start_of, widened
from fedgrad.algorithms.restarts import require_no_restart
from fedgrad.algorithms.settings import settings_of
from fedgrad.clients.examples import Examples
from fedgrad.core.errors import ArgumentError, known_arguments
from fedgrad.core.graph import CLIENTS
from fedgrad.core.lossless import require_lossless
from fedgrad.core.program import broadcast, client_key, mean, program
from fedgrad.core.types import Hyper, Key, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ServerState:
    """The state of the server between rounds."""

    params: Params
    optimizer: Any
    rounds: Any = None  # the number of rounds so far, if a schedule needs it
    # The rounding error of a model in float16 or bfloat16. Without it small steps would be lost,
    # and with them the progress of a server that estimates its rate (Prodigy, DoG).
    lost: Any = None

    @classmethod
    def first(cls, made: Any, params: Params, rounds: Any) -> "ServerState":
        """Return the state before the first round."""
        whole = widened(params)
        narrow = jax.tree.map(jnp.result_type, whole) != jax.tree.map(jnp.result_type, params)
        lost = jax.tree.map(jnp.zeros_like, whole) if narrow else None
        return cls(params, start_of(made, params), rounds, lost)

    def step(self, made: Any, update: Any, **measured: Any) -> "ServerState":
        """Return the state after a step of the server's optimizer along the mean update."""
        rounds = None if self.rounds is None else self.rounds + 1
        if self.lost is None:
            params, kept = apply(made, update, self.optimizer, self.params, **measured)
            return ServerState(params, kept, rounds)
        whole = jax.tree.map(lambda x, rest: x.astype(rest.dtype) + rest, self.params, self.lost)
        whole, kept = apply(made, update, self.optimizer, whole, **measured)
        params = jax.tree.map(lambda x, old: x.astype(old.dtype), whole, self.params)
        lost = jax.tree.map(lambda x, new: x - new.astype(x.dtype), whole, params)
        return ServerState(params, kept, rounds, lost)


# Statistics of a client, by name: (its update, its examples, the hyperparameters it was sent).
Measure = Callable[[Any, Examples, Any], dict[str, jax.Array]]

# The weight of a client, from its number of examples and the hyperparameters. None: all equal.
WEIGHTINGS: dict[str, Callable[[jax.Array, Any], Any]] = {
    "examples": lambda count, hyper: count,
    "uniform": lambda count, hyper: None,
    "power": lambda count, hyper: jnp.exp(
        hyper["weight_exponent"] * jnp.log(count.astype(jnp.result_type(float)))
    ),
}


@known_arguments(BELONGS_TO_LOCAL_TRAINING | OF_THE_LOSS)
def fed_opt(
    loss: Loss,
    *,
    server: Any,
    client: Any,
    weighting: str = "examples",
    hyper: Mapping[str, Any] = {},
    measure: Measure | None = None,
) -> Algorithm:
    """FedOpt, Algorithm 1 of the paper, for any model, loss and pair of optax optimizers.

    In every round, clients train from the server's model x and send Δ_i = start - end; the server
    updates x with its optimizer, where the weighted mean of Δ_i takes the place of the gradient.

    Args:
        loss: `loss(params, batch)` returns one loss per example (or one number; then it is called
            with one example at a time). With a third argument `key` it may be random.
        server: `fg.optimizer(optax.sgd, learning_rate=0.1)`, whose floats are hyperparameters, or a
            plain optax optimizer.
        client: The work of clients in a round, `fg.local_training(...)`; an optimizer or a learning
            rate means local training with it.
        weighting: The weight of a client: its number of `"examples"`, equal weights (`"uniform"`),
            or its number of examples to the power of the hyperparameter `weight_exponent`
            (`"power"`).
        hyper: Further hyperparameters of a variant.
        measure: Statistics of each client's update; their means are passed to the server's
            optimizer by name.

    Returns:
        An algorithm.

    Raises:
        ArgumentError: If the loss, an optimizer or the weighting is not valid.

    Example:

        server = fg.optimizer(optax.adam, learning_rate=0.01)
        algorithm = fg.fed_opt(loss, server=server, client=fg.local_training(0.1, epochs=2))

    Reference: Reddi et al. 2021, "Adaptive federated optimization".
    """
    require_loss(loss)
    if weighting not in WEIGHTINGS:
        raise ArgumentError.here(f"There is no weighting {weighting!r}.", weighting, WEIGHTINGS)
    ours, work = as_optimizer(server, "server"), as_work(client)
    power = {"weight_exponent": 1.0} if weighting == "power" else {}
    theirs = {"client": work.optimizer.defaults, **work.hyper}
    own = {"server": ours.defaults, **theirs, **power}
    _require_free("hyper", hyper, own, "is a hyperparameter already")
    defaults = {**own, **hyper}

    def init(params: Params, hyper: Hyper | None = None) -> ServerState:
        require_lossless(params, "The model")
        params, first = jax.tree.map(_trainable, params), names_of.at(hyper, 0)
        require_no_restart(work.optimizer.build(first["client"]), params)
        work.require(hyper)
        made = ours.build(first["server"])
        rounds = jnp.int32(0) if names_of.schedules(hyper) else None
        return ServerState.first(made, params, rounds)

    @program(cohort=CLIENTS)
    def round(
        state: ServerState, hyper: Hyper, cohort: Any, key: Key
    ) -> tuple[ServerState, Metrics]:
        hyper = now(state, hyper)
        done = trained(work, loss, state.params, hyper, cohort, key)
        measured = measure(done.update, done.examples, done.hyper) if measure else {}
        sums = {"model update": done.update, "training loss": done.loss}
        _require_free("measure", measured, sums, "is measured already")
        got = leaving(weighting, done, {**sums, **measured})
        seen = {name: got[name] for name in measured}
        new = state.step(ours.build(hyper["server"]), got["model update"], **seen)
        return new, Metrics(loss=got["training loss"])

    made_of = settings_of(work, ours, weighting)
    return Algorithm(init, round, defaults, loss, settings=made_of)


@dataclass(frozen=True)
class Trained:
    """The work of a client in a round."""

    examples: Examples
    hyper: Hyper  # as sent to the client
    update: Any  # start - end
    loss: jax.Array


def trained(
    work: Work, loss: Loss, params: Params, hyper: Hyper, cohort: Any, key: Key, **own: Any
) -> Trained:
    """Broadcast the model and the clients' hyperparameters, and train.

    `own`: further values that only the client knows.
    """
    examples = Examples.of(cohort)
    theirs = broadcast({name: value for name, value in hyper.items() if name != "server"})
    train = work.training(sent(loss))
    update, value = train(broadcast(params), examples, {**theirs, **own}, client_key(key))
    return Trained(examples, theirs, update, value)


def leaving(weighting: str, done: Trained, sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the means over clients of what they send, by the name that an audit shows. If no
    client has weight, the model stays and the loss is NaN."""
    weights = WEIGHTINGS[weighting](done.examples.count, done.hyper)
    got = {}
    for name, part in sums.items():
        words = name.replace("_", " ")
        with jax.named_scope(words if weights is None else f"{words}, weighted"):
            empty = jnp.nan if name == "training loss" else 0.0
            got[name] = mean(part, weights=weights, empty=empty)
    return got


def _require_free(argument: str, names: Iterable[str], taken: Iterable[str], why: str) -> None:
    """Refuse names that would silently replace what is there."""
    for name in {*names} & {*taken}:
        raise ArgumentError.here(f"fed_opt(..., {argument}=): {name!r} {why}. Give another name.")


def now(state: ServerState, hyper: Hyper) -> Hyper:
    """Return the hyperparameters of this round, with schedules replaced by numbers."""
    scheduled = names_of.schedules(hyper)
    if scheduled and state.rounds is None:
        raise ArgumentError.here(
            f"{next(iter(scheduled))!r} is a schedule, but the state does not count rounds: it was "
            "made without one. Give init the same hyperparameters: algorithm.init(params, hyper)."
        )
    return names_of.at(hyper, state.rounds)


def _trainable(leaf: Any) -> jax.Array:
    try:
        array = jnp.asarray(leaf)
    except TypeError:
        array = None
    if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
        found = type(leaf).__name__ if array is None else array.dtype
        raise ArgumentError.here(
            f"Every leaf of the model must be a floating array to be trained, found {found}. Keep "
            "the others out: eqx.partition(model, eqx.is_inexact_array) or nnx.split(model, "
            "nnx.Param, ...)."
        )
    return jnp.asarray(array, array.dtype)  # a Python number is weakly typed
