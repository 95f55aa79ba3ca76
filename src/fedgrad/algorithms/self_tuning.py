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
from fedgrad.ad.rules import Mode
from fedgrad.ad.transforms import jacobian, value_and_grad
from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.effect import require_effect
from fedgrad.algorithms.gradient_cohort import GradientCohort
from fedgrad.algorithms.metrics import Metrics, require_metrics
from fedgrad.algorithms.optimizer import apply
from fedgrad.algorithms.parametrization import Form, learned
from fedgrad.algorithms.safeguards import choose, guarded, ran_away
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError, known_arguments
from fedgrad.core.graph import CLIENTS, Placement
from fedgrad.core.primitives import common, promoting
from fedgrad.core.program import Program, program
from fedgrad.core.types import Hyper, Key, Params


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
    def params(self) -> Params:
        """The model."""
        return self.inner.params

    @property
    def last(self) -> Params:
        """The model that training goes on with."""
        return last_of(self.inner)


@known_arguments()
def self_tuning(
    algorithm: Algorithm,
    learn: str | Iterable[str] | Mapping[str, Form],
    optimizer: optax.GradientTransformation | None = None,
    schedule: Literal["parallel", "serial"] = "parallel",
    gradient_from: Literal["fresh", "same"] | Population | GradientCohort = "fresh",
    mode: Mode | CostModel = "auto",
    guard: float | None = 1000.0,
) -> Algorithm:
    """The algorithm with some of its hyperparameters following their hypergradients.

    `learn`: dotted names, `["server.learning_rate", "client"]`; the name of a branch means all
    below. Or how each is learned, by name: `{"server.learning_rate": fg.log(1e-3, 10)}`, where
    `fg.linear` is the default and `fg.logit` the third. `optimizer`: of the hyperparameters, an
    optax optimizer, by default `optax.sgd(0.01)`. `gradient_from`: who says what the loss is: a
    "fresh" cohort (the paper's choice), the "same" clients that train, another population, or
    `fg.GradientCohort(...)`. `mode`: of differentiation, or a `fg.CostModel`. `guard`: a round
    after which the model is not finite, or its loss not finite or so many times that of the first
    round, is undone and the learned values are halved; a hyperparameter step that is not finite is
    left out. Both are counted in `metrics.rejected`; None is without a guard.
    """
    optimizer = optax.sgd(0.01) if optimizer is None else optimizer
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ArgumentError.here(
            f"self_tuning(..., optimizer=) takes an optax optimizer, got {optimizer!r}. Write "
            "optimizer=optax.adam(0.01)."
        )
    steps = {"parallel": _parallel, "serial": _serial}
    if schedule not in steps:
        raise ArgumentError.here(f"There is no schedule {schedule!r}.", str(schedule), steps)
    if algorithm.cohorts:
        raise ArgumentError.here(
            f"The algorithm already takes a {next(iter(algorithm.cohorts))!r}, so it cannot be "
            "tuned (again). Name everything that is to be learned in one self_tuning(..., learn=)."
        )
    algorithm.require_stateless_clients("self_tuning")
    algorithm.require_one_form("self_tuning")
    wanted = learned(algorithm.hyper, learn)
    names = list(wanted)
    if not names:
        raise ArgumentError.here("self_tuning(..., learn=[]): name a hyperparameter to learn.")
    judges = gradient_from
    if not isinstance(judges, GradientCohort):
        judges = GradientCohort(judges)
    loss, same = judges.program(algorithm.loss), not judges.cohorts

    def train(raw: dict[str, Any], state: TunedState, hyper: Hyper, cohort: Any, key: Key) -> Any:
        used = names_of.replace(hyper, {n: wanted[n].value(raw[n]) for n in names})
        return algorithm.round(state.inner, used, cohort, key)

    def checked(state: TunedState, hyper: Hyper, cohort: Any, key: Key, more: Any) -> Any:
        def model(raw: dict[str, Any]) -> Any:
            return train(raw, state, hyper, cohort, key)[0].params

        require_effect(algorithm.round.name, model, state.learned)
        return step(state, hyper, cohort, key, more)

    step = steps[schedule](train, loss, judges.placement, mode)

    def init(params: Params, hyper: Hyper | None = None) -> TunedState:
        names_of.select(hyper, names)  # which of them are schedules may be other than above
        values = names_of.paths(hyper)
        inner = algorithm.init(params, hyper)
        raw = {name: wanted[name].raw(values[name]) for name in names}

        def nothing(n: str) -> Any:
            """No derivative of the model by the hyperparameter n."""
            return jax.tree.map(
                lambda leaf: jnp.zeros((*leaf.shape, *raw[n].shape), common(leaf, raw[n])),
                inner.params,
            )

        zero = jnp.int32(0)
        sensitivity = {n: nothing(n) for n in names} if schedule == "parallel" else None
        fallback = inner if guard is not None and schedule == "parallel" else None
        first = jnp.float32(jnp.inf)
        return TunedState(inner, raw, optimizer.init(raw), sensitivity, fallback, first, zero, zero)

    def follow(state: TunedState, outcome: Any) -> tuple[TunedState, Metrics]:
        """The next state, from what a round found out."""
        inner, metrics, gradient_loss, gradient, sensitivity = outcome
        metrics = require_metrics(metrics)
        moved, kept = apply(optimizer, gradient, state.optimizer, state.learned)
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
                jnp.float32(gradient_loss if judges.loss or metrics.loss is None else metrics.loss),
            ),
            state.rounds + 1,
            state.rejected,
        )
        rejected = jnp.int32(0)
        if guard is not None:
            good = ~ran_away(gradient_loss, new.first_loss, guard)
            new, rejected = guarded(state, new, wanted, gradient, good)
        values = {n: wanted[n].value(state.learned[n]) for n in names}
        return new, replace(
            metrics,
            gradient_loss=gradient_loss,
            hyper=values,
            hypergradient=gradient,
            rejected=rejected,
        )

    def same_round(
        state: TunedState, hyper: Hyper, cohort: Any, key: Key
    ) -> tuple[TunedState, Metrics]:
        return follow(state, checked(state, hyper, cohort, key, cohort))

    def fresh_round(
        state: TunedState, hyper: Hyper, cohort: Any, key: Key, gradient_cohort: Any
    ) -> tuple[TunedState, Metrics]:
        return follow(state, checked(state, hyper, cohort, key, gradient_cohort))

    fun = same_round if same else fresh_round
    fun.__name__ = f"self_tuning({algorithm.round.name})"
    placements = {"cohort": CLIENTS, **dict.fromkeys(judges.cohorts, judges.placement)}
    tuned = replace(program(fun, **placements), executor=algorithm.round.executor)
    return replace(algorithm, init=init, round=tuned, cohorts=judges.cohorts)


