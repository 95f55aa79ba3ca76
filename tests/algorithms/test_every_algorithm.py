"""Laws over every algorithm x every hyperparameter x both schedules of self-tuning: what is learned
has an effect, what cannot have one is refused, and no derivative needs a model times a model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import by_hand
import fedgrad as fg
from by_hand import START, STATELESS, as_params, loss

SCHEDULES = ("serial", "parallel")
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Row:
    """An algorithm, and where its hyperparameters start: by default, where it starts itself."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    start: Mapping[str, float] = dataclasses.field(default_factory=dict)
    only: tuple[str, ...] = ()  # what this row is about; by default, everything

    def make(self, loss, batch_size=20, **many):
        make, options = STATELESS[self.name], dict(self.options)
        rate = options.pop("client", 0.1)
        if self.name == "fedsgd":
            work = {"batch_size": batch_size}
        else:
            work = {"client": fg.local_training(rate, batch_size=batch_size, shuffle=False, **many)}
        return make(loss, **work, **options).starting(self.start)

    @property
    def learn(self):
        return self.only or tuple(fg.hyper.paths(self.make(loss).hyper))


TABLE = {
    **{name: Row(name) for name in STATELESS},
    # FedHyper's bounds have an effect where they bind, and they cannot both bind at once.
    "fedhyper": Row("fedhyper", start={"server.high": 1e-3}, only=("client", "server.high")),
    "fedhyper, low": Row("fedhyper", start={"server.low": 0.5}, only=("server.low",)),
    # FedExP's epsilon, where clients disagree so much that the rate is above 1.
    "fedexp": Row("fedexp", start={"client.learning_rate": 2.0}),
    # DoG's first step goes as far as it began with times its rate: at 1, its max is at a corner.
    "feddog": Row("feddog", start={"server.learning_rate": 0.9}),
    "weights": Row("fedavg", {"weighting": "power"}),
    "layers": Row(
        "fedavg",
        {
            "client": {"b": 0.1, "w": 0.2},
            "server_learning_rate": {"b": 0.5, "w": 2.0},
        },
    ),
    "client adam": Row(
        "fedavg",
        {"client": fg.optimizer(optax.adam, learning_rate=0.1, b1=0.9, b2=0.99, eps=1e-3)},
    ),
}
# Adam raises a learned decay to the power of an integer, of which JAX's derivative promotes.
PROMOTING = {"client adam": pytest.mark.promotes("dtype")}


def test_every_hyperparameter_is_in_the_table():
    found = {
        (row.name, path)
        for row in TABLE.values()
        for path in fg.hyper.select(row.make(loss).hyper, row.learn)
    }
    for name in STATELESS:
        for path in fg.hyper.paths(STATELESS[name](loss).hyper):
            assert (name, path) in found


# ---- what is learned has an effect

POPULATION = fg.population(by_hand.make_clients([7, 2, 4, 6, 9], seed=1))
TRAIN, FRESH = POPULATION.select([0, 1, 2]), POPULATION.select([3, 4])
ROUNDS = 4


def hypergradients(algorithm, learn, schedule, **options):
    """Of every round, by name; what is learned stays where it starts."""
    tuned = fg.self_tuning(
        algorithm, learn, schedule=schedule, optimizer=optax.set_to_zero(), guard=None, **options
    )
    state, seen = tuned.init(as_params(START)), []
    more = {name: FRESH for name in tuned.cohorts}
    for t in range(ROUNDS):
        key = jax.random.fold_in(KEY, t)
        state, metrics = tuned.round(state, tuned.hyper, TRAIN, key, **more)
        seen.append(metrics.hypergradient)
    return {name: np.array([float(one[name]) for one in seen]) for name in seen[0]}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=name, marks=PROMOTING.get(name, ())) for name, row in TABLE.items()],
)
def test_no_hypergradient_is_always_zero(row, schedule):
    found = hypergradients(row.make(loss, batch_size=2), row.learn, schedule)
    # Mechanic's first step takes the root of 0, which has no derivative; self-tuning leaves it out.
    numbers = {name: values[np.isfinite(values)] for name, values in found.items()}
    assert [name for name, values in numbers.items() if not values.any()] == []
    assert row.name == "fedmechanic" or all(len(values) == ROUNDS for values in numbers.values())


# ---- what cannot have an effect is refused, whoever wrote the algorithm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled:
    inner: Any
    scale: Any

    @property
    def params(self):
        return self.inner.params


def changed(round):
    """FedSGD with a hyperparameter `scale`, whose model is made by
    `round(new model, scale in the state, scale)`."""
    inner = fg.fed_sgd(loss, 0.5)

    def init(params, hyper):
        return Scaled(inner.init(params), jnp.asarray(hyper["scale"], float))

    @fg.program(cohort=fg.CLIENTS)
    def one(state, hyper, cohort, key):
        new, metrics = inner.round(state.inner, hyper, cohort, key)
        params, scale = round(new.params, state.scale, hyper["scale"])
        return Scaled(dataclasses.replace(new, params=params), scale), metrics

    return fg.Algorithm(init, one, {**inner.hyper, "scale": 2.0}, loss)


