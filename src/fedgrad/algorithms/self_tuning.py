"""An algorithm that learns its own hyperparameters from their federated hypergradients.

Algorithm 2 of the paper. In both schedules the derivative is that of the loss after one round:

    serial:    train with h_t, giving x_{t+1}; then the loss of x_{t+1} at the gradient cohort, and
               its derivative by h_t. Two rounds of communication.
    parallel:  train with h_t, giving x_{t+1} and S_{t+1} = dx_{t+1}/dh_t; in the same round, the
               gradient g_t of the loss of x_t at the gradient cohort. The server chains it with
               what it kept: <g_t, S_t>. One round of communication.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedgrad.ad.planner import CostModel
from fedgrad.ad.transforms import Mode, jacobian, value_and_grad
from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.effect import require_effect
from fedgrad.algorithms.objective import client_loss
from fedgrad.algorithms.parametrisation import Bounds, learned
from fedgrad.algorithms.safeguards import choose, guarded, limited, ran_away
from fedgrad.clients.examples import Examples
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError, nearest
from fedgrad.core.operations import broadcast, mean
from fedgrad.core.placement import CLIENTS, Placement
from fedgrad.core.program import Program, program

GRADIENT = Placement("gradient")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TunedState:
    """The state of the algorithm that is tuned, and of its tuning."""

    inner: Any
    learned: dict[str, jax.Array]  # by dotted name, in the form in which they are learned
    optimizer: Any
    sensitivity: Any  # parallel: the derivative of the model by `learned`
    fallback: Any  # parallel and guarded: the last `inner` whose loss was seen to be good
    first_loss: jax.Array
    rounds: jax.Array
    rejected: jax.Array  # how often the guard had to step in

    @property
    def params(self) -> Any:
        """The model."""
        return self.inner.params


def self_tuning(
    algorithm: Algorithm,
    learn: str | Iterable[str],
    optimizer: optax.GradientTransformation | None = None,
    schedule: Literal["parallel", "serial"] = "parallel",
    gradient_from: Literal["fresh", "same"] | Population = "fresh",
    mode: Mode = "auto",
    cost: CostModel | None = None,
    parametrisation: str | Mapping[str, str] = "identity",
    bounds: Mapping[str, Bounds] = {},
    clip: float | None = None,
    normalise: bool = False,
    guard: float | None = 1000.0,
    gradient_batch_size: int = 50,
) -> Algorithm:
    """The algorithm with some of its hyperparameters following their hypergradients.

    `learn`: dotted names, `["server.learning_rate", "client"]`; a name of a branch means all below.
    `optimizer`: of the hyperparameters, an optax optimizer, by default `optax.sgd(0.01)`.
    `gradient_from`: who says what the loss is: a "fresh" cohort (the paper's choice), the "same"
    clients that train, or another population. `parametrisation`: "identity" (the paper's), "log" or
    "logit", for all or by name; `bounds` by name, otherwise those that go with the name (a learning
    rate is not negative, a momentum is below 1). `clip`: the largest norm of the hypergradients
    together; `normalise`: each is divided by its own norm. `guard`: a round after which
    the model is not finite, or its loss not finite or so many times that of the first round, is
    undone and the learned values are halved; a hyperparameter step that is not finite is left out.
    Both are counted in `metrics["rejected"]`; None is without a guard. `gradient_batch_size`:
    how many examples a client of the gradient cohort works on at a time.
    """
    optimizer = optax.sgd(0.01) if optimizer is None else optimizer
    steps = {"parallel": _parallel, "serial": _serial}
    if schedule not in steps:
        raise ArgumentError.here(
            f"There is no schedule {schedule!r}." + nearest(str(schedule), list(steps))
        )
    other = None if isinstance(gradient_from, str) else gradient_from
    if gradient_from not in ("fresh", "same") if other is None else not hasattr(other, "sample"):
        raise ArgumentError.here(
            f'gradient_from= takes "fresh", "same" or a population, got {gradient_from!r}.'
        )
    if algorithm.cohorts:
        raise ArgumentError.here(
            f"The algorithm already takes a {next(iter(algorithm.cohorts))!r}, so it cannot be "
            "tuned (again). Name everything that is to be learned in one self_tuning(..., learn=)."
        )
    names = names_of.select(algorithm.hyper, learn)
    if not names:
        raise ArgumentError.here("self_tuning(..., learn=[]): name a hyperparameter to learn.")
    wanted = learned(names, parametrisation, bounds)
    same = isinstance(gradient_from, str) and gradient_from == "same"
    at = CLIENTS if same else GRADIENT

    @program(gradient_cohort=at)
    def loss(params: Any, gradient_cohort: Any) -> jax.Array:
        data = gradient_cohort
        examples = data if isinstance(data, Examples) else Examples.of(data)
        theirs = client_loss(algorithm.loss, gradient_batch_size, broadcast(params, at), examples)
        return mean(theirs, weights=examples.count, at=at)

    def train(raw: dict[str, Any], state: TunedState, hyper: Any, cohort: Any, key: Any) -> Any:
        used = names_of.replace(hyper, {n: wanted[n].value(raw[n]) for n in names})
        return algorithm.round(state.inner, used, cohort, key)

    def checked(state: TunedState, hyper: Any, cohort: Any, key: jax.Array, more: Any) -> Any:
        def model(raw: dict[str, Any]) -> Any:
            return train(raw, state, hyper, cohort, key)[0].params

        require_effect(algorithm.round.name, model, state.learned)
        return step(state, hyper, cohort, key, more)

    step = steps[schedule](train, loss, at, mode, cost)

    def init(params: Any, hyper: Any = None) -> TunedState:
        names_of.select(hyper, names)  # which of them are schedules may be other than above
        values = names_of.paths(hyper)
        inner = algorithm.init(params, hyper)
        raw = {name: wanted[name].raw(values[name]) for name in names}

        def nothing(n: str) -> Any:
            """No derivative of the model by the hyperparameter n."""
            return jax.tree.map(
                lambda leaf: jnp.zeros((*leaf.shape, *raw[n].shape), jnp.result_type(leaf, raw[n])),
                inner.params,
            )

        zero = jnp.int32(0)
        sensitivity = {n: nothing(n) for n in names} if schedule == "parallel" else None
        fallback = inner if guard is not None and schedule == "parallel" else None
        first = jnp.float32(jnp.inf)
        return TunedState(inner, raw, optimizer.init(raw), sensitivity, fallback, first, zero, zero)

    def follow(state: TunedState, outcome: Any) -> tuple[TunedState, dict[str, Any]]:
        """The next state, from what a round found out."""
        inner, metrics, gradient_loss, gradient, sensitivity = outcome
        gradient = limited(gradient, clip, normalise)
        updates, kept = optimizer.update(gradient, state.optimizer, state.learned)
        moved = optax.apply_updates(state.learned, updates)
        moved = {n: wanted[n].project(moved[n]) for n in names}
        # The first parallel round has nothing to chain its gradient with.
        ready = (state.rounds > 0) | (schedule == "serial")
        new = TunedState(
            inner,
            choose(ready, moved, state.learned),
            choose(ready, kept, state.optimizer),
            sensitivity,
            state.fallback,
            # A serial round sees the loss after training; the cohort's own is from the beginning.
            jnp.where(
                jnp.isfinite(state.first_loss),
                state.first_loss,
                metrics.get("loss", gradient_loss),
            ).astype(jnp.float32),
            state.rounds + 1,
            state.rejected,
        )
        rejected = jnp.int32(0)
        if guard is not None:
            good = ~ran_away(gradient_loss, new.first_loss, guard)
            new, rejected = guarded(state, new, wanted, gradient, good)
        values = {n: wanted[n].value(state.learned[n]) for n in names}
        return new, {
            **metrics,
            "gradient_loss": gradient_loss,
            "hyper": values,
            "hypergradient": gradient,
            "rejected": rejected,
        }

    def same_round(state: TunedState, hyper: Any, cohort: Any, key: jax.Array) -> Any:
        return follow(state, checked(state, hyper, cohort, key, cohort))

    def fresh_round(
        state: TunedState, hyper: Any, cohort: Any, key: jax.Array, gradient_cohort: Any
    ) -> Any:
        return follow(state, checked(state, hyper, cohort, key, gradient_cohort))

    fun = same_round if same else fresh_round
    fun.__name__ = f"self_tuning({algorithm.round.name})"
    gradient = {} if same else {"gradient_cohort": GRADIENT}
    return replace(
        algorithm,
        init=init,
        round=replace(program(fun, cohort=CLIENTS, **gradient), executor=algorithm.round.executor),
        cohorts={} if same else {"gradient_cohort": other},
    )


# (state, hyper, cohort, key, gradient cohort) -> (inner, metrics, loss, hypergradient, sensitivity)
Step = Callable[[TunedState, Any, Any, jax.Array, Any], Any]


def _serial(train: Any, loss: Program, at: Placement, mode: Mode, cost: CostModel | None) -> Step:
    def outcome(
        raw: Any, state: TunedState, hyper: Any, cohort: Any, key: Any, gradient_cohort: Any
    ) -> Any:
        inner, metrics = train(raw, state, hyper, cohort, key)
        return loss(inner.params, gradient_cohort), (inner, metrics)

    placed = program(outcome, cohort=CLIENTS, gradient_cohort=at)
    derived = value_and_grad(placed, "raw", mode, cost, has_aux=True)

    def step(state: TunedState, hyper: Any, cohort: Any, key: Any, gradient_cohort: Any) -> Any:
        (value, (inner, metrics)), gradient = derived(
            state.learned, state, hyper, cohort, key, gradient_cohort
        )
        return inner, metrics, value, gradient, None

    return step


def _parallel(train: Any, loss: Program, at: Placement, mode: Mode, cost: CostModel | None) -> Step:
    def trained(raw: Any, state: TunedState, hyper: Any, cohort: Any, key: Any) -> Any:
        inner, metrics = train(raw, state, hyper, cohort, key)
        return inner.params, (inner, metrics)

    derived = jacobian(program(trained, cohort=CLIENTS), "raw", mode, cost, has_aux=True)
    slope = value_and_grad(loss, "params", mode, cost)

    def step(state: TunedState, hyper: Any, cohort: Any, key: Any, gradient_cohort: Any) -> Any:
        sensitivity, (inner, metrics) = derived(state.learned, state, hyper, cohort, key)
        value, gradient = slope(state.params, gradient_cohort)
        chained = {n: _chain(gradient, state.sensitivity[n]) for n in state.learned}
        models, learned = jax.tree.structure(state.params), jax.tree.structure(state.learned)
        sensitivity = jax.tree.transpose(models, learned, sensitivity)
        # A derivative has the dtype of the model or of what is learned, as its mode has it.
        sensitivity = jax.tree.map(
            lambda new, old: new.astype(old.dtype), sensitivity, state.sensitivity
        )
        return inner, metrics, value, chained, sensitivity

    return step


def _chain(gradient: Any, sensitivity: Any) -> Any:
    """<g, S>: the derivative by a hyperparameter, of its shape."""
    parts = jax.tree.map(lambda g, s: jnp.tensordot(g, s, axes=g.ndim), gradient, sensitivity)
    return sum(jax.tree.leaves(parts)[1:], start=jax.tree.leaves(parts)[0])
