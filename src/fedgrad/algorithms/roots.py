"""Derivatives of optimizers at the square root of 0.

An optimizer takes square roots of accumulated squares: of a distance, of gradients, of moments. If
such a sum is 0, none of its terms has moved yet, so the root does not move either. JAX computes 0 *
infinity there, which is NaN: in the first round of DoG and of Mechanic, and of Adam wherever a
parameter has no gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.evaluate import Rules, run
from fedgrad.core.primitives import jax_primitives


def with_roots_of_zero(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, in which the square root of 0 has the derivative 0."""

    def smooth(*args: Any, **kwargs: Any) -> Any:
        flat, tree = jax.tree.flatten((args, kwargs))

        def step(*leaves: Any) -> Any:  # the name that a plan shows
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return fun(*args, **kwargs)

        jaxpr, shape = jax.make_jaxpr(step, return_shape=True)(*flat)
        return jax.tree.unflatten(jax.tree.structure(shape), run(jaxpr, flat, ROOTS))

    return smooth


@jax.custom_jvp
def root(x: jax.Array) -> jax.Array:
    """Return the square root, with derivative 0 at 0."""
    return jnp.sqrt(x)


@root.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (move,) = primals, tangents
    found = root(x)
    slope = jnp.where(x == 0, 0, 0.5 / jnp.where(x == 0, 1, found))
    return found, move * slope


def _root(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    return [root(inputs[0])]


ROOTS: Rules = {jax_primitives.sqrt_p: _root}
