"""What the library is about to have, as far as it does not have it yet. Each stands in for the
function of the same name of `fedgrad`, which is taken as soon as it is there; then this file goes.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

import fedgrad as fg


def _fed_auto(loss: Any, *, batch_size: int = 20) -> fg.Algorithm:
    return fg.averaged(fg.fed_prodigy(loss, fg.local_training(0.01, batch_size=batch_size)))


def _self_tuning(algorithm: fg.Algorithm) -> fg.Algorithm:
    learn = {"server.learning_rate": fg.log(1e-3, 10), "client.learning_rate": fg.log(1e-3, 10)}
    return fg.averaged(fg.self_tuning(algorithm, learn, optax.adam(0.1)))


def _traffic(algorithm: fg.Algorithm, params: Any, cohort: Any, rounds: int) -> int:
    """Bytes that a client receives and sends, if it is in every round."""
    others = dict.fromkeys(algorithm.cohorts, cohort)
    args = (algorithm.init(params), algorithm.hyper, cohort, jax.random.key(0))
    return rounds * sum(fg.plan(algorithm.round, *args, **others).bytes)


_learns_all = inspect.signature(fg.self_tuning).parameters["learn"].default is not inspect._empty
fed_auto: Callable[..., fg.Algorithm] = getattr(fg, "fed_auto", _fed_auto)
self_tuning: Callable[..., fg.Algorithm] = fg.self_tuning if _learns_all else _self_tuning
traffic: Callable[..., int] = getattr(fg, "traffic", _traffic)
