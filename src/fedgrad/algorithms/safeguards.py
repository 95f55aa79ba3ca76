"""What keeps self-tuning from running away: a step can be refused, a round be undone."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms.parametrization import Form
from fedgrad.core.primitives import promoting


def guarded(
    old: Any, new: Any, wanted: dict[str, Form], gradient: dict[str, Any], good: jax.Array
) -> tuple[Any, jax.Array]:
    """The new state of self-tuning without what has run away, and whether something has.

    `good` tells whether the loss is: that of the new model (serial) or of the old one (parallel,
    which therefore keeps the model before that one to go back to).
    """
    # An infinite gradient would be projected onto a bound, which is finite.
    tuned = finite(new.learned) & finite(new.optimizer) & finite(gradient)
    trained = finite(new.inner) & good
    # The same hyperparameters would lead there again: halve them.
    back = {n: w.raw(w.value(old.learned[n]) / 2) for n, w in wanted.items()}
    kept = choose(tuned, new.learned, old.learned)
    forgotten = jax.tree.map(jnp.zeros_like, new.sensitivity)
    rejected = jnp.where(tuned & trained, 0, 1).astype(jnp.int32)
    before = old.inner if old.fallback is None else choose(good, old.inner, old.fallback)
    state = replace(
        new,
        inner=choose(trained, new.inner, before),
        learned=choose(trained, kept, back),
        optimizer=choose(tuned & trained, new.optimizer, old.optimizer),
        sensitivity=choose(trained, new.sensitivity, forgotten),
        fallback=None if old.fallback is None else before,
        rejected=old.rejected + rejected,
    )
    return state, rejected


def ran_away(loss: jax.Array, first: jax.Array, times: float) -> jax.Array:
    """Whether a loss is not finite, or above the first one by so many times its size."""
    size = jnp.maximum(jnp.abs(first), 1)  # it may be negative, or 0 by chance
    with promoting():
        return ~jnp.isfinite(loss) | (loss > first + times * size)


def finite(tree: Any) -> jax.Array:
    """Whether all numbers of a tree are."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in floats] or [True]))


def choose(condition: jax.Array, new: Any, old: Any) -> Any:
    """One tree or the other."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