# (state, hyper, cohort, key, gradient cohort) -> (inner, metrics, loss, hypergradient, sensitivity)
Step = Callable[[TunedState, Any, Any, jax.Array, Any], Any]


def _serial(train: Any, loss: Program, at: Placement, mode: Mode | CostModel) -> Step:
    def outcome(
        raw: Any, state: TunedState, hyper: Hyper, cohort: Any, key: Key, gradient_cohort: Any
    ) -> Any:
        inner, metrics = train(raw, state, hyper, cohort, key)
        return loss(inner.params, gradient_cohort), (inner, metrics)

    placed = program(outcome, cohort=CLIENTS, gradient_cohort=at)
    derived = value_and_grad(placed, "raw", mode, has_aux=True)

    def step(state: TunedState, hyper: Hyper, cohort: Any, key: Key, gradient_cohort: Any) -> Any:
        (value, (inner, metrics)), gradient = derived(
            state.learned, state, hyper, cohort, key, gradient_cohort
        )
        return inner, metrics, value, gradient, None

    return step


def _parallel(train: Any, loss: Program, at: Placement, mode: Mode | CostModel) -> Step:
    def trained(raw: Any, state: TunedState, hyper: Hyper, cohort: Any, key: Key) -> Any:
        inner, metrics = train(raw, state, hyper, cohort, key)
        return inner.params, (inner, metrics)

    derived = jacobian(program(trained, cohort=CLIENTS), "raw", mode, has_aux=True)
    slope = value_and_grad(loss, "params", mode)

    def step(state: TunedState, hyper: Hyper, cohort: Any, key: Key, gradient_cohort: Any) -> Any:
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
    with promoting():
        parts = jax.tree.map(lambda g, s: jnp.tensordot(g, s, axes=g.ndim), gradient, sensitivity)
        return sum(jax.tree.leaves(parts)[1:], start=jax.tree.leaves(parts)[0])
