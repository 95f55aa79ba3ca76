"""Long horizons of self-tuning: carried sensitivities against derivatives through all rounds, the
part of the server alone, what both send; and the guard that compares models in pairs."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_every_algorithm import PROMOTING
from test_every_algorithm import TABLE as EVERY
from test_self_tuning import CLIENTS, KEY, close, mean_update, minus, ordered, plain, together

import by_hand
import fedgrad as fg
from by_hand import START, as_params, as_vector, loss
from fedgrad.ad.sensitivity import apart, carried
from fedgrad.tuning.gradient_cohort import Comparison
from fedgrad.tuning.guards import got_worse
from laws import EXECUTORS
from programs import TABLE as PROGRAMS
from programs import assert_same

POPULATION = fg.population(CLIENTS)
TRAIN, FRESH = [0, 1, 2], [3, 4]
ROUNDS = 3
still = functools.partial(fg.self_tuning, optimizer=optax.sgd(0.0), guard=None)


def run(algorithm, rounds, executor="local", state=None, params=None):
    """[(the state before, the metrics)] of each round, and the last state."""
    if state is None:
        state = algorithm.init(as_params(START) if params is None else params)
    round = algorithm.round.on(EXECUTORS[executor])
    more = {name: POPULATION.select(FRESH) for name in algorithm.cohorts}
    seen = []
    for t in range(rounds):
        key = jax.random.fold_in(KEY, t)
        new, metrics = round(state, algorithm.hyper, POPULATION.select(TRAIN), key, **more)
        seen.append((state, metrics))
        state = new
    return seen, state


# ---- carried through rounds: the derivative through all of them, for constant hyperparameters


def avg(hyper, x, kept, update):
    return minus(x, scaled(hyper["server"]["learning_rate"], update)), kept


def avgm(hyper, x, m, update):
    m = jax.tree.map(lambda a, d: hyper["server"]["momentum"] * a + d, m, update)
    return minus(x, scaled(hyper["server"]["learning_rate"], m)), m


def adam(hyper, x, kept, update):
    lr, b1, b2, tau = (hyper["server"][n] for n in ("learning_rate", "b1", "b2", "adaptivity"))
    m = jax.tree.map(lambda m, d: b1 * m + (1 - b1) * d, kept[0], update)
    v = jax.tree.map(lambda v, d: b2 * v + (1 - b2) * d**2, kept[1], update)
    return jax.tree.map(lambda x, m, v: x - lr * m / (jnp.sqrt(v) + tau), x, m, v), (m, v)


def scaled(rate, tree):
    return jax.tree.map(lambda leaf: rate * leaf, tree)


ZEROS = as_params(np.zeros(3))


@dataclasses.dataclass(frozen=True)
class Row:
    algorithm: fg.Algorithm
    learn: Any
    server: Any  # the same in plain JAX: (hyper, model, kept, mean update) -> (model, kept)
    kept: Any = ()


TABLE = {
    "fedavg": Row(
        fg.fed_avg(loss, ordered(0.3), 0.7, weighting="power"),
        ["server", "client", "weight_exponent"],
        avg,
    ),
    "fedavgm": Row(fg.fed_avgm(loss, ordered(0.3), 0.7, 0.8), ["server", "client"], avgm, ZEROS),
    "fedadam": Row(
        fg.fed_adam(loss, ordered(0.3)),
        ["server", "client"],
        adam,
        (ZEROS, jax.tree.map(lambda leaf: leaf + 1e-6, ZEROS)),
    ),
}


@functools.cache
def central(name):
    """The model after all rounds, its derivative and that of what is kept, in plain JAX."""
    row = TABLE[name]
    clients = [CLIENTS[i] for i in TRAIN]

    def after(raw):
        hyper = fg.hyper.replace(row.algorithm.hyper, raw)
        x, kept = as_params(START), row.kept
        for _ in range(ROUNDS):
            update = mean_update(hyper, x, clients, plain, hyper.get("weight_exponent", 1.0))
            x, kept = row.server(hyper, x, kept, update)
        return (x, kept), x

    names = fg.hyper.select(row.algorithm.hyper, row.learn)
    known = fg.hyper.paths(row.algorithm.hyper)
    raw = {n: jnp.asarray(known[n], float) for n in names}
    slopes, x = jax.jit(jax.jacfwd(after, has_aux=True))(raw)
    return raw, x, slopes


def vector_of(tree, name):
    """A derivative by one hyperparameter, of any tree of models."""
    parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, dict) and name in x)
    return np.concatenate([np.ravel(part[name]) for part in parts] or [[]])


@functools.cache
def last(name, executor="local", horizon=math.inf, **options):
    """The state with the sensitivity of all rounds, and the metrics that it was used for."""
    row = TABLE[name]
    seen, _ = run(still(row.algorithm, row.learn, horizon=horizon, **options), ROUNDS + 1, executor)
    return seen[-1]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", TABLE)
def test_an_infinite_horizon_is_the_derivative_through_all_rounds(name, executor):
    state, metrics = last(name, executor)
    raw, x, (models, kept) = central(name)
    close(as_vector(state.params), as_vector(x))
    gradient = by_hand.slope(as_vector(x), together(FRESH))
    assert set(metrics.hypergradient) == set(raw)
    for path, found in metrics.hypergradient.items():
        slope = vector_of(models, path)
        close(as_vector(state.sensitivity[path].params), slope)
        leaves = jax.tree.leaves(state.sensitivity[path].optimizer)
        close(np.concatenate([np.ravel(x) for x in leaves] or [[]]), vector_of(kept, path))
        close(found, gradient @ slope)


@pytest.mark.parametrize("name", TABLE)
def test_it_is_what_grad_gives(name):
    """Of a program that is all of these rounds, in which the derivative goes back."""
    row, judges = TABLE[name], fg.Placement("gradient")

    @fg.program(cohort=fg.CLIENTS, gradient_cohort=judges)
    def after(raw, state, cohort, gradient_cohort):
        hyper = fg.hyper.replace(row.algorithm.hyper, raw)
        for t in range(ROUNDS):
            state, _ = row.algorithm.round(state, hyper, cohort, jax.random.fold_in(KEY, t))
        return fg.GradientCohort().program(loss)(state.params, None, gradient_cohort)[0]

    found = fg.grad(after, mode="mixed")(
        central(name)[0],
        row.algorithm.init(as_params(START)),
        POPULATION.select(TRAIN),
        POPULATION.select(FRESH),
    )
    jax.tree.map(close, last(name)[1].hypergradient, found)


@pytest.mark.parametrize("mode", ["forward", "mixed", "reverse"])
def test_in_every_mode(mode):
    jax.tree.map(close, last("fedavgm", mode=mode)[1], last("fedavgm")[1])


def test_the_serial_schedule_is_a_round_ahead():
    """It judges the model that the round gives, which the parallel one sees a round later."""
    row = TABLE["fedavgm"]
    seen, _ = run(still(row.algorithm, row.learn, schedule="serial", horizon=math.inf), ROUNDS)
    jax.tree.map(close, seen[-1][1].hypergradient, last("fedavgm")[1].hypergradient)


def test_a_discount_is_on_what_came_before():
    """S_2 = direct + discount (what round 2 makes of S_1)."""
    row = TABLE["fedavgm"]

    def after_two(horizon):
        return run(still(row.algorithm, row.learn, horizon=horizon), 2)[1].sensitivity

    direct, all_of_it, found = (after_two(h) for h in (1, math.inf, 4))
    assert fg.Horizon(4).discount == 0.75 and fg.Horizon().discount == 1
    past = {}
    for path in direct:
        one, *rest = direct[path], all_of_it[path].params, found[path].params
        one, whole, part = map(as_vector, (one, *rest))
        past[path] = abs(whole - one).max() > 1e-3
        close(part, one + 0.75 * (whole - one))
    # The first round has no momentum, so nothing depends on how much of it is kept.
    assert past == {path: path != "server.momentum" for path in direct}


# Servers of optax, with what can be learned of each: most take roots, which are of 0 in the first
# round (a distance, moments of a gradient that is 0).
SERVERS = {
    "adabelief": (optax.adabelief, {"learning_rate": 0.1}),
    "adagrad": (optax.adagrad, {"learning_rate": 0.3}),
    "adam": (optax.adam, {"learning_rate": 0.1, "b1": 0.8, "b2": 0.9, "eps": 1e-3}),
    "amsgrad": (optax.amsgrad, {"learning_rate": 0.1, "b1": 0.8}),
    "clipped": (
        lambda norm, learning_rate: optax.chain(
            optax.clip_by_global_norm(norm), optax.sgd(learning_rate)
        ),
        {"norm": 0.02, "learning_rate": 0.7},
    ),
    "dog, distance": (optax.contrib.dog, {"learning_rate": 0.9, "init_step": ("distance", 0.1)}),
    "dog, far": (optax.contrib.dog, {"learning_rate": 1.1, "init_step": ("distance", 0.1)}),
    "dog, heuristic": (optax.contrib.dog, {"learning_rate": 0.9, "init_step": ("heuristic", 0.1)}),
    "dog, rate": (optax.contrib.dog, {"learning_rate": 1.0, "init_step": ("learning_rate", 0.3)}),
    "dowg": (optax.contrib.dowg, {"learning_rate": 1.0}),
    "every second round": (
        lambda learning_rate: optax.MultiSteps(
            optax.adam(learning_rate), 2
        ).gradient_transformation(),
        {"learning_rate": 0.1},
    ),
    "lamb": (optax.lamb, {"learning_rate": 0.1}),
    "mechanic": (
        lambda momentum: optax.contrib.mechanize(optax.sgd(1.0, momentum), s_init=0.1),
        {"momentum": 0.8},
    ),
    "mechanic of adam": (
        lambda b1: optax.contrib.mechanize(optax.adam(1.0, b1), s_init=0.1),
        {"b1": 0.8},
    ),
    "novograd": (optax.novograd, {"learning_rate": 0.1}),
    "prodigy": (optax.contrib.prodigy, {"betas": (0.8, 0.9), "estim_lr0": 0.1, "eps": 1e-3}),
    "rmsprop": (optax.rmsprop, {"learning_rate": 0.1, "decay": 0.8}),
    "schedule free": (optax.contrib.schedule_free_sgd, {"learning_rate": 0.3}),
    "yogi": (optax.yogi, {"learning_rate": 0.1}),
}
WORK = functools.partial(fg.local_training, batch_size=2, shuffle=False)
EACH = {
    **{name: (row.make(loss, batch_size=2), row.learn) for name, row in EVERY.items()},
    **{
        f"optax, {name}": (
            fg.fed_opt(loss, server=fg.optimizer(make, **options), client=WORK(0.1)),
            ["server", "client"],
        )
        for name, (make, options) in SERVERS.items()
    },
    **{
        f"client, {name}": (
            fg.fed_avg(loss, WORK(fg.optimizer(SERVERS[name][0], **SERVERS[name][1]))),
            ["server", "client"],
        )
        for name in ("adam", "clipped", "dog, distance")
    },
}
# Some raise a learned decay to the power of an integer, of which JAX's derivative promotes.
DECAYED = ("adam", "amsgrad", "prodigy", "mechanic of adam")


def is_marked(name):
    return name in PROMOTING or name.split(", ", 1)[-1] in DECAYED


def by_rounds(algorithm, params, rounds=3):
    """The loss after some rounds, as a function of a hyperparameter."""
    judged = fg.GradientCohort().program(algorithm.loss)

    def after(path, value):
        hyper = fg.hyper.replace(algorithm.hyper, {path: jnp.asarray(value, float)})
        # What init makes of a hyperparameter is no part of a round, and none of its derivative.
        state = algorithm.init(params)
        for t in range(rounds):
            key = jax.random.fold_in(KEY, t)
            state, _ = algorithm.round(state, hyper, POPULATION.select(TRAIN), key)
        return float(judged(state.params, None, POPULATION.select(FRESH))[0])

    return after


def hypergradient(algorithm, learn, params, rounds=3, horizon=math.inf):
    """By every hyperparameter, through all of these rounds."""
    tuned = still(algorithm, learn, horizon=horizon, schedule="serial")
    seen, _ = run(tuned, rounds, params=params)
    return seen[-1][1].hypergradient


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.promotes("dtype") if is_marked(name) else ())
        for name in EACH
    ],
)
def test_every_algorithm_by_finite_differences(name):
    """By every hyperparameter, through three rounds, the first of which begins with nothing."""
    algorithm, learn = EACH[name]
    params = as_params(START)
    after = by_rounds(algorithm, params)
    for path, found in hypergradient(algorithm, learn, params).items():
        value = fg.hyper.paths(algorithm.hyper)[path]
        h = 1e-5 * max(abs(value), 1e-2)
        # What differences cannot tell: a loss has 16 digits.
        expected = (after(path, value + h) - after(path, value - h)) / (2 * h)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-15 / h)


@pytest.mark.parametrize("rounds, horizon", [(1, 1), (3, math.inf)])
@pytest.mark.parametrize("where", ["server", "client"])
def test_a_parameter_without_a_gradient_does_no_harm(where, rounds, horizon):
    """Adam divides by the root of squared gradients, which is 0 where a feature is always 0."""

    def blind(params, batch):
        return loss(params, {**batch, "x": batch["x"] * jnp.array([[1.0, 0.0]])})

    adam = fg.optimizer(optax.adam, learning_rate=0.1)
    server, client = (adam, 0.1) if where == "server" else (optax.sgd(1.0), adam)
    algorithm = fg.fed_opt(blind, server=server, client=WORK(client, epochs=2))
    path, params = "client.learning_rate", as_params(START)
    found = hypergradient(algorithm, path, params, rounds, horizon)[path]
    after = functools.partial(by_rounds(algorithm, params, rounds), path)
    expected = (after(0.1 + 1e-6) - after(0.1 - 1e-6)) / 2e-6
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


def test_at_a_corner_the_derivative_is_that_of_one_side():
    """DoG's rate is max(distances): its first step goes as far as it began with, times its rate of
    1, and what it divides by is a little more than the gradient."""
    make, options = SERVERS["dog, distance"]
    server = fg.optimizer(make, **{**options, "learning_rate": 1.0})
    algorithm = fg.fed_opt(loss, server=server, client=WORK(0.1))
    path, params, h = "server.learning_rate", as_params(START), 1e-5
    found = hypergradient(algorithm, path, params)[path]
    after = functools.partial(by_rounds(algorithm, params), path)
    at, left, right = (after(1.0 + d) for d in (0, -h, h))
    np.testing.assert_allclose(found, (at - left) / h, rtol=1e-3)
    assert abs((right - at) / h - found) > 0.1 * abs(found)


# ---- only the server's part


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_part_of_the_server_by_hand(executor):
    """m' = mu m + D, x' = x - eta m', in which D depends on what is learned, but not on x."""
    row, horizon = TABLE["fedavgm"], fg.Horizon(through="server")
    seen, end = run(still(row.algorithm, row.learn, horizon=horizon), ROUNDS, executor)
    one_round, _ = run(still(row.algorithm, row.learn), ROUNDS + 1, executor)
    eta, mu = 0.7, 0.8
    slopes = {path: (np.zeros(3), np.zeros(3)) for path in end.learned}  # of x and of m
    states = [*(state for state, _ in seen), end]
    for t in range(ROUNDS):
        m = as_vector(optax.tree_utils.tree_get(states[t].inner.optimizer, "trace"))
        new = as_vector(optax.tree_utils.tree_get(states[t + 1].inner.optimizer, "trace"))
        client = as_vector(one_round[t + 1][0].sensitivity["client.learning_rate"]) / -eta
        # How m' and then x' depend on each directly.
        direct = {
            "server.learning_rate": (np.zeros(3), -new),
            "server.momentum": (m, np.zeros(3)),
            "client.learning_rate": (client, np.zeros(3)),
        }
        for path, (of_m, of_x) in direct.items():
            x, old = slopes[path]
            moved = mu * old + of_m
            slopes[path] = x - eta * moved + of_x, moved
    for path, (of_x, of_m) in slopes.items():
        close(as_vector(end.sensitivity[path].params), of_x)
        trace = optax.tree_utils.tree_get(end.sensitivity[path].optimizer, "trace")
        close(as_vector(trace), of_m)


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_told_and_kept_alike_a_program_is_itself(case):
    """Also in its traffic: what clients would make of what is kept is dead."""
    program, args = case.program, case.args(5)

    def fun(*args, **kwargs):
        bound = program.bind(args, kwargs)
        own = {n: x for n, x in bound.items() if n not in program.placements}
        return apart(
            lambda own: program.call({**bound, **own}), own, own, program.client_placements
        )

    fun.__signature__ = program.signature
    same = dataclasses.replace(program, fun=fun)
    plans = [fg.plan(one, *args) for one in (program, same)]
    assert plans[0].traffic == plans[1].traffic and plans[0].rounds == plans[1].rounds
    assert_same(same(*args), program(*args))


