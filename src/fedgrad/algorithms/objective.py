"""Losses: user-defined functions, evaluated exactly on clients of any size."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.clients.examples import Examples
from fedgrad.core.errors import ArgumentError, known_arguments, known_fields
from fedgrad.core.graph import CLIENTS, Placement
from fedgrad.core.lossless import require_lossless
from fedgrad.core.primitives import accumulator, wide
from fedgrad.core.program import broadcast
from fedgrad.core.signature import asks_for, left_to_pass
from fedgrad.core.types import Batch, Key, Params

Loss = Callable[..., Any]  # (params, batch) or (params, batch, key) -> one loss per example


@known_fields
@dataclass(frozen=True, eq=False)
class WithFixed:
    """A loss or a metric with fixed arrays that are not trained: `fg.with_fixed(...)`."""

    fun: Loss
    fixed: Any

    def __post_init__(self) -> None:
        signature = left_to_pass(self.fun)
        if "fixed" not in signature.parameters:
            name = getattr(self.fun, "__name__", repr(self.fun))
            raise ArgumentError.here(
                f"fg.with_fixed: {name}{signature} has no argument `fixed`. Write "
                f"def {name}(params, batch, fixed), which is given the arrays."
            )
        left = [p for n, p in signature.parameters.items() if n != "fixed"]
        object.__setattr__(self, "__signature__", signature.replace(parameters=left))
        object.__setattr__(self, "__name__", getattr(self.fun, "__name__", "loss"))

    def __call__(self, params: Params, batch: Batch, **more: Any) -> Any:
        """Return the value, with the fixed arrays passed in."""
        return self.fun(params, batch, fixed=self.fixed, **more)


# Hints for the error raised when this is passed to an algorithm or to training.
OF_THE_LOSS = {"fixed": "It belongs to the loss: fg.with_fixed(loss, fixed)."}


@known_arguments()
def with_fixed(fun: Loss, fixed: Any) -> WithFixed:
    """Return a loss or metric `fun(params, batch, fixed)` with its `fixed` arrays bound.

    The arrays (frozen weights, an embedding, class weights) are not part of the model: they are
    neither trained nor differentiated. The server sends them to the clients in every round, which a
    plan shows.

    Args:
        fun: A function `(params, batch, fixed)`, optionally with a `key`.
        fixed: A pytree of arrays.

    Returns:
        A loss `(params, batch)`.

    Raises:
        ArgumentError: If `fun` has no argument `fixed`, or a leaf is not an array.

    Example:

        fg.fed_avg(fg.with_fixed(loss, backbone))
    """
    require_lossless(fixed, "fg.with_fixed: the arrays")
    arrays = jax.tree.map(_fixed, fixed)
    return WithFixed(fun, arrays)


def _fixed(leaf: Any) -> jax.Array:
    try:
        return jax.lax.stop_gradient(jnp.asarray(leaf))
    except TypeError:
        raise ArgumentError.here(
            f"fg.with_fixed takes arrays, found {type(leaf).__name__}. Bind what is no array with "
            "functools.partial."
        ) from None


def sent(loss: Loss, at: Placement = CLIENTS) -> Loss:
    """Return the loss for clients, with its fixed arrays broadcast to them."""
    return _with(loss, broadcast(loss.fixed, at)) if isinstance(loss, WithFixed) else loss


def _with(loss: Loss, fixed: Any) -> Loss:
    return replace(loss, fixed=fixed) if isinstance(loss, WithFixed) else loss


def require_loss(loss: Any) -> None:
    """Refuse anything but a function of a model and a batch."""
    wanted = "loss= takes a function (params, batch) that gives one loss per example"
    if not callable(loss):
        raise ArgumentError.here(f"{wanted}, got {type(loss).__name__}.")
    try:
        signature = left_to_pass(loss)
    except ValueError:  # written in C, without a signature
        return
    try:
        signature.bind(None, None, **({"key": None} if takes_key(loss) else {}))
    except TypeError:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ArgumentError.here(
            f"{wanted}, got {name}{signature}. A third argument is called `key`, for a random one; "
            "arrays that it reads are given by fg.with_fixed(loss, arrays)."
        ) from None


def takes_key(loss: Loss) -> bool:
    """Return whether a loss is random (dropout, say): it has an unbound argument `key`."""
    return asks_for(loss, "key")


def per_example(loss: Loss, params: Params, batch: Batch, key: Key | None = None) -> jax.Array:
    """Return one loss per example; a loss that returns one number is called for one at a time."""
    rows = {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(batch)}
    size = rows.pop()
    keyed = {"key": key} if takes_key(loss) else {}
    result = jax.eval_shape(loss, params, batch, **keyed)
    shape = getattr(result, "shape", None)
    if shape == (size,):
        return loss(params, batch, **keyed)
    if shape != ():
        raise ArgumentError.here(
            f"The loss {getattr(loss, '__name__', loss)!r} gives {result} on a batch of {size} "
            f"examples. Return one number per example, shape ({size},), or one number."
        )
    one = jax.tree.map(lambda leaf: leaf[:, None], batch)
    if key is None or not keyed:
        return jax.vmap(lambda row: loss(params, row))(one)
    return jax.vmap(lambda row, k: loss(params, row, key=k))(one, jax.random.split(key, size))


def batch_loss(
    loss: Loss, params: Params, batch: Batch, mask: jax.Array, key: Key | None = None
) -> jax.Array:
    """Return the mean loss over the examples of a batch that are not padding."""
    total = _sum(per_example(loss, params, batch, key), mask)
    return total / jnp.maximum(jnp.sum(mask), 1).astype(total.dtype)


def _sum(losses: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum the losses that are not padding; a float16 sum would overflow at 65,520."""
    return jnp.sum(jnp.where(mask, losses, 0).astype(wide(losses.dtype)))


