"""Check that the model after a round depends on each learned hyperparameter."""

from collections.abc import Callable
from typing import Any

import jax

from fedgrad.core.errors import ArgumentError
from fedgrad.core.graph import CLIENTS
from fedgrad.core.primitives import Literal, make_jaxpr


def require_effect(
    name: str, model: Callable[[dict[str, Any]], Any], learned: dict[str, Any]
) -> None:
    """Refuse a hyperparameter whose hypergradient is identically zero.

    The check is structural: the `model` after a round has no derivative by the hyperparameter,
    whatever the numbers are. JAX decides this itself. In the linear map from tangents of the
    learned values to tangents of the model, with dead code removed, an unused tangent is an input
    that no equation reads. This holds through jit, scans, custom derivatives and communication, for
    any algorithm.
    """

    def moves_of_the_model(moves: dict[str, Any]) -> Any:
        return jax.linearize(model, learned)[1](moves)

    jaxpr = make_jaxpr(moves_of_the_model, (CLIENTS.name,), learned)[0].jaxpr
    read = [v for eqn in jaxpr.eqns for v in eqn.invars] + list(jaxpr.outvars)
    known = {v for v in read if not isinstance(v, Literal)}
    vain = [n for n, v in zip(sorted(learned), jaxpr.invars, strict=True) if v not in known]
    if vain:
        raise ArgumentError.here(
            f"self_tuning(..., learn=): the model that {name}() gives has no derivative by "
            f"{vain[0]!r}, so its hypergradient is always 0. Either {name}() does not use it: it "
            "is read in init only, kept for a later round, or learned by the algorithm itself. Or "
            "it is only rounded, compared, or under stop_gradient. Leave it out of learn=, or let "
            "the round compute with the hyperparameter that it is given."
        )
