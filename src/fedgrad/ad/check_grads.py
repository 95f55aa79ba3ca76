"""Checks derivatives against finite differences, independently of all differentiation rules."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.ad.rules import MODES, Mode, differentiable, is_float
from fedgrad.ad.transforms import Argnums, argument_names, grad
from fedgrad.core.errors import ArgumentError, FederatedError, PlanError, known_arguments
from fedgrad.core.graph import is_client
from fedgrad.core.program import Program
from fedgrad.core.trace import struct
from fedgrad.planning.plan import plan


class GradientError(FederatedError, AssertionError):
    """A derivative disagrees with finite differences."""


@known_arguments()
def check_grads(
    program: Program,
    args: Sequence[Any],
    argnums: Argnums = 0,
    modes: Sequence[Mode] = tuple(MODES),
    tolerance: float | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Compare the derivative of a program with finite differences, in every mode that it supports.

    The derivative of the result in a random direction, with respect to each argument, is compared
    with a central difference of the program itself. Modes that the program does not support are
    left out.

    Args:
        program: A program whose floating results are at the server.
        args: Its arguments.
        argnums: The arguments with respect to which it is differentiated, by position or name.
        modes: The modes to check.
        tolerance: The largest relative error; by default as small as the dtype allows. Use float64
            to detect more than errors in the first digits.
        seed: The seed of the random direction.

    Returns:
        The relative error of each mode.

    Raises:
        GradientError: A relative error is above `tolerance`.
    """
    names, _ = argument_names(program, argnums)
    bound = program.bind(tuple(args), {})
    key = jax.random.key(seed)
    results = [v for v in plan(program, *args).graph.outputs if differentiable(v)]
    if not results or any(is_client(v.at) for v in results):
        kind = "at clients" if results else "not floating"
        raise ArgumentError.here(
            f"fg.check_grads of {program.name}, which returns what is {kind}. It checks floating "
            "results at the server: return fg.mean(...) or fg.sum(...) of what clients have."
        )
    weights = jax.tree.leaves(_random(key, [struct(v) for v in results]))
    number = _weighted(program, weights)
    moves = {n: _random(jax.random.fold_in(key, i + 1), bound[n]) for i, n in enumerate(names)}
    leaves = [x for x in jax.tree.leaves([bound[n] for n in names]) if is_float(x)]
    precise = all(jnp.finfo(jnp.result_type(x)).bits >= 64 for x in leaves)
    step, allowed = (1e-6, 1e-6) if precise else (1e-2, 5e-2)
    allowed = allowed if tolerance is None else tolerance

    def at(t: float) -> float:
        moved = {n: jax.tree.map(lambda x, v: _moved(x, v, t), bound[n], moves[n]) for n in names}
        return float(number.by_name({**bound, **moved}))

    expected = (at(step) - at(-step)) / (2 * step)
    errors: dict[str, float] = {}
    problems: dict[str, str] = {}
    for mode in modes:
        try:
            slopes = grad(number, names, mode).by_name(bound)
        except PlanError as error:
            problems[mode] = str(error)
            continue
        directions = [v for v in jax.tree.leaves([moves[n] for n in names]) if is_float(v)]
        pairs = zip(jax.tree.leaves(slopes), directions, strict=True)
        found = sum(float(np.vdot(np.asarray(d).real, np.asarray(v).real)) for d, v in pairs)
        errors[mode] = abs(found - expected) / max(abs(expected), 1.0)
        if not errors[mode] <= allowed:
            raise GradientError.here(
                f"{program.name}: by {', '.join(names)}, mode {mode!r} gives {found:.8g} in a "
                f"random direction where finite differences give {expected:.8g}: a relative error "
                f"of {errors[mode]:.1e}, more than {allowed:.0e}."
            )
    if not errors:
        reasons = " ".join(f"{mode}: {why}" for mode, why in problems.items())
        raise ArgumentError.here(f"{program.name} has a derivative in none of {modes}. {reasons}")
    return errors


def _weighted(program: Program, weights: list[Any]) -> Program:
    """Return the program with its result reduced to one number, a randomly weighted sum."""

    def fun(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves(program.fun(*args, **kwargs))
        floats = [x for x in leaves if is_float(x)]
        return sum(
            (jnp.sum(jnp.real(x) * w) for x, w in zip(floats, weights, strict=True)), start=0.0
        )

    fun.__name__ = program.name
    fun.__signature__ = program.signature  # type: ignore[attr-defined]
    return Program(fun, dict(program.placements), program.executor)


def _random(key: jax.Array, tree: Any) -> Any:
    """Return a random direction for every floating leaf; 0 for the others."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure,
        [
            jax.random.normal(jax.random.fold_in(key, i), x.shape, jnp.finfo(x.dtype).dtype)
            if is_float(x)
            else 0
            for i, x in enumerate(map(_struct, leaves))
        ],
    )


def _struct(x: Any) -> Any:
    return jax.eval_shape(lambda: jnp.asarray(x)) if not hasattr(x, "dtype") else x


def _moved(x: Any, direction: Any, t: float) -> Any:
    return jnp.asarray(x) + t * direction if is_float(x) else x
