"""What crosses a boundary is what its annotation says: the names of core/types.py, by jaxtyping."""

import functools
import inspect
import types
import typing
from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import by_hand
import fedgrad as fg
from by_hand import START, STATELESS, as_params
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.core.types import Batch, Hyper, Key, Params, State

ROOMS = ("fedgrad.algorithms", "fedgrad.clients", "fedgrad.training")
NAMED = {"params": Params, "hyper": Hyper, "batch": Batch, "state": State, "key": Key}
WRITTEN = ("Array", "ArrayLike", "Float", "Key", "PyTree", "Shaped")
NOTATION = {name: getattr(jaxtyping, name) for name in WRITTEN}


def fits(value, hint):
    """Is a value what it is annotated to be, as far as that can be seen?"""
    of = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Annotated:
        return isinstance(value, eval(of[1], NOTATION))
    if typing.get_origin(hint) is tuple:
        return len(value) == len(of) and all(map(fits, value, of))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in of)
    return hint in (None, typing.Any) or not isinstance(hint, type) or isinstance(value, hint)


def checked(fun, seen):
    """The function; each call checks its arguments and its result."""
    hints = typing.get_type_hints(fun, include_extras=True)

    @functools.wraps(fun)
    def call(*args, **kwargs):
        with jaxtyping.jaxtyped("context"):  # a call has one number of examples
            bound = inspect.signature(fun).bind(*args, **kwargs).arguments
            result = fun(*args, **kwargs)
            for name, value in {**bound, "return": result}.items():
                assert fits(value, hints.get(name)), (fun.__name__, name, value)
                seen.add((fun.__name__.partition("(")[0], name))
        return result

    return call


def test_what_does_not_fit_is_seen():
    key, batch = jax.random.key(0), {"x": jnp.ones((4, 2)), "y": jnp.ones(4)}
    with jaxtyping.jaxtyped("context"):
        assert fits(key, Key) and not fits(jax.random.split(key), Key) and not fits(key, Params)
        assert fits({"w": 1.0}, Params) and not fits({"w": "w"}, Params)
        assert fits(batch, Batch) and not fits({"x": jnp.ones((5, 2))}, Batch)
        assert fits((None, 1), tuple[Key | None, int]) and not fits((key, key), tuple[Key, int])


COHORT = fg.population(by_hand.make_clients([7, 2, 4], seed=1)).select([0, 1, 2])
WAYS = {
    "as it is": lambda algorithm: algorithm,
    "serial": lambda algorithm: fg.self_tuning(algorithm, "server", schedule="serial"),
    "parallel": lambda algorithm: fg.self_tuning(algorithm, "server"),
}


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize(
    "name, way",
    # Self-tuning does not take an algorithm whose clients keep a state.
    [(n, way) for n in ALGORITHMS for way in WAYS if way == "as it is" or n in STATELESS],
)
def test_boundaries_of_every_algorithm(name, way):
    """Traced only: what the types are does not depend on the numbers."""
    seen = set()

    def loss(params: Params, batch: Batch) -> jax.Array:
        return by_hand.loss(params, batch)

    algorithm = WAYS[way](ALGORITHMS[name](checked(loss, seen)))
    init, round = checked(algorithm.init.init, seen), algorithm.round
    # What is learned is float64 here, and optax's Mechanic clamps numbers of one dtype only.
    dtype = jnp.float64 if name == "fedmechanic" else jnp.float32
    params = jax.tree.map(dtype, as_params(START))
    state, hyper = init(params, algorithm.hyper), algorithm.hyper
    more = dict.fromkeys(algorithm.cohorts, COHORT)
    if algorithm.client_init:
        one = algorithm.client_init(params, len(COHORT))
        more["client_state"] = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(COHORT)), one)
    round = replace(round, fun=checked(round.fun, seen))
    result = jax.eval_shape(round, state, hyper, COHORT, jax.random.key(0), **more)
    assert shapes(result[0]) == shapes(state)
    assert shapes(result[2:]) == shapes(tuple(more.values()) if algorithm.client_init else ())
    assert {("loss", "params"), ("loss", "batch"), ("init", "return")} <= seen
    rounds = {what for who, what in seen if who in ("round", "self_tuning")}
    assert {"state", "hyper", "key", "return"} <= rounds


def test_public_functions_name_them():
    """A parameter that is called `params` is annotated as `Params`, and so on."""
    found = 0
    for public in vars(fg).values():
        members = [public, *vars(public).values()] if isinstance(public, type) else [public]
        for fun in members:
            if not inspect.isfunction(fun) or not fun.__module__.startswith(ROOMS):
                continue
            for name, hint in typing.get_type_hints(fun, include_extras=True).items():
                if name in NAMED:
                    found += 1
                    assert hint is not typing.Any and hint is not jax.Array, (fun, name)
    assert found > 10
