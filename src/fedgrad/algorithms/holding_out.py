"""An algorithm that leaves the held-out examples of its clients alone."""

from dataclasses import replace
from typing import Any

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.wrapped import wrapped
from fedgrad.clients.examples import Examples
from fedgrad.clients.held_out import A_FIFTH, HeldOut
from fedgrad.core.types import Hyper, State


def holding_out(algorithm: Algorithm, held_out: HeldOut = A_FIFTH) -> Algorithm:
    """The algorithm, trained without the held-out examples of each client, so that they can judge
    the model: `fg.Evaluation(..., held_out=)`, `fg.GradientCohort(held_out=)`."""

    def round(state: State, hyper: Hyper, cohort: Any, *args: Any, **more: Any) -> Any:
        train, _ = held_out.split(Examples.of(cohort))
        return algorithm.round(state, hyper, train, *args, **more)

    return replace(algorithm, round=wrapped(algorithm.round, round, "holding_out"))
