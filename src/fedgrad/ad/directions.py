"""`jvp` and `vjp`: programs with one more argument, a direction to push forward or pull back."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.ad.derivative import like, pulled_back
from fedgrad.ad.rules import is_float, replaced
from fedgrad.ad.transforms import Argnums, Request, argument_names, floating, like_it
from fedgrad.core.arguments import read_inside
from fedgrad.core.errors import ArgumentError, known_arguments
from fedgrad.core.graph import Placement
from fedgrad.core.program import Program
from fedgrad.core.trace import struct


@known_arguments()
def jvp(program: Program, argnums: Argnums = 0) -> Program:
    """Return the program (*args, tangents) -> (y, dy): the derivative in one direction, by forward
    mode.

    If the program has default arguments, pass `tangents` by name.

    Args:
        program: The program to differentiate.
        argnums: The arguments to differentiate by, by position or name, all at one placement.
    """
    names, single = argument_names(program, argnums)
    plain = program.on(None)
    placements = {program.placements.get(name) for name in names}
    if len(placements) > 1:
        raise ArgumentError.here(
            f"fg.jvp by arguments at different placements: {names}. "
            "Differentiate by those of one placement at a time."
        )

    def run(bound: dict[str, Any], tangents: Any) -> Any:
        directions = [tangents] if single else list(tangents)
        wanted = [bound[name] for name in names]
        _check_like(directions, wanted, "fg.jvp", "tangents", "the argument")
        arguments = read_inside(plain, bound)
        moves = floating(arguments, names)
        primals = [jnp.asarray(arguments.leaves[i]) for i in moves]
        # It has the structure of the arguments, so its leaves are in the same order.
        moved = jax.tree.leaves(
            list({**bound, **dict(zip(names, directions, strict=True))}.values())
        )
        tangent = [_as(moved[i], x) for i, x in zip(moves, primals, strict=True)]

        def call(xs: list[Any]) -> Any:
            return plain.call(arguments.rebuild(replaced(arguments.leaves, moves, xs)))

        y, dy = jax.jvp(call, (primals,), (tangent,))
        return y, jax.tree.map(lambda a, b: like(a, b) if is_float(a) else b, y, dy)

    key = ("jvp", names, single)
    placement = next(iter(placements))
    made = program.once(key, lambda: _extended(plain, run, "jvp", "tangents", placement))
    return like_it(program, made)


@known_arguments()
def vjp(program: Program, argnums: Argnums = 0) -> Program:
    """Return the program (*args, cotangent) -> (y, dx): pulls back a cotangent, by reverse mode.

    If the program has default arguments, pass `cotangent` by name.

    Args:
        program: The program to differentiate.
        argnums: The arguments to differentiate by, by position or name.
    """
    names, single = argument_names(program, argnums)
    plain = program.on(None)
    request = Request(plain, names, single, "reverse")

    def run(bound: dict[str, Any], cotangent: Any) -> Any:
        arguments = read_inside(plain, bound)
        found = request.trace(arguments, nested=True)
        results = [struct(v) for v in found.graph.outputs]
        y = jax.tree.unflatten(found.tree, results)
        _check_like(cotangent, y, "fg.vjp", "cotangent", "the result")
        leaves = jax.tree.leaves(cotangent)
        cotangents = [_as(leaves[j], results[j]) for j in found.results]
        inputs = [jnp.asarray(x) for x in arguments.leaves]
        outputs, row = pulled_back(found, inputs, cotangents)
        return jax.tree.unflatten(found.tree, outputs), request.by_argument(row, arguments)

    key = ("vjp", names, single)
    made = program.once(key, lambda: _extended(plain, run, "vjp", "cotangent", None))
    return like_it(program, made)


def _extended(
    program: Program,
    run: Callable[[dict[str, Any], Any], Any],
    name: str,
    extra: str,
    placement: Placement | None,
) -> Program:
    """Return a program with one more argument at the end."""
    # After arguments with defaults it needs a default too; a missing one is detected when called.
    parameters = list(program.signature.parameters.values())
    optional = any(p.default is not p.empty for p in parameters)
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if any(p.kind not in (kind, inspect.Parameter.POSITIONAL_ONLY) for p in parameters):
        kind = inspect.Parameter.KEYWORD_ONLY
    default = None if optional else inspect.Parameter.empty
    if extra in program.signature.parameters:
        raise ArgumentError.here(f"fg.{name}: {program.name} has an argument called {extra!r}.")
    rest = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    parameters = [p for p in parameters if p not in rest]
    parameters += [inspect.Parameter(extra, kind, default=default), *rest]
    signature = inspect.Signature(parameters)

    def fun(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        direction = bound.arguments.pop(extra)
        if direction is None:
            raise ArgumentError.here(f"fg.{name} of {program.name}: pass {extra}=...")
        return run(dict(bound.arguments), direction)

    fun.__name__ = f"{name}({program.name})"
    fun.__signature__ = signature  # type: ignore[attr-defined]
    placements = dict(program.placements)
    if placement is not None:
        placements[extra] = placement
    return Program(fun, placements, derived=True)


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
    """Cast a (co)tangent to the dtype that JAX expects for `like`."""
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return jnp.zeros(like.shape, jax.dtypes.float0)
    return jnp.asarray(x, like.dtype)