def one_round(x, z):
    return x + 0.5 * jnp.sin(x) + fg.mean(jnp.tanh(fg.broadcast(x) * z))


def scanned(x, z):
    return jax.lax.scan(lambda x, _: (one_round(x, z), None), x, None, length=2)[0]


def while_below(x, z):
    def below(carry):
        return (carry[0] < 2) & (jnp.sum(carry[1]) < 1e6)

    return jax.lax.while_loop(below, lambda c: (c[0] + 1, one_round(c[1], z)), (0, x))[1]


def branched(x, z):
    def twice(x):
        return one_round(one_round(x, z), z)

    return jax.lax.cond(jnp.sum(x) < 1e6, twice, lambda x: x, x)


NESTED = {
    "in a row": lambda x, z: one_round(one_round(x, z), z),
    "scan": scanned,
    "while": while_below,
    "cond": branched,
    "jit": jax.jit(lambda x, z: one_round(one_round(x, z), z)),
    "checkpoint": jax.checkpoint(lambda x, z: one_round(one_round(x, z), z)),
}


@pytest.mark.parametrize("fun", NESTED.values(), ids=NESTED)
def test_the_part_of_the_server_inside_of_control_flow(fun):
    @fg.program(z=fg.CLIENTS)
    def program(kept, told, z):
        return apart(lambda x: fun(x, z), told, kept, ("clients",))

    x, z = jnp.array([0.3, -0.4]), jnp.array([[0.5, 1.0], [-1.0, 2.0], [0.1, 0.2]])
    found = fg.jacobian(program, "kept", mode="forward")(x, x, z)
    # Sums are constants: the derivative is that of x + sin(x) / 2, twice.
    middle = x + 0.5 * jnp.sin(x) + jnp.mean(jnp.tanh(x[None] * z), 0)
    close(found, jnp.diag((1 + 0.5 * jnp.cos(x)) * (1 + 0.5 * jnp.cos(middle))))
    told = fg.jacobian(program, "told", mode="forward")(x, x, z)
    whole = jax.jacobian(lambda x: plain_rounds(x, z))(x)
    assert abs(whole - found).max() > 0.1 and np.isfinite(told).all()


