"""Train an algorithm without the held-out examples of its clients."""

from dataclasses import replace
from typing import Any

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.wrapped import wrapped
from fedgrad.clients.examples import Examples
from fedgrad.clients.held_out import A_FIFTH, HeldOut, require_rule
from fedgrad.core.errors import known_arguments


@known_arguments()
def holding_out(algorithm: Algorithm, held_out: HeldOut = A_FIFTH) -> Algorithm:
    """Return the algorithm trained without the held-out examples of each client.

    These examples can then judge the model: `fg.Evaluation(..., held_out=)`,
    `fg.GradientCohort(held_out=)`. They are also removed from further cohorts that the algorithm
    draws from the same clients to learn hyperparameters.

    Args:
        algorithm: The algorithm to train.
        held_out: The rule that selects the held-out examples; by default a fifth of each client's.

    Returns:
        An algorithm with the same state and hyperparameters.

    Example:

        algorithm = fg.holding_out(fg.fed_avg(loss))
    """
    require_rule("fg.holding_out", held_out)

    cohort = [*algorithm.round.signature.parameters][2]  # after the state and the hyperparameters
    drawn = [cohort, *(name for name, clients in algorithm.cohorts.items() if clients is None)]

    def round(*args: Any, **more: Any) -> Any:
        given = algorithm.round.bind(args, more)
        given |= {name: held_out.split(Examples.of(given[name]))[0] for name in drawn}
        return algorithm.round.by_name(given)

    return replace(algorithm, round=wrapped(algorithm.round, round, "holding_out"))
