"""What the library is about to have, as far as it does not have it yet. Each stands in for the
function of the same name of `fedgrad`, which is taken as soon as it is there; then this file goes.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fedgrad as fg


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _AveragedState:
    inner: Any
    params: Any
    rounds: jax.Array

    @property
    def last(self) -> Any:
        """The model of the last round."""
        return self.inner.params


def _averaged(algorithm: fg.Algorithm) -> fg.Algorithm:
    """Polynomial averaging: xa <- xa + (x - xa) 9 / (t + 9)."""

    def init(params: Any, hyper: Any = None) -> _AveragedState:
        inner = algorithm.init(params, hyper)
        return _AveragedState(inner, inner.params, jnp.int32(0))

    def round(state: _AveragedState, hyper: Any, *args: Any, **more: Any) -> Any:
        inner, metrics = algorithm.round(state.inner, hyper, *args, **more)
        part = 9 / (state.rounds.astype(jnp.float32) + 9)
        mean = jax.tree.map(
            lambda a, x: (a + part * (x - a)).astype(x.dtype), state.params, inner.params
        )
        return _AveragedState(inner, mean, state.rounds + 1), metrics

    round.__name__ = f"averaged({algorithm.round.name})"
    placements = dict(algorithm.round.placements)
    program = fg.Program(round, placements, signature=algorithm.round.signature)
    return replace(algorithm, init=init, round=replace(program, executor=algorithm.round.executor))


def _fed_auto(loss: Any, *, batch_size: int = 20) -> fg.Algorithm:
    return averaged(fg.fed_prodigy(loss, fg.local_training(0.01, batch_size=batch_size)))


def _self_tuning(algorithm: fg.Algorithm) -> fg.Algorithm:
    learn = {"server.learning_rate": fg.log(1e-3, 10), "client.learning_rate": fg.log(1e-3, 10)}
    return averaged(fg.self_tuning(algorithm, learn, optax.adam(0.1)))


def traffic(algorithm: fg.Algorithm, params: Any, cohort: Any, rounds: int) -> int:
    """Bytes that a client receives and sends, if it is in every round."""
    return fg.explain(algorithm, params, cohort, rounds=rounds).bytes


def last_of(result: fg.Result) -> Any:
    """The model of the last round, where `result.params` is an average."""
    if hasattr(result, "last"):
        return result.last
    return getattr(result.state, "last", result.params)


_learns_all = inspect.signature(fg.self_tuning).parameters["learn"].default is not inspect._empty
averaged: Callable[[fg.Algorithm], fg.Algorithm] = getattr(fg, "averaged", _averaged)
fed_auto: Callable[..., fg.Algorithm] = getattr(fg, "fed_auto", _fed_auto)
self_tuning: Callable[..., fg.Algorithm] = fg.self_tuning if _learns_all else _self_tuning
