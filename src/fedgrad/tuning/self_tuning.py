"""Algorithms that tune their own hyperparameters: `fg.self_tuning`."""

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
    """Return the algorithm with hyperparameters that follow their hypergradients.

    Without further arguments, the algorithm finds its own learning rates. For a third of all rounds
    it races against itself at other rates (`fg.race`), and the given rates lose only to
    significantly better ones. For another tenth, the winner races in the same way against itself
    with a server rate that follows its hypergradient. The model is an average (`fg.averaged`).

    Args:
        algorithm: The algorithm to tune.
        learn: Dotted names, `["server.learning_rate", "client"]`; the name of a branch means
            everything below it. Or a mapping from names to forms, `{"server.learning_rate":
            fg.log(1e-3, 10)}`, with `fg.log`, `fg.linear` or `fg.logit`.
        optimizer: An optax optimizer for the hyperparameters, by default `optax.adam(0.01)`; bare
            names then mean `fg.log` for rates and `fg.linear` for everything else. With an explicit
            optimizer they mean `fg.linear`, as in the paper.
        schedule: "parallel" takes one round of communication, "serial" two.
        gradient_from: The clients whose loss is differentiated: a "fresh" cohort (the paper's
            choice), the "same" clients that train, another population, or `fg.GradientCohort(...)`.
        mode: The mode of differentiation, or a `fg.CostModel`.
        guard: Undo a round and halve the learned values if the model is not finite, or if its loss
            is not finite or `loss > first + guard * abs(first)`, where `first` is the first loss
            that is not 0. "paired" compares the model with the previous one on the same clients and
            undoes rounds that are significantly worse; it steps back only the hyperparameter that
            is to blame. None disables the guard. Hyperparameter steps that are not finite are
            skipped. All of these are counted in `metrics.rejected`.
        horizon: How many rounds the derivative looks back. One round, as in the paper, prefers
            steps that are too small; `math.inf` is the derivative through all rounds so far;
            `fg.Horizon` has further options.

    Returns:
        An algorithm whose metrics contain `hyper` and `hypergradient`, by dotted name.

    Raises:
        ArgumentError: If an argument other than `algorithm` is given without `learn`.

    Example:

        algorithm = fg.self_tuning(fg.fed_adam(loss), learn="server.learning_rate")
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
