"""Guards of self-tuning: they reject hyperparameter steps and undo rounds that diverge."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms.parametrization import Form
from fedgrad.core.primitives import promoting
from fedgrad.tuning.gradient_cohort import Comparison

# A model is worse if, on the same clients, its loss exceeds that of the previous model by more than
# sampling of clients explains: CLIENTS_DIFFER standard errors of the mean difference. The increase
# must also be noticeable, ROUNDS_DIFFER times the usual change: rounds also increase the loss
# because of who trains in them, and a change within the standard error of the loss itself does no
# harm.
CLIENTS_DIFFER, ROUNDS_DIFFER = 2.0, 5.0
MEMORY = 0.9  # decay of the moving average of how much rounds change the loss


def guarded(
    old: Any,
    new: Any,
    wanted: dict[str, Form],
    gradient: dict[str, Any],
    known: jax.Array,
    good: jax.Array,
    comparison: Comparison | None = None,
) -> tuple[Any, jax.Array]:
    """Return the new state of self-tuning with diverging parts undone, and whether any were.

    `good` tells whether the loss is acceptable: that of the new model (serial) or of the old one
    (parallel, which therefore keeps the model before that one as a fallback). It is true where the
    loss is not `known` because no client had an example to judge by. With a `comparison`, only the
    hyperparameter to blame for a bad loss is stepped back, as far as it can be identified.
    """
    # An infinite gradient would be projected onto a bound, which is finite.
    tuned = finite(new.learned) & finite(new.optimizer) & finite(gradient)
    trained = finite(new.inner) & good
    # The same hyperparameters would diverge again: halve them.
    back = {n: w.raw(w.value(old.learned[n]) / 2) for n, w in wanted.items()}
    if comparison is not None:
        proven = {n: w.value(old.proven.learned[n]) for n, w in wanted.items()}
        back = _stepped_back(old.learned, proven, wanted, gradient, good)
    kept = choose(tuned, new.learned, old.learned)
    forgotten = jax.tree.map(jnp.zeros_like, new.sensitivity)
    rejected = jnp.where(tuned & trained, 0, 1).astype(jnp.int32)
    before = old.inner if old.fallback is None else choose(good & known, old.inner, old.fallback)
    state = replace(
        new,
        inner=choose(trained, new.inner, before),
        learned=choose(trained, kept, back),
        optimizer=choose(tuned & trained, new.optimizer, old.optimizer),
        sensitivity=choose(trained, new.sensitivity, forgotten),
        fallback=None if old.fallback is None else before,
        proven=None if comparison is None else _proven(old, comparison, good & known, trained),
        rejected=old.rejected + rejected,
    )
    return state, rejected


# --- losses of two models on the same clients ---------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proven:
    """Statistics of the models whose loss was observed to be good."""

    learned: dict[str, Any]  # the values that the last of them was trained with
    used: dict[str, Any]  # the values of the current model, whose loss is not known yet
    usual: jax.Array  # root mean square of how much rounds change the loss


def nothing_proven(learned: dict[str, Any]) -> Proven:
    """Return the statistics before the first round, whose initial values count as good."""
    return Proven(learned, learned, jnp.float32(0.0))


def got_worse(loss: jax.Array, found: Comparison, usual: jax.Array) -> jax.Array:
    """Return whether a model is significantly worse than the one before, or its loss not finite."""
    noticed = _noticed(found, usual)
    worse = found.difference > jnp.maximum(CLIENTS_DIFFER * found.error, ROUNDS_DIFFER * noticed)
    # With one client, in the first rounds, there is no estimate of chance yet.
    return ~jnp.isfinite(loss) | (worse & (noticed > 0))


def _noticed(found: Comparison, usual: jax.Array) -> jax.Array:
    return jnp.sqrt(usual**2 + found.spread**2)


def _proven(old: Any, found: Comparison, good: jax.Array, trained: jax.Array) -> Proven:
    was: Proven = old.proven
    # Clip the change: one large change must not make the next one look usual, as divergence grows.
    noticed, size = _noticed(found, was.usual), jnp.abs(found.difference)
    seen = jnp.where(noticed > 0, jnp.minimum(size, 2 * noticed), size)
    mixed = jnp.sqrt(MEMORY * was.usual**2 + (1 - MEMORY) * seen**2)
    # After an undone round, a model is compared with itself, which carries no information.
    tells = good & jnp.isfinite(size) & (size > 0)
    learned = choose(good, was.used, was.learned)
    used = choose(trained, old.learned, learned)
    return Proven(learned, used, jnp.where(tells, mixed, was.usual))


def _stepped_back(
    learned: dict[str, Any],
    proven: dict[str, Any],
    wanted: dict[str, Form],
    gradient: dict[str, Any],
    good: jax.Array,
) -> dict[str, Any]:
    """Return the learned values with the one to blame stepped back.

    It is halved, or set to the value that a good model was trained with if that is smaller. To
    blame is the hyperparameter whose step back would lower the loss most, according to its
    hypergradient. If no step back would, or the hypergradients are not finite, or the loss is not
    the problem, all of them are stepped back.
    """

    def lower(name: str, form: Form) -> Any:
        half, before = form.value(learned[name]) / 2, proven[name]
        return form.raw(jnp.where(jnp.abs(before) < jnp.abs(half), before, half))

    back = {name: lower(name, form) for name, form in wanted.items()}
    with promoting():
        gain = [jnp.sum(gradient[n] * (learned[n] - back[n])) for n in wanted]
        gains = jnp.array([g.astype(jnp.float32) for g in gain])
    told = jnp.all(jnp.isfinite(gains)) & (jnp.max(gains) > 0) & ~good
    blamed = jnp.arange(len(gain)) == jnp.argmax(gains)
    return {
        name: choose(blamed[i] | ~told, back[name], learned[name]) for i, name in enumerate(wanted)
    }


def finite(tree: Any) -> jax.Array:
    """Return whether all numbers of a tree are finite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in floats] or [True]))


def choose(condition: jax.Array, new: Any, old: Any) -> Any:
    """Return `new` where the condition holds, else `old`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def undone(old: Any, new: Any) -> tuple[Any, jax.Array]:
    """Return the new state, or the old one if a finite number became non-finite; and whether it is
    the new one. A state may contain non-finite numbers from the start."""
    floats = [
        jnp.all(jnp.isfinite(b) | ~jnp.isfinite(a))
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if jnp.issubdtype(jnp.result_type(b), jnp.inexact)
    ]
    good = jnp.all(jnp.array(floats or [True]))
    return choose(good, new, old), good
