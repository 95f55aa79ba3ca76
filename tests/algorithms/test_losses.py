"""Every way to write a loss: it is given a key exactly where it still asks for one."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedgrad as fg
from by_hand import POPULATION, START, as_params
from by_hand import loss as plain

OWN = jax.random.key(7)
NOTHING, BOUND, GIVEN = "no key", "its own key", "a key of the round"
seen: list[str] = []


def random(params, batch, key=None):
    """A loss that remembers which key it was traced with."""
    seen.append(NOTHING if key is None else BOUND if key is OWN else GIVEN)
    return plain(params, batch)


def required(params, batch, key):
    return random(params, batch, key)


def key_first(key, params, batch):
    return random(params, batch, key)


def by_keyword(params, batch, *, key=None):
    return random(params, batch, key)


def scaled(params, batch, scale, key=None):
    return scale * random(params, batch, key)


def with_arrays(params, batch, fixed, key=None):
    return random(params, batch, key) + fixed


def passing_on(loss):
    @functools.wraps(loss)
    def passed(*args, **kwargs):
        return loss(*args, **kwargs)

    return passed


@functools.wraps(required)
def without_key(params, batch):
    return required(params, batch, None)


@functools.wraps(plain)
def with_key(params, batch, key=None):
    return random(params, batch, key)


class Model:
    def __call__(self, params, batch, key=None):
        return random(params, batch, key)

    def method(self, params, batch, key):
        return random(params, batch, key)

    bound = functools.partialmethod(method, key=None)

    @passing_on
    def decorated(self, params, batch, key):
        return random(params, batch, key)


class Decorated:
    @passing_on
    def __call__(self, params, batch, key=None):
        return random(params, batch, key)


class Module(eqx.Module):
    scale: float

    def __call__(self, params, batch, key=None):
        return random(params, batch, key)


bind = functools.partial
WAYS = {
    "required": (required, GIVEN),
    "with a default": (random, GIVEN),
    "by keyword": (by_keyword, GIVEN),
    "a lambda": (lambda params, batch, key: random(params, batch, key), GIVEN),
    "a lambda without": (lambda params, batch: random(params, batch), NOTHING),
    "bound to None": (bind(random, key=None), NOTHING),
    "bound": (bind(required, key=OWN), BOUND),
    "by keyword, bound": (bind(by_keyword, key=None), NOTHING),
    "bound by position": (bind(key_first, OWN), BOUND),
    "another one bound": (bind(scaled, scale=2.0), GIVEN),
    "both bound": (bind(bind(scaled, scale=2.0), key=OWN), BOUND),
    "bound anew": (bind(bind(random, key=None), key=OWN), BOUND),
    "bound, of JAX": (jax.tree_util.Partial(random, key=OWN), BOUND),
    "jit": (jax.jit(random), GIVEN),
    "jit of bound": (jax.jit(bind(random, key=None)), NOTHING),
    "bound jit": (bind(jax.jit(random), key=None), NOTHING),
    "checkpoint of bound": (jax.checkpoint(bind(random, key=None)), NOTHING),
    "decorated": (passing_on(required), GIVEN),
    "decorated twice": (passing_on(passing_on(random)), GIVEN),
    "decorated, bound": (passing_on(bind(random, key=OWN)), BOUND),
    "decorator that binds": (without_key, NOTHING),
    "decorator that asks": (with_key, GIVEN),
    "an object": (Model(), GIVEN),
    "a bound object": (bind(Model(), key=None), NOTHING),
    "a decorated object": (Decorated(), GIVEN),
    "a method": (Model().method, GIVEN),
    "a bound method": (bind(Model().method, key=OWN), BOUND),
    "a partial method": (Model().bound, NOTHING),
    "a decorated method": (Model().decorated, GIVEN),
    "a module": (Module(1.0), GIVEN),
    "a bound module": (bind(Module(1.0), key=OWN), BOUND),
    "filter_jit": (eqx.filter_jit(random), GIVEN),
    "filter_jit of bound": (eqx.filter_jit(bind(random, key=None)), NOTHING),
    "fixed arrays": (fg.with_fixed(with_arrays, 1.0), GIVEN),
    "fixed arrays, bound": (fg.with_fixed(bind(with_arrays, key=None), 1.0), NOTHING),
    "bound, fixed arrays": (bind(fg.with_fixed(with_arrays, 1.0), key=None), NOTHING),
}


def _round(algorithm):
    state = algorithm.init(as_params(START))
    more = {name: POPULATION.select([0]) for name in algorithm.cohorts}
    fg.plan(
        algorithm.round, state, algorithm.hyper, POPULATION.select([1]), jax.random.key(0), **more
    )


def _evaluation(metrics):
    fg.plan(fg.Evaluation(metrics, POPULATION).program, as_params(START), POPULATION.select([1]))


AVG = fg.fed_avg(plain)
PLACES = {
    "local training": lambda loss: _round(fg.fed_avg(loss)),
    "a whole gradient": lambda loss: _round(fg.fed_sgd(loss)),
    "Per-FedAvg": lambda loss: _round(fg.per_fed_avg(loss)),
    "a judge": lambda loss: _round(fg.race({"a": AVG, "b": fg.fed_sgd(plain)}, judge=loss)),
    "a gradient cohort": lambda loss: _round(
        fg.self_tuning(AVG, "server.learning_rate", gradient_from=fg.GradientCohort(loss=loss))
    ),
    "a metric": lambda loss: _evaluation({"loss": loss}),
    "a ratio": lambda loss: _evaluation({"loss": fg.Ratio(loss, plain)}),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.promotes("dtype")
def test_a_key_is_given_exactly_where_it_is_asked_for(way, place):
    loss, wanted = WAYS[way]
    if {"jit", "filter_jit", "checkpoint"} & set(way.split()):
        jax.clear_caches()  # they trace a loss once
    seen.clear()
    place(loss)
    assert set(seen) == {wanted}


def test_fixed_arrays_are_given_only_where_they_are_asked_for():
    with pytest.raises(fg.ArgumentError, match="has no argument `fixed`"):
        fg.with_fixed(bind(with_arrays, fixed=1.0), 2.0)


@pytest.mark.parametrize("around", [passing_on, jax.jit, lambda fun: fun])
def test_a_program_takes_what_is_not_bound(around):
    """Wherever a partial is: under a decorator, too."""

    def weighted(x, z, *, scale):
        return fg.sum(fg.broadcast(x) * z * scale)

    program = fg.program(around(bind(weighted, scale=2.0)), z=fg.CLIENTS)
    assert [*program.signature.parameters] == ["x", "z"]
    np.testing.assert_allclose(program(jnp.float64(3.0), jnp.array([1.0, 2.0])), 18.0)


def test_a_schedule_with_a_bound_rate_is_a_schedule():
    def decayed(round, learning_rate):
        return learning_rate / (1.0 + round)

    algorithm = fg.fed_avg(plain, bind(decayed, learning_rate=0.5))
    assert "client.learning_rate" in fg.hyper.schedules(algorithm.hyper)
