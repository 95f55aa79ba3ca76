"""The two primitives of federated computation and all of their rules.

A federated program is traced as *one* client and the server see it, so both primitives keep the
shape: `fed_broadcast` carries a server value to the client, `fed_sum` carries the client's value
into the sum over all clients. Each is linear and each is the transpose of the other; forward- and
reverse-mode federated AD follow from that alone.

This is the only file that touches `jax.interpreters` and `jax.extend`.
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, jaxprs_in_params
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import ad, batching, mlir, partial_eval

from fedgrad.core.notebook import place

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Primitive", "jax_primitives"]

broadcast_p = Primitive("fed_broadcast")  # x@server -> x@placement
sum_p = Primitive("fed_sum")  # x@placement -> (sum over clients of x)@server
round_p = Primitive("fed_round")  # in plans: broadcasts, client stages and sums, all in one

for _primitive, _transpose in ((broadcast_p, sum_p), (sum_p, broadcast_p)):
    _primitive.def_abstract_eval(lambda x, *, placement: x)
    ad.deflinear2(  # the JVP of a linear map is itself; its transpose is the other primitive
        _primitive,
        lambda ct, _, *, placement, transpose=_transpose: [transpose.bind(ct, placement=placement)],
    )
    batching.defvectorized(_primitive)

# --- A client that may not count --------------------------------------------------------------
# Two linear maps at one client, which send nothing; `counts` has the leading axes of `x` (none,
# but for those that vmap adds). They are how a client is left out of a mean and of its
# derivatives. counted: x, but zero where it is not finite and does not count; and so for its
# (co)tangents source: x as it is; its cotangents are counted `seen`: what the value is computed
# from has been made sources (uncounted.py).

counted_p = Primitive("counted")
source_p = Primitive("source")


def _counted(x: Any, counts: Any, *, seen: bool = True) -> Any:
    counts = jnp.expand_dims(counts, range(counts.ndim, x.ndim))
    return jnp.where(counts | jnp.isfinite(x), x, jnp.zeros_like(x))


def _counts_batched(primitive: Primitive, values: Any, axes: Any, **params: Any) -> Any:
    (x, counts), (of_x, of_counts) = values, axes
    size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
    x = batching.bdim_at_front(x, of_x, size)
    if of_counts is not None:
        counts = jnp.moveaxis(counts, of_counts, 0)
    elif counts.ndim:
        counts = jnp.broadcast_to(counts, (size, *counts.shape))
    return primitive.bind(x, counts, **params), 0


def _counts_jvp(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
    (x, counts), (dx, _) = primals, tangents
    y = primitive.bind(x, counts, **params)
    return y, dx if type(dx) is ad.Zero else primitive.bind(dx, counts, **params)


def _counts_transposed(ct: Any, x: Any, counts: Any, **params: Any) -> Any:
    return [ct if type(ct) is ad.Zero else counted_p.bind(ct, counts, seen=True), None]


for _primitive, _value in ((counted_p, _counted), (source_p, lambda x, counts: x)):
    _primitive.def_impl(_value)
    _primitive.def_abstract_eval(lambda x, counts, **params: x)
    ad.primitive_jvps[_primitive] = functools.partial(_counts_jvp, _primitive)
    ad.primitive_transposes[_primitive] = _counts_transposed
    batching.primitive_batchers[_primitive] = functools.partial(_counts_batched, _primitive)
    mlir.register_lowering(_primitive, mlir.lower_fun(_value, multiple_results=False))

# Errors point at the user's line, not at ours.
source_info_util.register_exclusion(os.path.dirname(os.path.dirname(__file__)) + os.sep)


# --- Being inside a program -------------------------------------------------------------------
# While a program is traced, each of its placements is a named axis of JAX. JAX keeps named axes
# with its own trace state: per thread, and part of the key of every jit cache. So a function
# jitted by the user can never be taken from a cache that was filled outside of the program, and
# we need no state of our own.


def _axis(placement: str) -> str:
    return f"fedgrad:{placement}"


def inside(placement: str = "") -> bool:
    """Whether this code is being traced in a program (that has this placement)."""
    try:
        jax.lax.axis_size(_axis(placement))
    except NameError:
        return False
    return True


def make_jaxpr(fun: Any, placements: Sequence[str], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """Trace one client's view of a program and remove dead code; return the output structure,
    too."""
    axes = [(_axis(name), 1) for name in ("", *placements)]
    closed, shape = jax.make_jaxpr(fun, axis_env=axes, return_shape=True)(*args)  # type: ignore[misc]
    return without_dead_code(closed), shape


def client_index(placement: str) -> jax.Array:
    """Return the index of this client: an integer at the client, known without being sent."""
    return jax.lax.axis_index(_axis(placement))


def without_dead_code(closed: ClosedJaxpr) -> ClosedJaxpr:
    jaxpr, _ = partial_eval.dce_jaxpr(
        closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True
    )
    return ClosedJaxpr(jaxpr, closed.consts)


def alone(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return an equation as a jaxpr of its inputs."""
    avals: list[Any] = [v.aval for v in eqn.invars]
    return jax.make_jaxpr(lambda *values: bind(eqn.primitive, eqn.params, values))(
        *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    )


