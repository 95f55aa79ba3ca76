"""`fg.self_tuning(algorithm)` without further arguments, as long as the library does not have it:
this stands in for it, and goes when it does."""

import inspect
from collections.abc import Callable

import optax

import fedgrad as fg


def _self_tuning(algorithm: fg.Algorithm) -> fg.Algorithm:
    learn = {"server.learning_rate": fg.log(1e-3, 10), "client.learning_rate": fg.log(1e-3, 10)}
    return fg.averaged(fg.self_tuning(algorithm, learn, optax.adam(0.1)))


_learns_all = inspect.signature(fg.self_tuning).parameters["learn"].default is not inspect._empty
self_tuning: Callable[..., fg.Algorithm] = fg.self_tuning if _learns_all else _self_tuning