def plain_rounds(x, z):
    for _ in range(2):
        x = x + 0.5 * jnp.sin(x) + jnp.mean(jnp.tanh(x[None] * z), 0)
    return x


def test_a_custom_derivative_around_communication_is_kept():
    """It stays what it is; what comes out of it counts as said by clients."""

    @jax.custom_jvp
    def ours(x, z):
        return one_round(x, z)

    ours.defjvp(lambda primals, tangents: (ours(*primals), 7.0 * tangents[0]))

    @fg.program(z=fg.CLIENTS)
    def program(kept, told, z):
        return apart(lambda x: 2 * ours(x, z) + x, told, kept, ("clients",))

    x, z = jnp.array(0.3), jnp.array([0.5, 1.0])
    close(fg.grad(program, "told", mode="forward")(x, x, z), 14.0)
    close(fg.grad(program, "kept", mode="forward")(x, x, z), 1.0)


def test_carried_values_are_as_they_are():
    """Both ways, with derivatives of their own, and second ones through the slopes."""
    value, slope, at = jnp.array([1.0, 2.0]), jnp.array([[3.0], [4.0]]), jnp.array([5.0])

    def fun(value, slope, at):
        return carried([value], [[slope]], [at])[0] ** 2

    close(fun(value, slope, at), value**2)
    for jacobian in (jax.jacfwd, jax.jacrev):
        close(jacobian(fun, 2)(value, slope, at), 2 * value[:, None] * slope)
        close(jacobian(fun)(value, slope, at), jnp.diag(2 * value))
    _, move = jax.jvp(lambda at: fun(value, jnp.full((2, 1), jnp.inf), at), (at,), (at * 0,))
    assert np.isnan(move).all() and np.isfinite(fun(value, slope * jnp.inf, at)).all()


