"""An algorithm that learns its own hyperparameters from their federated hypergradients.

Algorithm 2 of the paper: hypergradient.py has its two schedules, horizon.py how far they look back,
safeguards.py what happens if a step was wrong.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedgrad.ad.planner import CostModel
from fedgrad.ad.rules import Mode
from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms import hypergradient
from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.effect import require_effect
from fedgrad.algorithms.gradient_cohort import GradientCohort
from fedgrad.algorithms.horizon import Horizon, as_horizon
from fedgrad.algorithms.metrics import Metrics, require_metrics
from fedgrad.algorithms.optimizer import apply, in_words
from fedgrad.algorithms.parametrization import Form, learned, linear, usual
from fedgrad.algorithms.safeguards import choose, got_worse, guarded, nothing_proven
from fedgrad.clients.population import Population
from fedgrad.core.divergence import ran_away
from fedgrad.core.errors import ArgumentError
from fedgrad.core.graph import CLIENTS
from fedgrad.core.program import program
from fedgrad.core.types import Hyper, Key, Params, State


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TunedState:
    """The state of the algorithm that is tuned, and of its tuning."""

    inner: Any
    learned: dict[str, jax.Array]  # by dotted name, in the form in which they are learned
    optimizer: Any
    sensitivity: Any  # the derivative by `learned` of the model, or of all of `inner` (horizon.py)
    fallback: Any  # parallel and guarded: the last `inner` whose loss was seen to be good
    proven: Any  # compared in pairs: what is known of models that were good
    first_loss: jax.Array  # that was finite and not 0
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

    def going_on(self, inner: State, learned: dict[str, jax.Array]) -> "TunedState":
        """This state, before its first round, for a training that comes from somewhere else."""
        proven = None if self.proven is None else nothing_proven(learned)
        fallback = None if self.fallback is None else inner
        return replace(self, inner=inner, learned=learned, fallback=fallback, proven=proven)


def following(
    algorithm: Algorithm,
    learn: str | Iterable[str] | Mapping[str, Form],
    optimizer: optax.GradientTransformation | None = None,
    schedule: Literal["parallel", "serial"] = "parallel",
    gradient_from: Literal["fresh", "same"] | Population | GradientCohort = "fresh",
    mode: Mode | CostModel = "auto",
    guard: float | Literal["paired"] | None = 1000.0,
    horizon: float | Horizon = 1,
) -> Algorithm:
    """The algorithm with hyperparameters that follow their hypergradients: see `fg.self_tuning`."""
    # A step that somebody has chosen is one of the numbers as they are.
    form = usual() if optimizer is None else linear()
    optimizer = optax.adam(0.01) if optimizer is None else optimizer
    if not isinstance(optimizer, optax.GradientTransformation):
        raise ArgumentError.here(
            f"self_tuning(..., optimizer=) takes an optax optimizer, got {optimizer!r}. Write "
            "optimizer=optax.adam(0.01)."
        )
    steps = {"parallel": hypergradient.parallel, "serial": hypergradient.serial}
    if schedule not in steps:
        raise ArgumentError.here(f"There is no schedule {schedule!r}.", str(schedule), steps)
    if algorithm.cohorts:
        raise ArgumentError.here(
            f"The algorithm already takes a {next(iter(algorithm.cohorts))!r}, so it cannot be "
            "tuned (again). Name everything that is to be learned in one self_tuning(..., learn=)."
        )
    algorithm.require_stateless_clients("self_tuning")
    algorithm.require_one_form("self_tuning")
    # Of a schedule, the factor on it is learned.
    algorithm = replace(algorithm, hyper=names_of.scalable(algorithm.hyper, learn))
    wanted = learned(algorithm.hyper, learn, form)
    names = list(wanted)
    if not names:
        raise ArgumentError.here("self_tuning(..., learn=[]): name a hyperparameter to learn.")
    if not (guard is None or guard == "paired" or _is_positive(guard)):
        raise ArgumentError.here(
            f'self_tuning(..., guard=) takes "paired", by how many times its size a loss may be '
            f"above the first one, or None, got {guard!r}."
        )
    ahead, paired, parallel = as_horizon(horizon), guard == "paired", schedule == "parallel"
    judges = gradient_from
    if not isinstance(judges, GradientCohort):
        judges = GradientCohort(judges)
    loss, same = judges.program(algorithm.loss), not judges.cohorts

    def train(raw: dict[str, Any], inner: Any, hyper: Hyper, cohort: Any, key: Key) -> Any:
        used = names_of.replace(hyper, {n: wanted[n].value(raw[n]) for n in names})
        return algorithm.round(inner, used, cohort, key)

    step = steps[schedule](hypergradient.Parts(train, loss, judges.placement, mode, ahead))

    def found(
        state: TunedState, hyper: Hyper, cohort: Any, key: Key, more: Any
    ) -> hypergradient.Found:
        def model(raw: dict[str, Any]) -> Any:
            return ahead.followed(train(raw, state.inner, hyper, cohort, key)[0])

        require_effect(algorithm.round.name, model, state.learned)
        known = state.fallback if parallel else state.inner
        before = known.params if paired else None
        past = hypergradient.Past(state.inner, state.learned, state.sensitivity, before)
        return step(past, hyper, cohort, key, more)

    def init(params: Params, hyper: Hyper | None = None) -> TunedState:
        names_of.select(hyper, names)  # which of them are schedules may be other than above
        values = names_of.paths(hyper)
        inner = algorithm.init(params, hyper)
        raw = {name: wanted[name].raw(values[name]) for name in names}
        zero = jnp.int32(0)
        return TunedState(
            inner,
            raw,
            optimizer.init(raw),
            sensitivity=ahead.none_yet(inner, raw) if parallel or ahead.rounds > 1 else None,
            fallback=inner if guard is not None and parallel else None,
            proven=nothing_proven(raw) if paired else None,
            first_loss=jnp.asarray(jnp.inf, float),
            rounds=zero,
            rejected=zero,
        )

    def follow(state: TunedState, seen: hypergradient.Found) -> tuple[TunedState, Metrics]:
        """The next state, from what a round found out."""
        metrics = require_metrics(seen.metrics)
        moved, kept = apply(optimizer, seen.gradient, state.optimizer, state.learned)
        moved = {n: wanted[n].project(moved[n]) for n in names}
        # The first parallel round has nothing to chain its gradient with.
        ready = ((state.rounds > 0) | (not parallel)) & seen.known
        # A serial round sees the loss after training; the cohort's own is from the beginning.
        first = seen.loss if judges.loss or metrics.loss is None else metrics.loss
        known = jnp.isfinite(state.first_loss) & (state.first_loss != 0)
        new = replace(
            state,
            inner=seen.inner,
            learned=choose(ready, moved, state.learned),
            optimizer=choose(ready, kept, state.optimizer),
            sensitivity=seen.sensitivity,
            first_loss=jnp.where(known, state.first_loss, jnp.asarray(first, float)),
            rounds=state.rounds + 1,
        )
        rejected = jnp.int32(0)
        if guard is not None:
            if guard == "paired":
                bad = got_worse(seen.loss, seen.comparison, state.proven.usual)
            else:
                bad = ran_away(seen.loss, new.first_loss, guard)
            judged = (seen.gradient, seen.known, ~bad | ~seen.known, seen.comparison)
            new, rejected = guarded(state, new, wanted, *judged)
        values = {n: wanted[n].value(state.learned[n]) for n in names}
        return new, replace(
            metrics,
            gradient_loss=seen.loss,
            hyper=values,
            hypergradient={n: jnp.where(seen.known, g, jnp.nan) for n, g in seen.gradient.items()},
            rejected=rejected,
        )

    def same_round(
        state: TunedState, hyper: Hyper, cohort: Any, key: Key
    ) -> tuple[TunedState, Metrics]:
        return follow(state, found(state, hyper, cohort, key, cohort))

    def fresh_round(
        state: TunedState, hyper: Hyper, cohort: Any, key: Key, gradient_cohort: Any
    ) -> tuple[TunedState, Metrics]:
        return follow(state, found(state, hyper, cohort, key, gradient_cohort))

    fun = same_round if same else fresh_round
    fun.__name__ = f"self_tuning({algorithm.round.name})"
    placements = {"cohort": CLIENTS, **dict.fromkeys(judges.cohorts, judges.placement)}
    tuned = replace(program(fun, **placements), executor=algorithm.round.executor)
    how = {
        "form": {name: form.words for name, form in wanted.items()},
        "optimizer": in_words(optimizer),
        "schedule": schedule,
        "gradient_cohort": judges.words,
        "mode": str(mode),
        "guard": str(guard),
        "horizon": f"{ahead.rounds:g}, through {ahead.through}",
    }
    settings = {**algorithm.settings, "learns": ", ".join(names), "tuning": how}
    return replace(
        algorithm,
        init=init,
        round=tuned,
        cohorts=judges.cohorts,
        settings=settings,
        require=judges.require_some,
    )


def _is_positive(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and x > 0