def times(scale, params):
    return jax.tree.map(lambda leaf: scale * leaf, params)


@jax.jit
def later(params, kept, scale):
    return times(kept, params), scale


@jax.custom_vjp
def scaled(params, scale):
    return times(scale, params)


scaled.defvjp(lambda p, s: (scaled(p, s), s), lambda s, ct: (times(s, ct), jnp.sum(ct["b"])))


def looped(params, kept, scale):
    """A loop in which the scale goes along, but not into the model."""

    def body(i, carry):
        params, seen = carry
        return times(kept, params), seen * scale

    return jax.lax.fori_loop(0, 3, body, (params, scale))[0], kept


VAIN = {
    "init only": changed(lambda params, kept, scale: (times(kept, params), kept)),
    "for later": changed(later),
    "in a loop": changed(looped),
    "stopped": changed(lambda p, kept, scale: (times(jax.lax.stop_gradient(scale), p), kept)),
    "rounded": changed(lambda p, kept, scale: (times(jnp.round(scale), p), kept)),
    "compared": changed(lambda p, kept, scale: (times(jnp.where(scale > 1, 1.0, 2.0), p), kept)),
}
EFFECTIVE = {
    "now": changed(lambda params, kept, scale: (times(scale, params), kept)),
    "custom derivative": changed(lambda params, kept, scale: (scaled(params, scale), kept)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("algorithm", VAIN.values(), ids=VAIN)
def test_what_has_no_effect_is_refused(algorithm, schedule):
    message = r"the model that one\(\) gives has no derivative by 'scale'"
    with pytest.raises(fg.ArgumentError, match=message) as raised:
        hypergradients(algorithm, ["server", "scale"], schedule)
    assert str(raised.value).startswith(__file__), "it names the line of the user"
    assert hypergradients(algorithm, ["server"], schedule)["server.learning_rate"].any()


@pytest.mark.parametrize("algorithm", EFFECTIVE.values(), ids=EFFECTIVE)
def test_what_has_an_effect_is_not(algorithm):
    assert hypergradients(algorithm, "scale", "serial")["scale"].any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_tuned_already_is_not_tuned_again(schedule):
    """Its value is in the state, so the one that is given has no effect."""
    tuned = fg.self_tuning(fg.fed_avgm(loss), "server", gradient_from="same", schedule=schedule)
    with pytest.raises(fg.ArgumentError, match=r"no derivative by 'server\.learning_rate'"):
        hypergradients(tuned, ["server"], "serial")


def test_what_is_not_tuned_yet_can_be():
    tuned = fg.self_tuning(fg.fed_avgm(loss), "server", gradient_from="same")
    assert hypergradients(tuned, "client", "parallel")["client.learning_rate"].any()


def test_what_has_no_effect_is_refused_before_training():
    with pytest.raises(fg.ArgumentError, match="no derivative by 'scale'"):
        fg.fit(
            fg.self_tuning(VAIN["init only"], "scale"),
            POPULATION,
            params=as_params(START),
            rounds=1,
            cohort_size=2,
            key=KEY,
            progress=False,
        )


# ---- memory: a few models, never a model times a model

PARAMETERS, MODELS = 100_000, 60


def wide(params, batch):
    """A loss of many parameters and few data, so that temporary memory is that of models."""
    return (jnp.sum(jnp.tanh(batch["x"] @ params), -1) - batch["y"]) ** 2


def temporary_models(row, learn, schedule):
    """What XLA needs for one self-tuned round besides arguments and results, in models.

    It is compiled, not run. That the suite compiles quickly makes no difference to it: what is
    left out is the optimization of machine code.
    """
    with jax.enable_x64(False):  # as users have it: float32
        cohort = {"x": jnp.ones((2, 3, 100)), "y": jnp.ones((2, 3))}
        params = jnp.ones((100, PARAMETERS // 100))
        algorithm = row.make(wide, batch_size=2, steps=2)
        tuned = fg.self_tuning(algorithm, learn, schedule=schedule)
        args = tuned.init(params), tuned.hyper, cohort, KEY, cohort
        compiled = jax.jit(lambda *args: tuned.round(*args)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * PARAMETERS)


EACH = [
    pytest.param(
        *(row, path, schedule), id=f"{name}-{path}-{schedule}", marks=PROMOTING.get(name, ())
    )
    for name, row in TABLE.items()
    for path in fg.hyper.select(row.make(loss).hyper, row.learn)
    if name in STATELESS or path not in fg.hyper.paths(STATELESS[row.name](loss).hyper)
    if name != "layers"  # the model is one
    for schedule in SCHEDULES
]


@pytest.mark.parametrize("row, path, schedule", EACH)
def test_a_derivative_needs_a_few_models_of_memory(row, path, schedule):
    assert temporary_models(row, [path], schedule) <= MODELS