# ---- any algorithm: the model may be an average, and not all of a state is floating


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Averaged:
    inner: Any
    average: Any
    rounds: Any
    key: Any

    @property
    def params(self):
        return self.average


def averaged(inner):
    """The mean of all models so far is the model."""

    def init(params, hyper):
        return Averaged(inner.init(params, hyper), params, jnp.int32(0), KEY)

    @fg.program(cohort=fg.CLIENTS)
    def round(state, hyper, cohort, key):
        new, metrics = inner.round(state.inner, hyper, cohort, key)
        count = state.rounds + 1
        part = 1 / (count + 1).astype(float)

        def mixed(a, x):
            return a + part.astype(a.dtype) * (x - a)

        average = jax.tree.map(mixed, state.average, new.params)
        return Averaged(new, average, count, state.key), metrics

    return fg.Algorithm(init, round, inner.hyper, loss)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_at_an_averaged_model(executor):
    row = TABLE["fedavgm"]
    tuned = still(averaged(row.algorithm), row.learn, horizon=math.inf)
    seen, end = run(tuned, ROUNDS + 1, executor)
    state, metrics = seen[-1]
    clients = [CLIENTS[i] for i in TRAIN]

    @functools.partial(jax.jacfwd, has_aux=True)
    def average(raw):
        hyper = fg.hyper.replace(row.algorithm.hyper, raw)
        x, m, all_of_them = as_params(START), ZEROS, [as_params(START)]
        for _ in range(ROUNDS):
            x, m = avgm(hyper, x, m, mean_update(hyper, x, clients, plain))
            all_of_them.append(x)
        mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *all_of_them)
        return mean, mean

    slopes, mean = jax.jit(average)(central("fedavgm")[0])
    close(as_vector(state.params), as_vector(mean))
    gradient = by_hand.slope(as_vector(mean), together(FRESH))
    for path, found in metrics.hypergradient.items():
        close(as_vector(state.sensitivity[path].average), vector_of(slopes, path))
        close(found, gradient @ vector_of(slopes, path))
    assert state.sensitivity[path].rounds is None and state.sensitivity[path].key is None
    assert int(end.inner.rounds) == ROUNDS + 1


