"""Checks that run before any client trains, so that mistakes fail fast."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.objective import OF_THE_LOSS
from fedgrad.clients.cohort import Cohort
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError, require_whole
from fedgrad.core.lossless import require_lossless
from fedgrad.core.types import Params
from fedgrad.planning.plan import plan
from fedgrad.training.evaluation import Evaluation, Evaluations

OF_CLIENTS = (
    "It belongs to the algorithm: fg.fed_avg(loss, client_learning_rate=0.1, batch_size=10)."
)
# Hints for arguments that are passed to training but belong elsewhere.
BELONGS_ELSEWHERE = {
    **dict.fromkeys(
        ("average", "averaged"), "It belongs to the algorithm: fg.averaged(algorithm)."
    ),
    **dict.fromkeys(("batch_size", "client_learning_rate", "epochs", "learning_rate"), OF_CLIENTS),
    **OF_THE_LOSS,
    "executor": "It belongs to the algorithm: algorithm.on(executor).",
    "hyper": "It belongs to the algorithm: algorithm.starting(hyper).",
    "loss": "It belongs to the algorithm: fg.fed_auto(loss).",
    "seed": "Randomness is a key: key=jax.random.key(0).",
}


def require_algorithm(algorithm: Any) -> None:
    """Refuse anything but an algorithm."""
    if isinstance(algorithm, Algorithm):
        return
    name = getattr(algorithm, "__name__", "")
    ours = getattr(algorithm, "__module__", "").startswith("fedgrad.")
    fix = f"Call it: fg.{name}(loss)." if ours else "Make one of a loss: fg.fed_auto(loss)."
    got = f"{type(algorithm).__name__} {name}".rstrip()
    raise ArgumentError.here(f"Training takes an algorithm, got {got}. {fix}")


def require_model(params: Params) -> None:
    """Refuse a model without arrays, with lossy dtypes, or with Flax's `batch_stats`."""
    if not jax.tree.leaves(params):
        raise ArgumentError.here(
            f"params= is the model to start with, a tree of arrays; got {params!r:.60}, which has "
            "none."
        )
    require_lossless(params, "params=")
    if isinstance(params, Mapping) and "batch_stats" in params:
        raise ArgumentError.here(
            "params= has 'batch_stats', the statistics of Flax's BatchNorm: they are not trained, "
            "and nobody would keep them up to date. Give the weights alone, params['params'], and "
            "the statistics as they are by fg.with_fixed(loss, batch_stats); "
            "docs/algorithms.md#batchnorm-and-other-state-of-a-model makes new ones in every round."
        )


def require_rounds(rounds: Any, of_use: bool) -> None:
    """Refuse `rounds=0`, unless it serves to evaluate or to set up a folder."""
    require_whole("rounds", rounds, least=0)
    if rounds == 0 and not of_use:
        raise ArgumentError.here("rounds=0: nothing is trained. Ask for at least 1.")


def require_evaluations(evaluations: Evaluations, params: Params) -> None:
    """Refuse an evaluation that would fail when it is due, as far as tracing shows: an evaluation
    of clients is traced for one client."""
    for evaluation in evaluations.by_name.values():
        if evaluation.program is None:
            _require_of_model(evaluation)
        elif (one := _one_client(evaluation)) is not None:
            plan(evaluation.program, params, one)


def _require_of_model(evaluation: Evaluation) -> None:
    try:
        inspect.signature(evaluation.function).bind(None)
    except ValueError:  # a function that is not written in Python
        return
    except TypeError:
        name = getattr(evaluation.function, "__name__", "the function")
        raise ArgumentError.here(
            f"evaluate= takes functions of the model alone, and {name} takes other arguments. One "
            f'of the model and a batch is a metric of clients: fg.Evaluation({{"loss": {name}}}, '
            "clients)."
        ) from None


def _one_client(evaluation: Evaluation) -> Any:
    """Return a cohort of one client, if the data are here."""
    clients = evaluation.of
    if isinstance(clients, Population):
        return clients.select(np.array([0])) if clients.here else None
    return clients if isinstance(clients, Cohort) else None
