"""The hypergradient of a round, in both schedules.

serial:    train with h_t, giving x_{t+1}; then compute the loss of x_{t+1} on the gradient
           cohort and its derivative by h_t. Two rounds of communication.
parallel:  train with h_t, giving x_{t+1} and S_{t+1} = dx_{t+1}/dh; in the same round, compute
           the gradient g_t of the loss of x_t on the gradient cohort. The server chains it with
           the stored sensitivity: <g_t, S_t>. One round of communication.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.ad.planner import CostModel
from fedgrad.ad.rules import Mode
from fedgrad.ad.transforms import jacobian, value_and_grad
from fedgrad.core.graph import CLIENTS, Placement
from fedgrad.core.primitives import promoting
from fedgrad.core.program import Program, program
from fedgrad.core.types import Hyper, Key, Params, State
from fedgrad.tuning.horizon import Horizon


@dataclass(frozen=True)
class Past:
    """The part of the self-tuning state that a step reads."""

    inner: Any
    learned: dict[str, Any]
    sensitivity: Any
    before: Params | None  # the model to compare losses with, or None


@dataclass(frozen=True)
class Found:
    """The result of a step. The last four fields describe the model at the start of the round
    (parallel) or at its end (serial)."""

    inner: Any
    metrics: Any
    sensitivity: Any
    loss: Any
    known: Any  # whether any example judged; if not, the loss is NaN and its gradient 0
    comparison: Any
    gradient: dict[str, Any]  # of the loss, by the learned values


# (learned values, state, hyper, cohort, key) -> (state, metrics)
Train = Callable[[dict[str, Any], State, Hyper, Any, Key], Any]
# (past, hyper, cohort, key, gradient cohort) -> result of the step
Step = Callable[[Past, Hyper, Any, Key, Any], Found]


@dataclass(frozen=True)
class Parts:
    """The building blocks of a step.

    `loss`: (params, before, gradient_cohort) -> (loss, (known, comparison)).
    """

    train: Train
    loss: Program
    at: Placement  # of the gradient cohort
    mode: Mode | CostModel
    horizon: Horizon


def serial(parts: Parts) -> Step:
    """Return a step that trains, then evaluates the loss of the new model."""
    if parts.horizon.rounds > 1:
        return _chained(parts, after=True)

    def outcome(
        raw: Any, inner: Any, before: Any, hyper: Hyper, cohort: Any, key: Key, gradient_cohort: Any
    ) -> Any:
        new, metrics = parts.train(raw, inner, hyper, cohort, key)
        value, judged = parts.loss(new.params, before, gradient_cohort)
        return value, (new, metrics, judged)

    placed = program(outcome, cohort=CLIENTS, gradient_cohort=parts.at)
    derived = value_and_grad(placed, "raw", parts.mode, has_aux=True)

    def step(past: Past, hyper: Hyper, cohort: Any, key: Key, gradient_cohort: Any) -> Found:
        (value, (inner, metrics, (known, comparison))), gradient = derived(
            past.learned, past.inner, past.before, hyper, cohort, key, gradient_cohort
        )
        return Found(inner, metrics, None, value, known, comparison, gradient)

    return step


def parallel(parts: Parts) -> Step:
    """Return a step that trains and, in the same round, evaluates the model it starts from."""
    return _chained(parts, after=False)


def _chained(parts: Parts, after: bool) -> Step:
    """Return a step that chains the gradient of the loss by the model with the model's sensitivity.

    The loss is evaluated `after` training or before it.
    """
    horizon = parts.horizon

    def trained(
        raw: Any, inner: Any, sensitivity: Any, hyper: Hyper, cohort: Any, key: Key
    ) -> tuple[Any, Any]:
        def round(inner: Any) -> Any:
            return parts.train(raw, inner, hyper, cohort, key)

        new, metrics = horizon.through_round(round, inner, raw, sensitivity)
        return horizon.followed(new), (new, metrics)

    derived = jacobian(program(trained, cohort=CLIENTS), "raw", parts.mode, has_aux=True)
    slope = value_and_grad(parts.loss, "params", parts.mode, has_aux=True)

    def step(past: Past, hyper: Hyper, cohort: Any, key: Key, gradient_cohort: Any) -> Found:
        now = horizon.usable(past.sensitivity)
        found, (new, metrics) = derived(past.learned, past.inner, now, hyper, cohort, key)
        followed, names = (jax.tree.structure(x) for x in (horizon.followed(new), past.learned))
        # The dtype of a derivative is the model's or the hyperparameter's, depending on the mode.
        sensitivity = jax.tree.map(
            lambda new, old: new.astype(old.dtype),
            jax.tree.transpose(followed, names, found),
            now,
        )
        state, chain = (new, horizon.usable(sensitivity)) if after else (past.inner, now)
        (value, (known, comparison)), gradient = slope(state.params, past.before, gradient_cohort)
        gradient = horizon.slope(state, gradient)
        chained = {name: _chain(gradient, chain[name]) for name in past.learned}
        return Found(new, metrics, sensitivity, value, known, comparison, chained)

    return step


def _chain(gradient: Any, sensitivity: Any) -> Any:
    """Return <g, S>, the derivative by a hyperparameter, in the hyperparameter's shape."""
    with promoting():
        parts = jax.tree.map(lambda g, s: jnp.tensordot(g, s, axes=g.ndim), gradient, sensitivity)
        return sum(jax.tree.leaves(parts)[1:], start=jax.tree.leaves(parts)[0])