def test_what_acts_later_can_be_learned_with_a_horizon():
    """A rate that is kept for the next round: in one round it has no effect."""
    inner = TABLE["fedavg"].algorithm

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Delayed:
        inner: Any
        scale: Any

        @property
        def params(self):
            return self.inner.params

    @fg.program(cohort=fg.CLIENTS)
    def round(state, hyper, cohort, key):
        now = {**hyper, "server": {"learning_rate": state.scale}}
        new, metrics = inner.round(state.inner, now, cohort, key)
        return Delayed(new, hyper["server"]["learning_rate"]), metrics

    def init(params, hyper):
        return Delayed(inner.init(params, hyper), jnp.asarray(0.7, float))

    delayed = fg.Algorithm(init, round, inner.hyper, loss)
    with pytest.raises(fg.ArgumentError, match=r"no derivative by 'server\.learning_rate'"):
        run(still(delayed, "server"), 1)
    seen, _ = run(still(delayed, "server", horizon=math.inf), 3)
    slopes = [float(metrics.hypergradient["server.learning_rate"]) for _, metrics in seen]
    assert slopes[0] == slopes[1] == 0 and slopes[2] != 0


# ---- what it sends

WIDTH = 10


def wide(params, batch):
    return (batch["x"] @ params - batch["y"]) ** 2