def part(closed: ClosedJaxpr, wanted: Sequence[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Return a jaxpr with only some of its outputs, and which inputs these need."""
    jaxpr, consts, used = partial_eval.dce_jaxpr_consts(closed.jaxpr, list(wanted))
    return ClosedJaxpr(jaxpr, [c for c, u in zip(closed.consts, consts, strict=True) if u]), used


# --- Dtypes -----------------------------------------------------------------------------------
# These do not depend on whether the user lets JAX promote dtypes.


def promoting() -> contextlib.AbstractContextManager[None]:
    """Let JAX promote dtypes: for other libraries' code that relies on it (optax multiplies a
    float32 by a float64 rate), or for results that are cast at once."""
    return jax.numpy_dtype_promotion("standard")


def common(*arrays: Any) -> Any:
    """Return the dtype that holds all of these."""
    with promoting():
        return jnp.result_type(*arrays)


def wide(dtype: Any) -> Any:
    """Return the dtype in which a sum over clients is accumulated: no float narrower than
    float32."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if narrow else dtype


def accumulator(tree: Any) -> Any:
    """Return the dtype for accumulating many numbers like these: none narrower than float32."""
    return common(jnp.float32, *jax.tree.leaves(tree))


# --- Reading jaxprs ---------------------------------------------------------------------------

# Calls: an equation that only wraps a jaxpr, by the name of the parameter that holds it.
CALLS = {
    jax_primitives.jit_p: "jaxpr",
    jax_primitives.remat_p: "jaxpr",
    jax_primitives.closed_call_p: "call_jaxpr",
    jax_primitives.call_p: "call_jaxpr",
    jax_primitives.custom_jvp_call_p: "call_jaxpr",
    jax_primitives.custom_vjp_call_p: "call_jaxpr",
}
CUSTOM_DERIVATIVES = (jax_primitives.custom_jvp_call_p, jax_primitives.custom_vjp_call_p)


def inner_jaxprs(params: dict[str, Any]) -> list[Jaxpr]:
    return list(jaxprs_in_params(params))


def primitives_inside(params: dict[str, Any]) -> set[Primitive]:
    return {p for jaxpr in inner_jaxprs(params) for p in primitives_of(jaxpr.eqns)}


def primitives_of(equations: Iterable[Any]) -> set[Primitive]:
    """Return the primitives of equations, including nested ones."""
    found: set[Primitive] = set()
    for eqn in equations:
        found |= {eqn.primitive, *primitives_inside(eqn.params)}
    return found


def communicates(params: dict[str, Any]) -> bool:
    """Whether the jaxprs of an equation contain communication."""
    return not primitives_inside(params).isdisjoint((broadcast_p, sum_p))


def inner_constants(params: dict[str, Any]) -> list[Any]:
    """Return the arrays that the jaxprs inside an equation have captured."""
    found: list[Any] = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found += item.consts
    for jaxpr in inner_jaxprs(params):
        for eqn in jaxpr.eqns:
            found += inner_constants(eqn.params)
    return found


def closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def index_placement(primitive: Primitive, params: dict[str, Any]) -> str | None:
    """Return the placement whose client index this equation asks for, or None."""
    name = params.get("axis_name")
    if primitive is jax_primitives.axis_index_p and isinstance(name, str):
        if name.startswith("fedgrad:"):
            return name.removeprefix("fedgrad:")
    return None


def foreign_axis(primitive: Primitive, params: dict[str, Any]) -> bool:
    """Whether the equation communicates over our axes other than through the two primitives."""
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    ours = any(isinstance(a, str) and a.startswith("fedgrad:") for a in axes)
    return ours and index_placement(primitive, params) is None


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether the equation has effects. Asking for the client's index has none, although JAX
    records the use of a named axis as an effect."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def bind(primitive: Primitive, params: dict[str, Any], values: Sequence[Any]) -> list[Any]:
    """Apply one equation to values."""
    out = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def interpret(
    jaxpr: ClosedJaxpr,
    inputs: Sequence[Any],
    step: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Evaluate a jaxpr, with `step` in place of each of its equations."""
    env = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    env.update(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.jaxpr.eqns:
        with at_source(eqn.source_info):
            outputs = step(eqn, [value(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [value(v) for v in jaxpr.jaxpr.outvars]


NOWHERE = "somewhere in a library"
MEAN = "fg.mean"  # the scope of its operations on sums, for readers


def position(*sources: Any) -> tuple[str, str, str]:
    """Return file, line and function of the user's code that made an equation, empty if unknown: of
    the first source that has them, from the inside out (JAX forgets the caller of a loop's
    body)."""
    for source in sources:
        text = source_info_util.summarize(source)
        head, _, function = text.partition(" (")
        path, _, line = head.rpartition(":")[0].rpartition(":")
        if path:
            return path, line, function.removesuffix(")")
    return "", "", ""


def where(*sources: Any) -> str:
    """Format the position of the user's code that made an equation: `file.py:41 (function)`."""
    path, line, function = position(*sources)
    if not path:
        return NOWHERE
    return place(path, line) + (f" ({function})" if function else "")


def current_source() -> Any:
    """Return the source to which equations made now are attributed."""
    return source_info_util.current()


@contextlib.contextmanager
def at_source(source: Any) -> Iterator[None]:
    """Attribute equations made here to the user's line `source`, if known, and to its scope
    (`jax.named_scope`)."""
    if source is None:
        yield
        return
    names = source_info_util.current().name_stack + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=names):
        yield


def scope(source: Any) -> str:
    """Return the innermost `jax.named_scope` of an equation, or ""."""
    names = re.sub(r"\w+\(|\)", "", str(source.name_stack)) if source is not None else ""
    return next(filter(None, reversed(names.split("/"))), "")
