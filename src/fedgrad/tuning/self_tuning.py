"""Algorithms that tune themselves: `fg.self_tuning`."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

import optax

from fedgrad.ad.planner import CostModel
from fedgrad.ad.rules import Mode
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.parametrization import Form
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError, known_arguments
from fedgrad.tuning.gradient_cohort import GradientCohort
from fedgrad.tuning.horizon import Horizon
from fedgrad.tuning.hypergradient_descent import hypergradient_descent
from fedgrad.tuning.rate_search import rate_search


@known_arguments()
def self_tuning(
    algorithm: Algorithm,
    learn: str | Iterable[str] | Mapping[str, Form] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    schedule: Literal["parallel", "serial"] = "parallel",
    gradient_from: Literal["fresh", "same"] | Population | GradientCohort = "fresh",
    mode: Mode | CostModel = "auto",
    guard: float | Literal["paired"] | None = 1000.0,
    horizon: float | Horizon = 1,
) -> Algorithm:
    """The algorithm with some of its hyperparameters following their hypergradients.

    Without further arguments: the algorithm finds its own learning rates. As it is given it races
    with itself at other rates for a third of all rounds (`fg.race`), and gives way only to what is
    better by more than chance explains. Likewise, for a tenth more, what won against itself with a
    server's rate that follows its hypergradient. The model is an average (`fg.averaged`).

    `learn`: dotted names, `["server.learning_rate", "client"]`; the name of a branch means all
    below. Or how each is learned, by name: `{"server.learning_rate": fg.log(1e-3, 10)}`; there are
    `fg.log`, `fg.linear` and `fg.logit`. `optimizer`: of the hyperparameters, an optax optimizer,
    by default `optax.adam(0.01)`; names alone then mean `fg.log` for rates and `fg.linear` for
    everything else. With an optimizer of your own they mean `fg.linear`, as in the paper.
    `gradient_from`: who says what the loss is: a "fresh" cohort (the paper's choice), the "same"
    clients that train, another population, or `fg.GradientCohort(...)`. `mode`: of differentiation,
    or a `fg.CostModel`. `horizon`: over how many rounds the derivative looks back. One, as in the
    paper, prefers steps that are too small; `math.inf` is the derivative through all rounds so far;
    `fg.Horizon` says more.

    `guard`: a round after which the model is not finite, or its loss not finite or above the first
    one (that is not 0) by more than so many times its size, `loss > first + guard * abs(first)`, is
    undone and the learned values are halved. "paired" compares the
    model with the one before on the same clients, and undoes what is worse by more than chance
    explains; only the hyperparameter that is to blame is stepped back. A hyperparameter step that
    is not finite is left out. All are counted in `metrics.rejected`; None is without a guard.
    """
    asked = {"optimizer": optimizer, "schedule": schedule, "gradient_from": gradient_from}
    asked |= {"mode": mode, "guard": guard, "horizon": horizon}
    if learn is not None:
        return hypergradient_descent(algorithm, learn, **asked)  # type: ignore[arg-type]
    for name, value in asked.items():
        if value is not inspect.signature(self_tuning).parameters[name].default:
            raise ArgumentError.here(
                f"self_tuning(..., {name}={value!r}) is about hypergradients, so say what is to "
                'follow them: learn="server.learning_rate".'
            )
    finds = {"finds": "its own learning rates"}
    return replace(rate_search(algorithm), settings={**algorithm.settings, **finds})