WIDE = fg.population(
    [{"x": np.ones((k, WIDTH)), "y": np.ones(k)} for k in (3, 5, 2, 4)],
)


def planned(learn, **options):
    tuned = fg.self_tuning(fg.fed_avgm(wide, ordered(0.1)), learn, optax.sgd(0.01), **options)
    state = tuned.init(jnp.ones(WIDTH))
    args = state, tuned.hyper, WIDE.select([0, 1]), KEY, WIDE.select([2, 3])
    plan = fg.plan(tuned.round, *args)
    assert plan.audit().only_sums and plan.rounds == 1 and plan.readdressed == ()
    traffic = {t.placement: (t.down, t.up) for t in plan.traffic}
    return traffic["clients"], traffic["gradient"], plan


LEARNED = {
    "server.learning_rate": (1, 0),  # learned numbers, of which act at clients
    "client.learning_rate": (1, 1),
    "server": (2, 0),
}


@pytest.mark.parametrize("mode", ["auto", "forward"])
@pytest.mark.parametrize("learn", LEARNED)
def test_one_more_model_down_and_up_for_each_learned_number(learn, mode):
    numbers, at_clients = LEARNED[learn]
    (down, up), judges, _ = planned(learn, mode=mode)
    for horizon, models in ((math.inf, numbers), (20, numbers), (fg.Horizon(20, "server"), 0)):
        found, same, plan = planned(learn, mode=mode, horizon=horizon)
        more_up = 0 if not models else (models - at_clients) * WIDTH
        assert found == (down + models * WIDTH, up + more_up)
        assert same == judges
        assert f"{found[0]} floats" in str(plan), "and it is shown"


# ---- what is not finite is forgotten


