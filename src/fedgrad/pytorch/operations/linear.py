"""Matrix products and embeddings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedgrad.pytorch.operations.reductions import norm
from fedgrad.pytorch.operations.shapes import taken


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Apply an affine map to the last axis; the weight has one row per output."""
    out = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    return out if bias is None else out + bias


def _added(bias: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Any:
    product = a @ b
    return (bias if beta == 1 else beta * bias) + (product if alpha == 1 else alpha * product)


def rows(table: Any, indices: Any, padding_idx: int | None = -1) -> Any:
    """Look up one row per index, NaN where it is out of range; the padding row is never trained."""
    found = taken(table, indices, 0)
    if padding_idx is None or padding_idx < 0:
        return found
    return jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(found), found)


def _embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    _require_plain(scale_grad_by_freq)
    return rows(weight, indices, padding_idx)


def _require_plain(scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        raise NotImplementedError("scale_grad_by_freq=True, which counts words of a whole batch")


def _embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Any, ...]:
    """Return the sum, mean or maximum of the rows of each bag. `offsets` are the starts of the
    bags."""
    _require_plain(scale_grad_by_freq)
    bags = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    begins = jnp.zeros(indices.shape, jnp.int32).at[offsets[:bags]].add(1, mode="drop")
    bag = jnp.cumsum(begins) - 1
    found = rows(weight, indices, padding_idx)
    counted = jnp.ones(indices.shape, weight.dtype)
    if padding_idx is not None:
        counted = jnp.where(indices == padding_idx, 0, counted)
    if per_sample_weights is not None:
        found = found * per_sample_weights[:, None]
    if mode == 2:  # the maximum as a mean over the largest, so that ties share the gradient
        seen = jnp.where(counted[:, None] > 0, lax.stop_gradient(found), -jnp.inf)
        counted = seen == jax.ops.segment_max(seen, bag, bags)[bag]
        found = jnp.where(counted, found, 0)
    elif padding_idx is not None:
        found = found * counted[:, None]
    sums = jax.ops.segment_sum(found, bag, bags)
    if mode > 0:
        counts = jax.ops.segment_sum(counted.astype(sums.dtype), bag, bags)
        sums = sums / jnp.maximum(counts, 1).reshape(bags, -1)
    return (sums,)


def _bilinear(x: Any, y: Any, weight: Any, bias: Any = None) -> Any:
    out = jnp.einsum("...i,oij,...j->...o", x, weight, y)
    return out if bias is None else out + bias


def _similarity(x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    of_x, of_y = (norm(one, dim=dim, keepdim=True) for one in (x, y))
    # A length below eps counts as eps; its derivative is PyTorch's, that of the length itself.
    of_x, of_y = (n + lax.stop_gradient(jnp.maximum(n, eps) - n) for n in (of_x, of_y))
    return jnp.sum((x / of_x) * (y / of_y), dim)


def _distance(x: Any, y: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    return norm(x - y + eps, p, -1, keepdim)


def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """Compute direction times length, with one length per index along the axis `dim`."""
    others = [axis for axis in range(v.ndim) if axis != dim % v.ndim]
    return v * (g / norm(v, dim=others, keepdim=True))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "_weight_norm.default": _weight_norm,
    "addmm.default": _added,
    "baddbmm.default": _added,
    "bilinear.default": _bilinear,
    "bmm.default": jnp.matmul,
    "cosine_similarity.default": _similarity,
    "dot.default": jnp.matmul,
    "einsum.default": lambda equation, operands, path=None: jnp.einsum(equation, *operands),
    "embedding.default": _embedding,
    "embedding_bag.padding_idx": _embedding_bag,
    "linear.default": linear,
    "matmul.default": jnp.matmul,
    "mm.default": jnp.matmul,
    "mv.default": jnp.matmul,
    "outer.default": jnp.outer,
    "pairwise_distance.default": _distance,
    "vdot.default": jnp.vdot,
}

PRODUCTS = OPERATIONS.keys() - {
    *("_weight_norm.default", "cosine_similarity.default", "embedding_bag.padding_idx"),
    "pairwise_distance.default",
}
