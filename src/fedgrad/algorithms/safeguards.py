"""What keeps self-tuning from running away: limits on a step, and a step that can be refused."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedgrad.algorithms.parametrisation import Learned


def limited(gradient: dict[str, Any], clip: float | None, normalise: bool) -> dict[str, Any]:
    """The hypergradients, each of norm 1 if asked for, together of at most the norm `clip`."""

    def unit(g: jax.Array) -> jax.Array:
        norm = jnp.linalg.norm(g)
        return jnp.where(norm > 0, g / jnp.where(norm > 0, norm, 1), 0)

    if normalise:
        gradient = {name: unit(g) for name, g in gradient.items()}
    if clip is not None:
        norm = optax.global_norm(gradient)
        factor = jnp.where(norm > clip, clip / norm, 1.0)
        gradient = {name: (g * factor).astype(g.dtype) for name, g in gradient.items()}
    return gradient


def guarded(old: Any, new: Any, wanted: dict[str, Learned]) -> tuple[Any, jax.Array]:
    """The new state of self-tuning without what is not finite, and whether there was something."""
    tuned = _finite(new.learned) & _finite(new.optimizer)
    trained = _finite(new.inner)
    # The same hyperparameters would lead there again: halve them.
    back = {n: w.raw(w.value(old.learned[n]) / 2) for n, w in wanted.items()}
    kept = choose(tuned, new.learned, old.learned)
    forgotten = jax.tree.map(jnp.zeros_like, new.sensitivity)
    rejected = jnp.where(tuned & trained, 0, 1).astype(jnp.int32)
    state = replace(
        new,
        inner=choose(trained, new.inner, old.inner),
        learned=choose(trained, kept, back),
        optimizer=choose(tuned, new.optimizer, old.optimizer),
        sensitivity=choose(trained, new.sensitivity, forgotten),
        rejected=old.rejected + rejected,
    )
    return state, rejected


def _finite(tree: Any) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in floats] or [True]))


def choose(condition: jax.Array, new: Any, old: Any) -> Any:
    """One tree or the other."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