@pytest.mark.parametrize("guard", [None, 1000.0, "paired"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sensitivity_that_is_not_finite_is_forgotten(value, guard):
    """All of it if it has grown to infinity; NaN is taken for a kink, and only that for 0."""
    row, lost = TABLE["fedavgm"], "server.momentum"
    tuned = still(row.algorithm, row.learn, horizon=math.inf, guard=guard)
    _, state = run(tuned, 2)

    def after(change):
        moved = change(state.sensitivity[lost])
        start = dataclasses.replace(state, sensitivity={**state.sensitivity, lost: moved})
        ((_, metrics),), end = run(tuned, 1, state=start)
        return metrics, end

    def bias(one, value):
        return dataclasses.replace(one, params={**one.params, "b": jnp.asarray(value)})

    found = after(lambda one: bias(one, value))
    wanted = after(
        lambda one: bias(one, 0.0) if math.isnan(value) else jax.tree.map(jnp.zeros_like, one)
    )
    assert wanted[0].hypergradient[lost] != 0 or not math.isnan(value)
    jax.tree.map(close, found[0], wanted[0])
    jax.tree.map(
        close, dataclasses.replace(found[1], fallback=0), dataclasses.replace(wanted[1], fallback=0)
    )


# ---- the guard that compares in pairs


def linear(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def regression(clients, noise, seed=0, size=(5, 40)):
    """Clients who differ in what is right for them, and in how much data they have."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=4)

    def one(k):
        x = rng.normal(size=(k, 4))
        own = truth + noise * rng.normal(size=4)
        return {"x": x, "y": x @ own + noise * rng.normal(size=k)}

    return fg.population([one(k) for k in rng.integers(*size, size=clients)])


def trained(tuned, population, rounds, seed, state=None, cohort=8):
    state = tuned.init({"w": jnp.zeros(4)}) if state is None else state
    rows = []
    for t in range(rounds):
        key = jax.random.fold_in(jax.random.key(seed), t)
        cohorts = [population.sample(k, cohort) for k in jax.random.split(key)]
        state, metrics = tuned.round(state, tuned.hyper, cohorts[0], key, cohorts[1])
        rows.append(metrics)
    return state, rows


@functools.cache
def paired(schedule="parallel", client=0.05, momentum=0.5, speed=1e-4):
    return fg.self_tuning(
        fg.fed_avgm(linear, fg.local_training(client, batch_size=10), 1.0, momentum),
        {"client.learning_rate": fg.log(), "server.momentum": fg.linear(0, 50)},
        optax.sgd(speed),
        schedule=schedule,
        guard="paired",
    )


# What a step has made of one of the two. Both are learned as they are given here.
RUINED = {"client.learning_rate": math.log(3.0), "server.momentum": 40.0}


@pytest.mark.parametrize("name", RUINED)
@pytest.mark.parametrize("schedule", ["parallel", "serial"])
def test_a_step_that_ruins_the_model_is_undone_and_blamed(schedule, name):
    tuned, population = paired(schedule), regression(40, 0.3)
    good, _ = trained(tuned, population, 8, seed=0)
    assert int(good.rejected) == 0
    learned = {**good.learned, name: jnp.asarray(RUINED[name])}
    bad = dataclasses.replace(good, learned=learned)
    state, rows = trained(tuned, population, 8, seed=1, state=bad)
    assert [int(m.rejected) for m in rows].count(1) == int(state.rejected) == 1
    for n, value in state.learned.items():  # the one is where it was good, the other was left alone
        assert abs(value - good.learned[n]) < 0.01, n
    losses = [float(m.gradient_loss) for m in rows]
    assert max(losses) > 2 and max(losses[4:]) < 1.2


def test_a_round_that_is_undone_leaves_what_was_good():
    """The model before is back, with all that belongs to it; the sensitivity is forgotten."""
    tuned, population = paired(), regression(40, 0.3)
    good, _ = trained(tuned, population, 8, seed=0)
    learned = {**good.learned, "client.learning_rate": jnp.asarray(math.log(3.0))}
    bad = dataclasses.replace(good, learned=learned)
    ruined, _ = trained(tuned, population, 1, seed=1, state=bad)
    back, (metrics,) = trained(tuned, population, 1, seed=2, state=ruined)
    assert int(metrics.rejected) == 1
    jax.tree.map(np.testing.assert_array_equal, back.inner, good.inner)
    jax.tree.map(np.testing.assert_array_equal, back.optimizer, ruined.optimizer)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(back.sensitivity))
    assert float(back.proven.usual) == float(ruined.proven.usual)
    jax.tree.map(np.testing.assert_array_equal, back.proven.used, back.proven.learned)


def test_a_bad_start_is_stepped_back_until_it_is_none():
    tuned = paired(client=30.0)
    state, rows = trained(tuned, regression(40, 0.3), 40, seed=0)
    assert int(state.rejected) >= 4 and not any(int(m.rejected) for m in rows[-10:])
    assert max(float(m.gradient_loss) for m in rows[-10:]) < 2


def test_noise_of_cohorts_alone_rejects_nothing():
    """20 runs on seeds that nothing was chosen with; the loss goes up in nearly half of the rounds,
    sometimes by a lot, and rates are large enough for that to be real."""
    tuned, population = paired(client=0.1, momentum=0.0, speed=0.0), regression(60, 1.0)
    rises = []
    for seed in range(100, 120):
        state, rows = trained(tuned, population, 40, seed)
        assert int(state.rejected) == 0
        losses = np.array([float(m.gradient_loss) for m in rows])
        rises.append(losses[20:] / losses[19:-1])
    assert np.mean(np.array(rises) > 1) > 0.4 and np.max(rises) > 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_comparison_by_hand(executor):
    """The example-weighted mean difference, and the standard errors of weighted means."""
    program = fg.GradientCohort().program(loss).on(EXECUTORS[executor])
    one, other = START, START + np.array([0.3, -0.2, 0.5])
    value, (_, found) = program(as_params(one), as_params(other), POPULATION.select(FRESH + TRAIN))
    clients = [CLIENTS[i] for i in FRESH + TRAIN]
    sizes = by_hand.sizes_of(clients).astype(float)
    a, b = (np.array([by_hand.value(x, c) for c in clients]) for x in (one, other))
    close(value, sizes @ a / sizes.sum())

    def error(x):
        mean, count = sizes @ x / sizes.sum(), sizes.sum() ** 2 / (sizes @ sizes)
        spread = np.sqrt(sizes**2 @ (x - mean) ** 2) / sizes.sum()
        return spread * np.sqrt(count / (count - 1))

    close(found.difference, sizes @ (a - b) / sizes.sum(), rtol=1e-6)
    close(found.error, error(a - b), rtol=1e-5)
    close(found.spread, error(b), rtol=1e-5)


def test_a_comparison_sends_one_more_model_down_and_a_few_numbers_up():
    train, (down, up), _ = planned("server")
    same, (more_down, more_up), _ = planned("server", guard="paired")
    assert same == train and (more_down, more_up) == (down + WIDTH, up + 7)


def test_what_is_worse_than_chance():
    table = [  # loss, difference, its error, spread, usual, whether it is
        (1.0, 0.6, 0.1, 0.1, 0.0, True),
        (1.0, 0.4, 0.1, 0.1, 0.0, False),  # within the standard error of the loss
        (1.0, 0.6, 0.1, 0.1, 0.2, False),  # rounds change it that much
        (1.0, 0.6, 0.4, 0.1, 0.0, False),  # for other clients it may be better
        (1.0, -9.0, 0.1, 0.1, 0.0, False),
        (1.0, 9.0, 0.0, 0.0, 0.0, False),  # one client, the first round
        (1.0, 9.0, 0.0, 0.0, 1.0, True),
        (math.nan, math.nan, math.nan, 0.1, 0.1, True),
        (math.inf, math.inf, math.nan, 0.1, 0.1, True),
        (1.0, math.nan, math.nan, math.nan, 0.1, False),  # the one before was not finite
    ]
    for value, difference, error, spread, usual, expected in table:
        found = Comparison(*map(jnp.float32, (difference, error, spread)))
        assert bool(got_worse(jnp.float32(value), found, jnp.float32(usual))) is expected


# ---- what a long horizon buys


def test_one_round_shrinks_a_rate_that_many_rounds_raise():
    """A valley: steep across, where clients disagree, and flat along, where the way is long."""
    curvature, rng = jnp.array([1.0, 0.02]), np.random.default_rng(0)
    valley = fg.population([{"y": 2 * rng.normal(size=(4, 2))} for _ in range(100)])

    def height(params, batch):
        return 0.5 * jnp.sum(curvature[None] * (params[None] - batch["y"]) ** 2, axis=-1)

    start = 0.5

    def after(horizon):
        tuned = fg.self_tuning(
            fg.fed_sgd(height, start),
            {"server.learning_rate": fg.log(1e-3, 1)},
            optax.adam(0.03),
            horizon=horizon,
        )
        end = [
            fg.fit(
                tuned,
                valley,
                params=jnp.array([0.0, 10.0]),
                rounds=100,
                cohort_size=5,
                key=jax.random.key(seed),
                progress=False,
            )
            for seed in range(3)
        ]
        rates = [float(one.hyper["server"]["learning_rate"]) for one in end]
        return np.array(rates), np.array([float(one.params[1]) for one in end])

    greedy, left = after(1)
    fixed = 10 * (1 - start * 0.02) ** 100
    assert (greedy < 0.9 * start).all()
    for horizon in (20, fg.Horizon(20, "server")):
        rates, way = after(horizon)
        assert (rates > 1.1 * start).all() and (way < np.minimum(left, fixed) - 0.5).all()


# ---- state

AVGM = TABLE["fedavgm"].algorithm


def test_a_state_keeps_its_types_and_rounds_are_compiled_once():
    traces = []

    def counted(params, batch):
        traces.append(None)
        return loss(params, batch)

    tuned = fg.self_tuning(
        averaged(fg.fed_avgm(counted, ordered(0.1))),
        ["server", "client"],
        optax.adam(0.01),
        guard="paired",
        horizon=20,
    )
    params = {"b": jnp.asarray(0.1, jnp.float32), "w": jnp.asarray(START[1:], jnp.bfloat16)}
    state = first = tuned.init(params)
    for t in range(3):
        key = jax.random.key(t)
        cohorts = POPULATION.sample(key, 3), key, POPULATION.sample(key, 2)
        state, _ = tuned.round(state, tuned.hyper, *cohorts)
        assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, first)
        if t == 0:
            once = len(traces)
    assert len(traces) == once


def test_a_run_is_resumed_where_it_was(tmp_path):
    tuned = fg.self_tuning(AVGM, ["server"], guard="paired", horizon=fg.Horizon(20, "server"))

    def after(rounds, **options):
        return fg.fit(
            tuned,
            POPULATION,
            params=as_params(START),
            rounds=rounds,
            cohort_size=3,
            key=KEY,
            progress=False,
            **options,
        )

    after(2, out=fg.run_folder(tmp_path / "run", every=1))
    resumed = after(4, out=fg.run_folder(tmp_path / "run", every=1, resume=True))
    jax.tree.map(np.testing.assert_array_equal, resumed.state, after(4).state)


# ---- mistakes

MISTAKES = {
    "no rounds": (lambda: fg.self_tuning(AVGM, "server", horizon=0), "at least 1, got 0"),
    "a word": (lambda: fg.self_tuning(AVGM, "server", horizon="long"), "number of rounds"),
    "part": (lambda: fg.Horizon(through="clients"), "Known: all, server"),
    "nothing to carry": (lambda: fg.Horizon(1, "server"), "nothing is carried"),
    "guard": (lambda: fg.self_tuning(AVGM, "server", guard="pairs"), '"paired"'),
    "guard of nothing": (lambda: fg.self_tuning(AVGM, "server", guard=0.0), "got 0.0"),
}


@pytest.mark.parametrize("mistake, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(mistake, message):
    with pytest.raises(fg.ArgumentError, match=message) as raised:
        mistake()
    assert str(raised.value).startswith(__file__), "it names the line of the user"
