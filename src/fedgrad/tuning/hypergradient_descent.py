"""An algorithm that learns its own hyperparameters from federated hypergradients.

Algorithm 2 of the paper. hypergradient.py has the two schedules, horizon.py how far they look back,
and guards.py what happens after a bad step.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedgrad.ad.planner import CostModel
from fedgrad.ad.rules import Mode
from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.metrics import Metrics, require_metrics
from fedgrad.algorithms.optimizer import apply, in_words
from fedgrad.algorithms.parametrization import Form, learned, linear, usual
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError
from fedgrad.core.graph import CLIENTS
from fedgrad.core.loss_limit import ran_away
from fedgrad.core.program import program
from fedgrad.core.types import Hyper, Key, Params, State
from fedgrad.tuning import hypergradient
from fedgrad.tuning.effect import require_effect
from fedgrad.tuning.gradient_cohort import GradientCohort
from fedgrad.tuning.guards import choose, got_worse, guarded, nothing_proven
from fedgrad.tuning.horizon import Horizon, as_horizon

STEPS = {"parallel": hypergradient.parallel, "serial": hypergradient.serial}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TunedState:
    """The state of the tuned algorithm, and of its tuning."""

    inner: Any
    learned: dict[str, jax.Array]  # by dotted name, in the form in which they are learned
    optimizer: Any
    sensitivity: Any  # the derivative by `learned` of the model, or of all of `inner` (horizon.py)
    fallback: Any  # parallel and guarded: the last `inner` with a good loss
    proven: Any  # with guard="paired": statistics of good models
    first_loss: jax.Array  # the first one that is finite and not 0
    rounds: jax.Array
    rejected: jax.Array  # how often the guard intervened

    @property
    def params(self) -> Params:
        """The model."""
        return self.inner.params

    @property
    def last(self) -> Params:
        """The model that training continues from."""
        return last_of(self.inner)

    def going_on(self, inner: State, learned: dict[str, jax.Array]) -> "TunedState":
        """Return this initial state for training that continues from another state."""
        proven = None if self.proven is None else nothing_proven(learned)
        fallback = None if self.fallback is None else inner
        return replace(self, inner=inner, learned=learned, fallback=fallback, proven=proven)


def hypergradient_descent(
    algorithm: Algorithm,
    learn: str | Iterable[str] | Mapping[str, Form],
    optimizer: optax.GradientTransformation | None = None,
    schedule: Literal["parallel", "serial"] = "parallel",
    gradient_from: Literal["fresh", "same"] | Population | GradientCohort = "fresh",
    mode: Mode | CostModel = "auto",
    guard: float | Literal["paired"] | None = 1000.0,
    horizon: float | Horizon = 1,
) -> Algorithm:
    """Return the algorithm with hyperparameters that follow their hypergradients; for the arguments
    see `fg.self_tuning`."""
    if algorithm.cohorts:
        raise ArgumentError.here(
            f"The algorithm already takes a {next(iter(algorithm.cohorts))!r}, so it cannot be "
            "tuned (again). Name everything that is to be learned in one self_tuning(..., learn=)."
        )
    algorithm.require_stateless_clients("self_tuning")
    algorithm.require_one_form("self_tuning")
    # For a schedule, a factor on it is learned.
    algorithm = replace(algorithm, hyper=names_of.scalable(algorithm.hyper, learn))
    # The step size of an explicit optimizer refers to the numbers as they are.
    form = usual() if optimizer is None else linear()
    judges = gradient_from
    if not isinstance(judges, GradientCohort):
        judges = GradientCohort(judges)
    tuning = HypergradientDescent(
        algorithm,
        learned(algorithm.hyper, learn, form),
        optax.adam(0.01) if optimizer is None else optimizer,
        schedule,
        judges,
        mode,
        guard,
        as_horizon(horizon),
    )

    def same_round(
        state: TunedState, hyper: Hyper, cohort: Any, key: Key
    ) -> tuple[TunedState, Metrics]:
        return tuning.round(state, hyper, cohort, key, cohort)

    def fresh_round(
        state: TunedState, hyper: Hyper, cohort: Any, key: Key, gradient_cohort: Any
    ) -> tuple[TunedState, Metrics]:
        return tuning.round(state, hyper, cohort, key, gradient_cohort)

    fun = fresh_round if judges.cohorts else same_round
    fun.__name__ = f"self_tuning({algorithm.round.name})"
    placements = {"cohort": CLIENTS, **dict.fromkeys(judges.cohorts, judges.placement)}
    return replace(
        algorithm,
        init=tuning.init,
        round=program(fun, **placements).on(algorithm.round.executor),
        cohorts=judges.cohorts,
        settings={**algorithm.settings, "tuning": tuning.settings},
        learns=tuple(tuning.forms),
        require=judges.require_some,
    )


@dataclass(frozen=True, eq=False)
class HypergradientDescent:
    """An algorithm whose hyperparameters follow their hypergradients, with the steps of a round."""

    algorithm: Algorithm
    forms: Mapping[str, Form]  # of the learned hyperparameters, by dotted name
    optimizer: optax.GradientTransformation
    schedule: str
    judges: GradientCohort
    mode: Mode | CostModel
    guard: float | Literal["paired"] | None
    horizon: Horizon

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, optax.GradientTransformation):
            raise ArgumentError.here(
                f"self_tuning(..., optimizer=) takes an optax optimizer, got {self.optimizer!r}. "
                "Write optimizer=optax.adam(0.01)."
            )
        if self.schedule not in STEPS:
            raise ArgumentError.here(
                f"There is no schedule {self.schedule!r}.", str(self.schedule), STEPS
            )
        if not self.forms:
            raise ArgumentError.here("self_tuning(..., learn=[]): name a hyperparameter to learn.")
        if not (self.guard is None or self.guard == "paired" or _is_positive(self.guard)):
            raise ArgumentError.here(
                f'self_tuning(..., guard=) takes "paired", by how many times its size a loss may '
                f"be above the first one, or None, got {self.guard!r}."
            )

    @property
    def parallel(self) -> bool:
        """Whether the gradient of a round is chained with the sensitivity of the round before."""
        return self.schedule == "parallel"

    @property
    def settings(self) -> dict[str, Any]:
        """A description of the tuning, which is saved with a run."""
        return {
            "form": {name: form.words for name, form in self.forms.items()},
            "optimizer": in_words(self.optimizer),
            "schedule": self.schedule,
            "gradient_cohort": self.judges.words,
            "mode": str(self.mode),
            "guard": str(self.guard),
            "horizon": f"{self.horizon.rounds:g}, through {self.horizon.through}",
        }

    @functools.cached_property
    def _step(self) -> hypergradient.Step:
        loss, at = self.judges.program(self.algorithm.loss), self.judges.placement
        parts = hypergradient.Parts(self.train, loss, at, self.mode, self.horizon)
        return STEPS[self.schedule](parts)

    def init(self, params: Params, hyper: Hyper | None = None) -> TunedState:
        """Return the first state, of the algorithm and of its tuning."""
        names_of.select(hyper, [*self.forms])  # other leaves may be schedules by now
        values = names_of.paths(hyper)
        inner = self.algorithm.init(params, hyper)
        raw = {name: form.raw(values[name]) for name, form in self.forms.items()}
        zero, looks_back = jnp.int32(0), self.parallel or self.horizon.rounds > 1
        return TunedState(
            inner,
            raw,
            self.optimizer.init(raw),
            sensitivity=self.horizon.none_yet(inner, raw) if looks_back else None,
            fallback=inner if self.guard is not None and self.parallel else None,
            proven=nothing_proven(raw) if self.guard == "paired" else None,
            first_loss=jnp.asarray(jnp.inf, float),
            rounds=zero,
            rejected=zero,
        )

    def round(
        self, state: TunedState, hyper: Hyper, cohort: Any, key: Key, gradient_cohort: Any
    ) -> tuple[TunedState, Metrics]:
        """Train for a round, differentiate it, and take a step with the hyperparameters."""

        def model(raw: dict[str, Any]) -> Any:
            return self.horizon.followed(self.train(raw, state.inner, hyper, cohort, key)[0])

        require_effect(self.algorithm.round.name, model, state.learned)
        known = state.fallback if self.parallel else state.inner
        before = known.params if self.guard == "paired" else None
        past = hypergradient.Past(state.inner, state.learned, state.sensitivity, before)
        seen = self._step(past, hyper, cohort, key, gradient_cohort)
        metrics = require_metrics(seen.metrics)
        new, rejected = self.guarded(state, self.follow(state, seen, metrics), seen)
        return new, replace(
            metrics,
            gradient_loss=seen.loss,
            hyper={n: form.value(state.learned[n]) for n, form in self.forms.items()},
            hypergradient={n: jnp.where(seen.known, g, jnp.nan) for n, g in seen.gradient.items()},
            rejected=rejected,
        )

    def train(self, raw: dict[str, Any], inner: Any, hyper: Hyper, cohort: Any, key: Key) -> Any:
        """Run a round of the algorithm with the learned values, which are `raw` in their form."""
        used = names_of.replace(hyper, {n: form.value(raw[n]) for n, form in self.forms.items()})
        return self.algorithm.round(inner, used, cohort, key)

    def follow(self, state: TunedState, seen: hypergradient.Found, metrics: Metrics) -> TunedState:
        """Return the next state, before the guard checks it."""
        moved, kept = apply(self.optimizer, seen.gradient, state.optimizer, state.learned)
        moved = {n: form.project(moved[n]) for n, form in self.forms.items()}
        # The first parallel round has no sensitivity to chain its gradient with.
        ready = ((state.rounds > 0) | (not self.parallel)) & seen.known
        # A serial round evaluates the loss after training; the training loss is from its start.
        first = seen.loss if self.judges.loss or metrics.loss is None else metrics.loss
        known = jnp.isfinite(state.first_loss) & (state.first_loss != 0)
        return replace(
            state,
            inner=seen.inner,
            learned=choose(ready, moved, state.learned),
            optimizer=choose(ready, kept, state.optimizer),
            sensitivity=seen.sensitivity,
            first_loss=jnp.where(known, state.first_loss, jnp.asarray(first, float)),
            rounds=state.rounds + 1,
        )

    def guarded(
        self, state: TunedState, new: TunedState, seen: hypergradient.Found
    ) -> tuple[TunedState, jax.Array]:
        """Return the new state with diverging parts undone, and whether any were."""
        if self.guard is None:
            return new, jnp.int32(0)
        if self.guard == "paired":
            bad = got_worse(seen.loss, seen.comparison, state.proven.usual)
        else:
            bad = ran_away(seen.loss, new.first_loss, self.guard)
        good = ~bad | ~seen.known
        forms = dict(self.forms)
        return guarded(state, new, forms, seen.gradient, seen.known, good, seen.comparison)


def _is_positive(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and x > 0