def client_loss(
    loss: Loss, batch_size: int, params: Params, examples: Examples, key: Key | None = None
) -> jax.Array:
    """Return the mean loss of a client, batch by batch, differentiable by `params`.

    The derivative is defined explicitly as a loop of gradients, which ends with this client's last
    batch and stores nothing, instead of the gradient of a loop. A random loss gets a new key for
    every batch, derived from `key`; without one, the same keys each time. A client without examples
    (too few to hold one out) has a loss of 0.
    """

    def total(
        params: Params, batch: Batch, mask: jax.Array, key: Key, i: jax.Array, fixed: Any
    ) -> jax.Array:
        fresh = jax.random.fold_in(key, i) if takes_key(loss) else None
        return _sum(per_example(_with(loss, fixed), params, batch, fresh), mask)

    def summed(fun: Callable[..., Any], like: Any, primals: Any) -> Any:
        params, examples, key, fixed = primals

        def step(carry: Any, batch: Batch, mask: jax.Array) -> Any:
            i, sums = carry
            new = fun(params, batch, mask, key, i, fixed)
            return i + 1, jax.tree.map(lambda s, x: s + x.astype(s.dtype), sums, new)

        zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), accumulator(x)), like)
        return examples.fold(step, (jnp.int32(0), zeros), batch_size)[1]

    @jax.custom_jvp
    def mean(params: Params, examples: Examples, key: Key, fixed: Any) -> jax.Array:
        sums = summed(total, _zero(params), (params, examples, key, fixed))
        return sums / jnp.maximum(examples.count, 1).astype(sums.dtype)

    @functools.partial(mean.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        like = (_zero(primals[0]), primals[0])
        sums, gradients = summed(jax.value_and_grad(total), like, primals)
        count = jnp.maximum(primals[1].count, 1).astype(sums.dtype)
        slope = jnp.zeros((), sums.dtype)
        moves = jax.tree.leaves(tangents[0], is_leaf=_is_zero)
        for g, t in zip(jax.tree.leaves(gradients), moves, strict=True):
            if not _is_zero(t):
                slope = slope + jnp.sum(g * t.astype(g.dtype)).astype(sums.dtype)
        return sums / count, slope / count

    # Broadcast arrays are passed as arguments: values captured by a derivative cannot be placed.
    fixed = loss.fixed if isinstance(loss, WithFixed) else None
    return mean(params, examples, jax.random.key(0) if key is None else key, fixed)


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _zero(params: Params) -> jax.Array:
    return jnp.zeros((), accumulator(params))
