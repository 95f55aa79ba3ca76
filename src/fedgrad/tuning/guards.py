"""What keeps self-tuning from running away: a step can be refused, a round be undone."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms.parametrization import Form
from fedgrad.core.primitives import promoting
from fedgrad.tuning.gradient_cohort import Comparison

# A model is worse if, on the same clients, its loss is above that of the one before by more than
# which clients were asked explains: so many standard errors of the mean difference. But also by
# more than anybody would notice, so many times: rounds change the loss for the worse, too, because
# of who trains in them; and what is within the standard error of the loss itself harms nobody.
CLIENTS_DIFFER, ROUNDS_DIFFER = 2.0, 5.0
MEMORY = 0.9  # of how much rounds change the loss, from one to the next


def guarded(
    old: Any,
    new: Any,
    wanted: dict[str, Form],
    gradient: dict[str, Any],
    known: jax.Array,
    good: jax.Array,
    comparison: Comparison | None = None,
) -> tuple[Any, jax.Array]:
    """The new state of self-tuning without what has run away, and whether something has.

    `good` tells whether the loss is: that of the new model (serial) or of the old one (parallel,
    which therefore keeps the model before that one to go back to); true where it is not `known`,
    because nobody had an example to judge by. With a `comparison`, what is to
    blame for a loss that is not good is stepped back alone, as far as that can be told.
    """
    # An infinite gradient would be projected onto a bound, which is finite.
    tuned = finite(new.learned) & finite(new.optimizer) & finite(gradient)
    trained = finite(new.inner) & good
    # The same hyperparameters would lead there again: halve them.
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
    """What is known of models whose loss was seen to be good."""

    learned: dict[str, Any]  # what the last of them was trained with
    used: dict[str, Any]  # what the present one was trained with, whose loss is not seen yet
    usual: jax.Array  # how much rounds change the loss, as a root mean square


def nothing_proven(learned: dict[str, Any]) -> Proven:
    """Before the first round: what it begins with has to be good."""
    return Proven(learned, learned, jnp.float32(0.0))


def got_worse(loss: jax.Array, found: Comparison, usual: jax.Array) -> jax.Array:
    """Whether a model is worse than the one it is compared with by more than chance explains, or
    its loss not finite."""
    noticed = _noticed(found, usual)
    worse = found.difference > jnp.maximum(CLIENTS_DIFFER * found.error, ROUNDS_DIFFER * noticed)
    # One client, in the first rounds: nothing is known of chance yet.
    return ~jnp.isfinite(loss) | (worse & (noticed > 0))


def _noticed(found: Comparison, usual: jax.Array) -> jax.Array:
    return jnp.sqrt(usual**2 + found.spread**2)


def _proven(old: Any, found: Comparison, good: jax.Array, trained: jax.Array) -> Proven:
    was: Proven = old.proven
    # One large change must not make the next one look usual: what runs away, grows.
    noticed, size = _noticed(found, was.usual), jnp.abs(found.difference)
    seen = jnp.where(noticed > 0, jnp.minimum(size, 2 * noticed), size)
    mixed = jnp.sqrt(MEMORY * was.usual**2 + (1 - MEMORY) * seen**2)
    # After a round that was undone a model is compared with itself, which tells nothing.
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
    """What is learned, with what is to blame stepped back: to half, or to what a good model was
    trained with if that is less. To blame is whose step back would lower the loss most, by its
    hypergradient; if none would, or that is not finite, or the loss is not what is wrong: all.
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
    """Whether all numbers of a tree are."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in floats] or [True]))


def choose(condition: jax.Array, new: Any, old: Any) -> Any:
    """One tree or the other."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def undone(old: Any, new: Any) -> tuple[Any, jax.Array]:
    """The new state, or the old one if a number that was finite is not any more; and whether it is
    the new one. A state may hold others from the beginning on."""
    floats = [
        jnp.all(jnp.isfinite(b) | ~jnp.isfinite(a))
        for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if jnp.issubdtype(jnp.result_type(b), jnp.inexact)
    ]
    good = jnp.all(jnp.array(floats or [True]))
    return choose(good, new, old), good
