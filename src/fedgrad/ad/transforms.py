"""`grad`, `value_and_grad`, `jacobian`, `jvp`, `vjp`: each takes a program and gives a program.

    grad: (x@server -> y@server) -> (x@server -> dy/dx@server)

What is differentiated may also be at clients; then the derivative is there too, and stays there.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedgrad.ad.planner import CostModel
from fedgrad.ad.request import Argnums, Request, argument_names, is_float
from fedgrad.core.errors import ArgumentError
from fedgrad.core.placement import Placement
from fedgrad.core.program import Program

Mode = Literal["auto", "forward", "reverse", "mixed"]


def grad(
    program: Program,
    argnums: Argnums = 0,
    mode: Mode = "auto",
    cost: CostModel | None = None,
    has_aux: bool = False,
    recompute: bool = False,
) -> Program:
    """The gradient of a program whose result is one number at the server, as a program.

    `argnums`: which arguments, by position or name. `mode`: "forward", "reverse", "mixed", or
    "auto" for the cheapest mix of them by `cost`. `has_aux`: the program returns (y, aux), the
    gradient (dy, aux). `recompute`: in reverse mode, clients are sent again what they would
    otherwise have to remember. Leaves that are not floating get None.
    """
    options = (mode, cost, has_aux, recompute)
    return _derived("grad", program, argnums, *options, lambda y, d: d)


def value_and_grad(
    program: Program,
    argnums: Argnums = 0,
    mode: Mode = "auto",
    cost: CostModel | None = None,
    has_aux: bool = False,
    recompute: bool = False,
) -> Program:
    """Like `fg.grad`, and the value: (y, dy), or ((y, aux), dy) with `has_aux`."""
    options = (mode, cost, has_aux, recompute)
    return _derived("value_and_grad", program, argnums, *options, lambda y, d: (y, d))


def jacobian(
    program: Program,
    argnums: Argnums = 0,
    mode: Mode = "auto",
    cost: CostModel | None = None,
    has_aux: bool = False,
    recompute: bool = False,
) -> Program:
    """The Jacobian of a program, in the form of `jax.jacobian`: the tree of the result, with the
    tree of the argument at each leaf."""
    options = (mode, cost, has_aux, recompute)
    return _derived("jacobian", program, argnums, *options, lambda y, d: d)


def _derived(
    name: str,
    program: Program,
    argnums: Argnums,
    mode: str,
    cost: CostModel | None,
    has_aux: bool,
    recompute: bool,
    pack: Callable[[Any, Any], Any],
) -> Program:
    """The derivative as a program; the same object if the same is asked for again."""
    names, single = argument_names(program, argnums)
    scalar = name != "jacobian"
    request = Request(program, names, single, mode, cost, has_aux, scalar)

    def fun(*args: Any, **kwargs: Any) -> Any:
        (y, aux), d = request.run(args, kwargs)
        if not has_aux:
            return pack(y, d)
        return ((y, aux), d) if name == "value_and_grad" else (pack(y, d), aux)

    def make() -> Program:
        fun.__name__ = f"{name}({program.name})"
        return Program(
            fun,
            dict(program.placements),
            program.executor,
            recompute or program.recompute,
            request.choice,
            program.signature,
        )

    key = (name, names, single, mode, cost, has_aux, recompute, program.executor)
    return program.once(key, make)


def jvp(program: Program, argnums: Argnums = 0) -> Program:
    """(*args, tangents) -> (y, dy): the derivative in one direction, by pushing it forward."""
    names, single = argument_names(program, argnums)

    def fun(*args: Any) -> Any:
        *args, tangents = args  # type: ignore[assignment]
        bound = program.bind(tuple(args), {})
        wanted = [bound[name] for name in names]
        directions = [tangents] if single else list(tangents)
        _check_like(directions, wanted, "fg.jvp", "tangents", "the argument")
        flat, tree = jax.tree.flatten(wanted)
        moves = [i for i, x in enumerate(flat) if is_float(x)]
        tangent_leaves = jax.tree.leaves(directions)

        def of_floats(xs: list[Any]) -> Any:
            full = list(flat)
            for i, x in zip(moves, xs, strict=True):
                full[i] = x
            replaced = dict(zip(names, jax.tree.unflatten(tree, full), strict=True))
            return program.call({**bound, **replaced})

        primals = [jnp.asarray(flat[i]) for i in moves]
        return jax.jvp(
            of_floats,
            (primals,),
            ([_as(tangent_leaves[i], x) for i, x in zip(moves, primals, strict=True)],),
        )

    placements = {program.placements.get(name) for name in names}
    if len(placements) > 1:
        raise ArgumentError.here(
            f"fg.jvp by arguments at different placements: {names}. "
            "Differentiate by those of one placement at a time."
        )
    return _extended(program, fun, "jvp", "tangents", placements.pop())


def vjp(program: Program, argnums: Argnums = 0, recompute: bool = False) -> Program:
    """(*args, cotangent) -> (y, dx): pulls a cotangent of the result back, in reverse mode."""
    names, single = argument_names(program, argnums)

    def fun(*args: Any) -> Any:
        *args, cotangent = args  # type: ignore[assignment]
        bound = program.bind(tuple(args), {})
        flat, tree = jax.tree.flatten([bound[name] for name in names])
        moves = [i for i, x in enumerate(flat) if is_float(x)]

        def of_floats(xs: list[Any]) -> Any:
            full = list(flat)
            for i, x in zip(moves, xs, strict=True):
                full[i] = x
            replaced = dict(zip(names, jax.tree.unflatten(tree, full), strict=True))
            return program.call({**bound, **replaced})

        y, pull = jax.vjp(of_floats, [jnp.asarray(flat[i]) for i in moves])
        _check_like(cotangent, y, "fg.vjp", "cotangent", "the result")
        (pulled,) = pull(jax.tree.map(_as, cotangent, y))
        gradient: list[Any] = [None] * len(flat)
        for i, x in zip(moves, pulled, strict=True):
            gradient[i] = x
        trees = jax.tree.unflatten(tree, gradient)
        return y, (trees[0] if single else tuple(trees))

    return _extended(program, fun, "vjp", "cotangent", None, recompute)


def _extended(
    program: Program,
    fun: Callable[..., Any],
    name: str,
    extra: str,
    placement: Placement | None,
    recompute: bool = False,
) -> Program:
    """A program with one more argument at the end."""
    fun.__name__ = f"{name}({program.name})"
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(p, kind) for p in (*program.signature.parameters, extra)]
    placements = dict(program.placements)
    if placement is not None:
        placements[extra] = placement
    return Program(
        fun,
        placements,
        program.executor,
        recompute or program.recompute,
        None,
        inspect.Signature(parameters),
    )


def _check_like(found: Any, wanted: Any, where: str, what: str, like: str) -> None:
    a, b = jax.tree.structure(found), jax.tree.structure(wanted)
    shapes = [jnp.shape(x) for x in jax.tree.leaves(found)]
    expected = [jnp.shape(x) for x in jax.tree.leaves(wanted)]
    if str(a) != str(b) or shapes != expected:
        raise ArgumentError.here(
            f"{where}: the {what} must look like {like}: expected {b} with shapes "
            f"{expected}, got {a} with shapes {shapes}."
        )


def _as(x: Any, like: Any) -> Any:
    """A (co)tangent of the dtype that JAX wants for `like`."""
    like = jnp.asarray(like)
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return jnp.zeros(like.shape, jax.dtypes.float0)
    return jnp.asarray(x, like.dtype)
