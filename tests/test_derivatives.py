"""Derivatives of every program of the table, in every mode, are those of plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from programs import TABLE, Case

N = 3
AGAIN = fg.CostModel(readdress=True)
MODES = {
    "forward": {"mode": "forward"},
    "reverse": {"mode": "reverse"},
    "mixed": {"mode": "mixed"},
    "auto": {"mode": "auto"},
    "auto_again": {"mode": "auto", "cost": AGAIN},
}
EXECUTORS = {
    "local": fg.executors.local(),
    "chunked": fg.executors.local(chunk=2),
    "reference": fg.executors.reference(),
}
every_case = pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
every_mode = pytest.mark.parametrize("mode", MODES)

# What JAX itself cannot do, and so the mode cannot: (program, mode).
PUSHES_CUSTOM_VJP = {"custom_vjp_inside", "custom_vjp_around"}


def possible(case, mode):
    if mode == "reverse":
        return case.reverse
    return not (mode == "forward" and case.name in PUSHES_CUSTOM_VJP)


def assert_close(found, wanted, rtol=1e-12):
    """Equal trees; the largest difference is small against the largest entry of each leaf."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b))
        a, b = np.asarray(a), np.asarray(b)
        assert np.isfinite(a).all()
        assert np.abs(a - b).max(initial=0) <= rtol * max(1.0, np.abs(b).max(initial=0))


# --- every program x every mode x every executor ------------------------------------------------


@functools.cache
def arguments(case: Case):
    return case.args(N)


@functools.cache
def scalar(case: Case) -> fg.Program:
    """The program, or one that makes a number of all that it returns, also of what is at clients."""
    if case.scalar:
        return case.program
    at = next(iter(case.program.placements.values()))

    def total(*args):
        parts = []
        for i, leaf in enumerate(jax.tree.leaves(case.program(*args))):
            part = jnp.sum(jnp.sin(leaf) * (i + 1))
            parts.append(fg.sum(part, at) if i in case.client_outputs else part)
        return sum(parts)

    total.__name__ = f"total({case.name})"
    return fg.Program(total, case.program.placements, signature=case.program.signature)


@functools.cache
def centralised(case: Case):
    """(value, gradient) by the server's arguments, in plain JAX."""

    def total(*args):
        leaves = jax.tree.leaves(case.centralised(*args))
        if case.scalar:
            return leaves[0]
        return sum(jnp.sum(jnp.sin(leaf) * (i + 1)) for i, leaf in enumerate(leaves))

    return jax.value_and_grad(total, case.server_argnums)(*arguments(case))


@functools.cache
def derived(case: Case, mode: str) -> fg.Program:
    return fg.value_and_grad(scalar(case), case.server_argnums, **MODES[mode])


@pytest.mark.parametrize("executor", EXECUTORS)
@every_mode
@every_case
def test_equals_centralised(case, mode, executor):
    if not possible(case, mode):
        pytest.skip("JAX cannot; see test_what_jax_cannot")
    found = derived(case, mode).on(EXECUTORS[executor])(*arguments(case))
    assert_close(found, centralised(case))
    assert any(jnp.any(g != 0) for g in jax.tree.leaves(found[1]))
