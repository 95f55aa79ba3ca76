"""Every algorithm against its formula in plain numpy, and laws that hold for all of them."""

import dataclasses
import functools
import inspect
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import by_hand
import fedgrad as fg
from by_hand import (
    BATCH,
    CLIENTS,
    POPULATION,
    START,
    STATELESS,
    Adam,
    Sgd,
    as_params,
    as_vector,
    loss,
)
from fedgrad.algorithms.fed_nova import PerStep
from fedgrad.algorithms.hyper import LOOKED_AT
from fedgrad.algorithms.optimizer import as_optimizer, in_words
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.clients.examples import Examples
from laws import EXECUTORS

COHORTS = [[0, 1, 2], [3, 1, 0], [2, 3, 1]]
RATE = 0.3  # of the clients
EXACT = 1e-12  # what float64 keeps of a few rounds: one number in float32 costs 1e-8
ordered = functools.partial(fg.local_training, batch_size=BATCH, shuffle=False)
ORDERED = {"client": ordered(RATE)}


def run(algorithm, executor=None, cohorts=COHORTS, params=None, key=0, hyper=None):
    """(the models after each round, the metrics of each round)."""
    state = algorithm.init(as_params(START) if params is None else params, hyper)
    hyper = algorithm.hyper if hyper is None else hyper
    round = algorithm.round if executor is None else algorithm.round.on(executor)
    models, found = [], []
    for t, chosen in enumerate(cohorts):
        now = jax.random.fold_in(jax.random.key(key), t)
        state, metrics = round(state, hyper, POPULATION.select(chosen), now)
        models.append(state.params)
        found.append(metrics)
    return models, found


# ---- what the server does, by hand: (model, clients' updates, weights, memory) -> model


def sgd(rate=1.0):
    return lambda x, deltas, weights, memory: x - rate * by_hand.mean(weights, deltas)


def momentum(x, deltas, weights, memory, rate=0.7, decay=0.8):
    memory["m"] = decay * memory.get("m", 0) + by_hand.mean(weights, deltas)
    return x - rate * memory["m"]


def adaptive(second, b1=0.9, b2=0.99, rate=0.1, tau=1e-3):
    """Reddi et al. 2021, Algorithm 2. Its Δ is ours with the other sign; v_{-1} = τ²."""

    def rule(x, deltas, weights, memory):
        delta = -by_hand.mean(weights, deltas)
        memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * delta
        v = memory.get("v", np.full_like(x, tau**2))
        memory["v"] = {
            "adagrad": lambda: v + delta**2,
            "yogi": lambda: v - (1 - b2) * delta**2 * np.sign(v - delta**2),
            "adam": lambda: b2 * v + (1 - b2) * delta**2,
        }[second]()
        return x + rate * memory["m"] / (np.sqrt(memory["v"]) + tau)

    return rule


def fed_exp(x, deltas, weights, memory, epsilon=1e-3):
    """Jhunjhunwala et al. 2023, equation 2, with M clients."""
    mean = deltas.mean(0)
    together = sum(np.sum(d**2) for d in deltas) / (2 * len(deltas) * (np.sum(mean**2) + epsilon))
    memory.setdefault("rates", []).append(together)
    return x - max(1.0, together) * mean


def fed_nova(decay=0.0, rate=0.9):
    """Wang et al. 2020, equation 9: τ_eff Σ p_i d_i, d_i = Δ_i / |a_i|₁; a step moves the model
    again in all later ones, by the decay."""

    def rule(x, deltas, weights, memory):
        steps = np.ceil(weights / BATCH).astype(int)
        moved = [sum(sum(decay**k for k in range(n - j)) for j in range(n)) for n in steps]
        together = by_hand.mean(weights, moved)
        return x - rate * together * by_hand.mean(weights, deltas / np.array(moved)[:, None])

    return rule


def fed_hyper(x, deltas, weights, memory):
    d = -by_hand.mean(weights, deltas)
    before = memory.get("d", np.zeros_like(d))
    memory["agg"] = np.clip(memory.get("agg", 0.0) + before @ d, -0.8, 4.0)
    memory["d"] = d
    return x + (1 + memory["agg"]) * d


def hypergradient(x, deltas, weights, memory, kappa=0.5):
    g = by_hand.mean(weights, deltas)
    memory["rate"] = memory.get("rate", 1.2) + kappa * g @ memory.get("g", np.zeros_like(g))
    memory["g"] = g
    return x - memory["rate"] * g


def by_optax(optimizer):
    """optax itself, given the mean that was computed by hand."""

    def rule(x, deltas, weights, memory):
        params, update = as_params(x), as_params(by_hand.mean(weights, deltas))
        state = memory["state"] if memory else optimizer.init(params)
        with jax.numpy_dtype_promotion("standard"):  # its schedules count on it
            moves, memory["state"] = jax.jit(optimizer.update)(update, state, params)
        return as_vector(optax.apply_updates(params, moves))

    return rule


# ---- what a step of a client follows, by hand: (model, server's model, batch) -> gradient


def proximal(now, start, batch, weight=0.6):
    """Of F_i(w) + weight/2 |w - w_server|²."""
    return by_hand.slope(now, batch) + weight * (now - start)


def adapted(now, start, batch, rate=0.4):
    """Of F(w - rate ∇F(w)): (1 - rate ∇²F(w)) ∇F there."""
    there = by_hand.slope(now - rate * by_hand.slope(now, batch), batch)
    return there - rate * by_hand.curvature(now, batch) @ there


CHANGED = {  # what a step follows, and the loss whose gradient that is
    "proximal": (
        proximal,
        lambda w, start, batch: by_hand.value(w, batch) + 0.3 * np.sum((w - start) ** 2),
    ),
    "adapted": (
        adapted,
        lambda w, start, batch: by_hand.value(w - 0.4 * by_hand.slope(w, batch), batch),
    ),
}


@pytest.mark.parametrize("slope, value", CHANGED.values(), ids=CHANGED)
def test_the_gradients_by_hand_are_those_of_finite_differences(slope, value):
    now, batch = START + 0.2, CLIENTS[0]
    expected = by_hand.numerical_slope(lambda w: value(w, START, batch), now)
    np.testing.assert_allclose(slope(now, START, batch), expected, rtol=1e-8)


@dataclass(frozen=True)
class Row:
    algorithm: fg.Algorithm
    server: Any
    gradient: Any = None
    weights: Any = np.copy  # from the numbers of examples
    client: Any = lambda: Sgd(RATE)
    order: Any = None
    whole: bool = False  # the update is the gradient of all of a client's examples


def optimizer_row(make, optimizer):
    return Row(make(loss, **ORDERED), by_optax(optimizer))


TABLE = {
    "fedadagrad": Row(fg.fed_adagrad(loss, **ORDERED), adaptive("adagrad", b1=0.0)),
    "fedadam": Row(fg.fed_adam(loss, **ORDERED), adaptive("adam")),
    "fedavg": Row(fg.fed_avg(loss, **ORDERED, server_learning_rate=0.9), sgd(0.9)),
    "fedavgm": Row(fg.fed_avgm(loss, **ORDERED, server_learning_rate=0.7, momentum=0.8), momentum),
    "feddog": optimizer_row(fg.fed_dog, optax.contrib.dog(1.0)),
    "fedexp": Row(fg.fed_exp(loss, **ORDERED), fed_exp, weights=np.ones_like),
    "fedhyper": Row(fg.fed_hyper(loss, **ORDERED), fed_hyper),
    "fedhypergradient": Row(
        fg.fed_hypergradient(loss, **ORDERED, server_learning_rate=1.2, hyper_learning_rate=0.5),
        hypergradient,
    ),
    "fedmechanic": optimizer_row(
        fg.fed_mechanic, optax.contrib.mechanize(optax.sgd(1.0, momentum=0.9), weight_decay=0.0)
    ),
    "fednova": Row(fg.fed_nova(loss, **ORDERED, server_learning_rate=0.9), fed_nova()),
    "fednova, momentum": Row(
        fg.fed_nova(loss, ordered(fg.optimizer(optax.sgd, learning_rate=0.3, momentum=0.6)), 0.9),
        fed_nova(0.6),
        client=lambda: Sgd(0.3, momentum=0.6),
    ),
    "fedprodigy": optimizer_row(fg.fed_prodigy, optax.contrib.prodigy(1.0)),
    "fedprox": Row(fg.fed_prox(loss, **ORDERED, proximal_weight=0.6), sgd(), proximal),
    "fedsgd": Row(fg.fed_sgd(loss, 0.8, batch_size=BATCH), sgd(0.8), whole=True),
    "fedyogi": Row(fg.fed_yogi(loss, **ORDERED), adaptive("yogi")),
    "perfedavg": Row(fg.per_fed_avg(loss, **ORDERED, adaptation_rate=0.4), sgd(), adapted),
    # and what can be said to any of them
    "epochs": Row(
        fg.fed_avg(loss, ordered(RATE, epochs=2), weighting="uniform"),
        sgd(),
        weights=np.ones_like,
        order={"epochs": 2},
    ),
    "steps": Row(fg.fed_avg(loss, ordered(RATE, steps=4)), sgd(), order={"steps": 4}),
    "client adam": Row(
        fg.fed_avg(loss, ordered(optax.adam(0.1), batch_size=100, steps=3)),
        sgd(),
        client=lambda: Adam(0.1),
        order={"size": 100, "steps": 3},
    ),
    "power": Row(
        fg.fed_avg(
            loss,
            ordered(fg.optimizer(optax.sgd, learning_rate=0.2, momentum=0.5)),
            weighting="power",
        ),
        sgd(),
        client=lambda: Sgd(0.2, momentum=0.5),
    ),
    "rates by layer": Row(
        fg.fed_avg(
            loss,
            ordered({"b": 1, "w": 0.25}),
            server_learning_rate={"b": 0.5, "w": 2.0},
        ),
        sgd(np.array([0.5, 2.0, 2.0])),
        client=lambda: Sgd(np.array([1.0, 0.25, 0.25])),
    ),
}
# What is done by clients, and not only by the server, is done on every executor.
CASES = [(name, "local") for name in TABLE] + [
    (name, executor)
    for name in ("fedavgm", "fedsgd", "perfedavg")
    for executor in ("reference", "chunked")
]


def test_every_algorithm_is_in_the_table():
    assert set(STATELESS) <= set(TABLE)


@pytest.mark.parametrize("name, executor", CASES)
def test_formula(name, executor):
    row = TABLE[name]
    cohorts = COHORTS[:2] if executor == "reference" else COHORTS
    models, metrics = run(row.algorithm, EXECUTORS[executor], cohorts)
    x, memory = START, {}
    for chosen, model, found in zip(cohorts, models, metrics, strict=True):
        clients = [CLIENTS[i] for i in chosen]
        if row.whole:
            pairs = [(by_hand.slope(x, c), by_hand.value(x, c)) for c in clients]
        else:
            pairs = [
                by_hand.train(x, c, row.client(), row.gradient, **(row.order or {}))
                for c in clients
            ]
        deltas, values = (np.array(part) for part in zip(*pairs, strict=True))
        weights = row.weights(by_hand.sizes_of(clients).astype(float))
        x = row.server(x, deltas, weights, memory)
        np.testing.assert_allclose(as_vector(model), x, rtol=EXACT)
        if name != "perfedavg":  # it reports the loss after the client's step
            expected = by_hand.mean(weights, values)
            np.testing.assert_allclose(found.loss, expected, rtol=EXACT)
    if name == "fedexp":
        assert max(memory["rates"]) > 1, "both sides of its maximum are to be seen"
        assert min(memory["rates"]) < 1


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99, 0.999, 0.999999, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_steps_with_momentum_count(momentum, dtype):
    """FedNova's |a|, also where momentum is nearly 1: a difference of large numbers."""
    client = ordered(fg.optimizer(optax.sgd, learning_rate=0.1, momentum=momentum), batch_size=1)
    work, decay = PerStep(client), float(np.dtype(dtype).type(momentum))
    for number in (1, 2, 5, 30, 400):
        with jax.enable_x64(dtype == "float64"):
            examples = Examples.of({"y": jnp.zeros(number)})
            found = work.steps(examples, {"client": {"momentum": jnp.asarray(decay, dtype)}})
            assert found.dtype == dtype
        expected = sum(sum(decay**k for k in range(n)) for n in range(1, number + 1))
        np.testing.assert_allclose(found, expected, rtol=2e-5 if dtype == "float32" else 1e-12)


def test_weight_exponent():
    algorithm = TABLE["power"].algorithm
    assert algorithm.hyper["weight_exponent"] == 1.0
    clients = [CLIENTS[i] for i in COHORTS[0]]
    deltas = np.array([by_hand.train(START, c, Sgd(0.2, momentum=0.5))[0] for c in clients])
    for exponent in (0.0, 0.5, 1.0, -2.0):
        hyper = fg.hyper.replace(algorithm.hyper, {"weight_exponent": exponent})
        (model,), _ = run(algorithm, cohorts=COHORTS[:1], hyper=hyper)
        mean = by_hand.mean(by_hand.sizes_of(clients) ** exponent, deltas)
        np.testing.assert_allclose(as_vector(model), START - mean, rtol=1e-12)


def test_hyperparameters_are_arguments_and_not_captured():
    algorithm = TABLE["fedavgm"].algorithm
    hyper = {"server": {"learning_rate": 0.2, "momentum": 0.1}, "client": {"learning_rate": 0.05}}
    models, _ = run(algorithm, hyper=hyper)
    x, memory = START, {}
    for chosen, model in zip(COHORTS, models, strict=True):
        clients = [CLIENTS[i] for i in chosen]
        deltas = np.array([by_hand.train(x, c, Sgd(0.05))[0] for c in clients])
        x = momentum(x, deltas, by_hand.sizes_of(clients), memory, rate=0.2, decay=0.1)
        np.testing.assert_allclose(as_vector(model), x, rtol=1e-11)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_it_is_made_of_is_said(name):
    settings = ALGORITHMS[name](loss, batch_size=7).settings
    assert settings["client"]["batch_size"] == 7 and settings["name"] != "FedOpt"
    assert "optax" not in settings["server"]["optimizer"]
    if name != "fedsgd":  # whose clients take no steps
        usual = {"batch_size": 7, "optimizer": "sgd", "epochs": 1, "shuffle": True}
        assert settings["client"] == usual


def test_what_fed_opt_is_made_of_is_said():
    server = fg.optimizer(optax.adamw, learning_rate=0.1, nesterov=True)
    work = fg.local_training(optax.sgd(0.1), steps=lambda round: 2 + 0 * round)
    settings = fg.fed_opt(loss, server=server, client=work).settings
    assert settings["server"] == {"optimizer": "adamw, nesterov=True"}
    told = {"optimizer": "scale(step_size=-0.1)", "steps": "a schedule"}
    assert settings["client"] == {"batch_size": 20, **told, "shuffle": True}
    assert fg.fed_dyn(loss).settings["server"] == {"optimizer": "sgd, learning_rate=1.0"}


def test_what_optax_has_made_is_said():
    """By what its functions hold; two that differ are told apart."""
    clipped = optax.chain(optax.clip(1.0), optax.sgd(optax.constant_schedule(0.1), momentum=0.9))
    found = as_optimizer(clipped, "client").words
    parts = ("clip(max_delta=1.0)", "trace(decay=0.9, nesterov=False)", "value=0.1")
    assert all(part in found for part in parts), found
    for make in (
        optax.adam,
        lambda rate: optax.sgd(jnp.float32(rate)),
        lambda rate: optax.multi_transform({"a": optax.sgd(rate), "b": optax.adam(1.0)}, "a"),
    ):
        assert in_words(make(0.1)) != in_words(make(0.2))

    def unset():
        """Of a name that has no value yet."""
        made = optax.GradientTransformation(lambda params: (), lambda g, s, params=None: (late, s))
        words = in_words(made)
        late = ()
        return words

    assert unset() == "an optimizer of optax"
    own = optax.GradientTransformation(lambda params: (), lambda g, state, params=None: (g, state))
    assert in_words(own) == "an optimizer of optax"


KEYED = [make for make in ALGORITHMS.values() if make.__name__ != "fed_sgd"]


@pytest.mark.parametrize("make", KEYED, ids=lambda make: make.__name__)
def test_the_usual_work_of_a_client_in_keywords(make):
    """The same round as with all of it said in client=."""
    found = make(loss, client_learning_rate=0.2, batch_size=7, epochs=2)
    same = make(loss, fg.local_training(0.2, batch_size=7, epochs=2))
    assert found.hyper == same.hyper
    state, cohort, key = found.init(as_params(START)), POPULATION.select([0, 1]), jax.random.key(0)
    own = {}
    if found.client_init is not None:
        one = found.client_init(as_params(START), 2)
        own = {"client_state": jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *x.shape)), one)}

    def jaxpr(algorithm):
        return jax.make_jaxpr(lambda *args: algorithm.round(*args, **own))(
            state, found.hyper, cohort, key
        )

    assert re.sub("0x[0-9a-f]+", "", str(jaxpr(found))) == re.sub(
        "0x[0-9a-f]+", "", str(jaxpr(same))
    )
    assert len(inspect.signature(make).parameters) <= 10


# ---- a client's order of its examples


BASE = 7  # the examples of a client are the digits 1 ... 6


def digits(sizes):
    return fg.population(
        [{"y": np.arange(k) + 1.0, "who": np.full(k, i)} for i, k in enumerate(sizes)]
    )


def spelled(params, batch):
    """Steps of SGD with rate 1 - 1/7 make p = p/7 + (1 - 1/7) y: they write down the digits y."""
    mine = params[batch["who"]]
    return (mine - batch["y"]) ** 2 / 2


SPELLING = {
    key: fg.fed_avg(
        spelled, fg.local_training(1 - 1 / BASE, batch_size=1, **many), weighting="uniform"
    )
    for key, many in ((2, {"epochs": 2}), (1, {"steps": 8}))
}


def orders(population, chosen, key, epochs=2, executor=None):
    """The order in which each of these clients used its examples."""
    algorithm = SPELLING[epochs]
    round = algorithm.round if executor is None else algorithm.round.on(executor)
    state, hyper = algorithm.init(jnp.zeros(len(population))), algorithm.hyper
    cohort = population.select(chosen)
    params = np.asarray(round(state, hyper, cohort, jax.random.key(key))[0].params)
    found = []
    for i in chosen:
        steps = int(population.counts[i]) * 2 if epochs == 2 else 8
        number = round_half(params[i] * len(chosen) / (1 - 1 / BASE) * BASE ** (steps - 1))
        found.append([number // BASE**k % BASE for k in range(steps)])
    return found


def round_half(x):
    assert abs(x - np.round(x)) < 1e-3
    return int(np.round(x))


def test_shuffling():
    population = digits([6, 5, 1, 6])
    found = orders(population, [0, 1, 2], key=0)
    for order, count in zip(found, population.counts, strict=False):
        for epoch in (order[:count], order[count:]):
            assert sorted(epoch) == list(range(1, count + 1)), "each example once"
    assert found[0][:6] != found[0][6:], "epochs have orders of their own"
    assert orders(population, [0, 1, 2], key=0) == found
    assert orders(population, [0, 1, 2], key=1) != found
    other = orders(population, [3, 1, 0], key=0)
    assert other[1:] == [found[1], found[0]], "whoever else is there"
    assert other[0] != found[0], "clients have orders of their own"
    assert orders(population, [3, 1, 0], key=0, executor=EXECUTORS["reference"]) == other


def test_steps_go_round_in_one_shuffled_order():
    population = digits([6, 5, 1])
    for order, count in zip(orders(population, [0, 1, 2], 0, 1), population.counts, strict=True):
        assert sorted(order[:count]) == list(range(1, count + 1))
        assert order == [order[k % count] for k in range(8)]


# ---- losses and clients in other forms


def test_arrays_of_equal_clients_are_a_cohort():
    clients = by_hand.make_clients([8, 8, 8])
    algorithm = fg.fed_avg(loss, fg.local_training(batch_size=3, epochs=2))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *clients)
    key = jax.random.key(3)
    state, hyper = algorithm.init(as_params(START)), algorithm.hyper
    found = algorithm.round(state, hyper, stacked, key)
    same = algorithm.round(state, hyper, fg.population(clients).everyone, key)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), found, same)


def test_a_loss_that_is_one_number_is_applied_to_each_example():
    """Were it applied to a batch, the examples that pad the last batch would count."""

    def scalar(params, batch):
        assert batch["y"].shape in ((BATCH,), (1,))
        return jnp.mean(loss(params, batch))

    found = run(fg.fed_sgd(scalar, 0.8, batch_size=BATCH))
    plain = run(TABLE["fedsgd"].algorithm)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), found, plain)


def noise(params, batch, key):
    """A loss whose gradient is nothing but noise."""
    return params * jax.random.normal(key, batch["y"].shape)


def one_number_of_noise(params, batch, key):
    assert batch["y"].shape in ((4,), (1,))
    return jnp.sum(noise(params, batch, key))


@pytest.mark.parametrize("random", [noise, one_number_of_noise])
def test_a_random_loss_gets_a_new_key_each_time(random):
    """Clients, steps, examples and rounds are independent: the variances add up."""
    clients, size, steps = 300, 4, 5
    population = fg.population([{"y": np.zeros(size)}] * clients)
    algorithm = fg.fed_avg(
        random,
        fg.local_training(1.0, batch_size=size, epochs=steps, shuffle=False),
        weighting="uniform",
    )
    state = algorithm.init(jnp.zeros(()))

    def mean(key):
        return algorithm.round(state, algorithm.hyper, population.everyone, key)[0].params

    keys = jax.random.split(jax.random.key(0), 40)
    means = np.array([mean(key) for key in keys])
    assert mean(keys[0]) == means[0]
    # A client's update is the sum over steps of the mean over examples.
    expected = steps / size / clients
    assert 0.55 < np.mean(means**2) / expected < 1.7  # 40 squares: +-22 %


def test_fed_sgd_gives_a_random_loss_new_keys_too():
    population = fg.population([{"y": np.zeros(8)}] * 2)
    algorithm = fg.fed_sgd(noise, 1.0, batch_size=2)
    drawn = [
        algorithm.round(
            algorithm.init(jnp.zeros(())), algorithm.hyper, population.everyone, jax.random.key(i)
        )[0].params
        for i in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


# ---- dtypes, and one compilation


@jax.numpy_dtype_promotion("standard")
def of_all_dtypes(params, batch):
    return loss({"w": params["bfloat16"] + params["float64"], "b": params["float32"]}, batch)


def like(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


@pytest.mark.parametrize("name", STATELESS)
def test_a_state_stays_what_it_is(name):
    """Its shapes and dtypes, though the data are float64."""
    algorithm = STATELESS[name](of_all_dtypes)
    values = {"bfloat16": [0.25, -0.5], "float32": 0.1, "float64": [0.25, -0.5]}
    params = {dtype: jnp.asarray(x, dtype) for dtype, x in values.items()}
    if name == "fedmechanic":  # that of optax takes only models of one dtype
        params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
    state = algorithm.init(params)
    assert like(state.params) == like(params)
    round = algorithm.round.on(EXECUTORS["reference"])  # traced, not run
    cohort = POPULATION.select([0, 1])
    new, _ = jax.eval_shape(round, state, algorithm.hyper, cohort, jax.random.key(0))
    assert like(new) == like(state)


def narrow_loss(params, batch):
    """Computed in the dtype of the model."""
    return loss(params, jax.tree.map(lambda leaf: leaf.astype(params["w"].dtype), batch))


def with_server(make, **options):
    return fg.fed_opt(narrow_loss, server=fg.optimizer(make, **options), client=0.1)


NARROW = {
    **{name: make(narrow_loss) for name, make in ALGORITHMS.items()},
    "averaged": fg.averaged(fg.fed_avgm(narrow_loss)),
    "tuned": fg.self_tuning(fg.fed_prodigy(narrow_loss), "client", horizon=20, guard="paired"),
    "client adam": fg.fed_avg(narrow_loss, fg.optimizer(optax.adam, learning_rate=0.01)),
    "server adam": with_server(optax.adam, learning_rate=0.1),
    # Estimates that begin below what float16 can tell apart: they have to see how far they are.
    "prodigy": with_server(optax.contrib.prodigy, learning_rate=1.0, estim_lr0=1e-4),
    "dog": with_server(optax.contrib.dog, learning_rate=1.0, init_step=("distance", 1e-4)),
    "mechanic": fg.fed_opt(
        narrow_loss, server=optax.contrib.mechanize(optax.sgd(1.0), s_init=1e-4), client=0.1
    ),
}
SLOW = ("feddog", "fedmechanic", "fedprodigy", "tuned")  # that have hardly moved after some rounds


@functools.cache
def trained_in(name, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), as_params(START))
    result = fg.fit(
        NARROW[name],
        POPULATION,
        params=params,
        rounds=10 if name in SLOW else 40,
        key=jax.random.key(0),
        progress=False,
    )
    assert like(result.params) == like(params)
    return as_vector(result.params), result.history["loss"]


@pytest.mark.promotes("dtype")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NARROW)
def test_half_precision_is_near(name, dtype):
    """In float16, 1e-8 is 0, squares of small gradients are too, and steps of 1e-4 are lost."""
    (exact, expected), (found, losses) = trained_in(name, "float32"), trained_in(name, dtype)
    way = np.linalg.norm(exact - START)
    assert way > 0.2 or name in SLOW
    np.testing.assert_allclose(losses, expected, rtol=0.05)
    assert np.linalg.norm(found - exact) < 0.1 * way + 0.005


@pytest.mark.parametrize("make", [fg.fed_avg, fg.fed_sgd])
def test_a_mean_of_float16_is_not_infinite(make):
    """Of 20 losses of 5,000, whose sum is no float16."""
    clients = fg.population([{"y": np.full(40, 5e3)}] * 2)
    algorithm = make(lambda params, batch: params + batch["y"].astype(jnp.float16))
    args = clients.everyone, jax.random.key(0)
    _, metrics = algorithm.round(algorithm.init(jnp.float16(0.0)), algorithm.hyper, *args)
    np.testing.assert_allclose(metrics.loss, 5e3, rtol=1e-3)


def test_rounds_are_compiled_once():
    traces = []

    def counted(params, batch):
        traces.append(None)
        return loss(params, batch)

    algorithm = fg.fed_avgm(counted, **ORDERED)
    state = algorithm.init({"b": 0.1, "w": np.array([0.5, -1.0])})  # also a Python number
    for t in range(4):
        hyper = fg.hyper.replace(algorithm.hyper, {"server.momentum": 0.1 * t})
        cohort = POPULATION.sample(jax.random.key(t), 3)
        state, _ = algorithm.round(state, hyper, cohort, jax.random.key(t))
        if t == 0:
            first = len(traces)
    assert len(traces) == first


# ---- schedules: hyperparameters that are functions of the round number


def decay(start, rate=0.7):
    return lambda round: start * rate**round


def same_rounds(algorithm, hyper, values):
    """The same models as when each round is given its numbers by hand."""
    assert list(fg.hyper.schedules(hyper)) == sorted(values)

    def numbers(t):
        return fg.hyper.replace(hyper, {name: float(value(t)) for name, value in values.items()})

    state = algorithm.init(as_params(START), hyper)
    expected = algorithm.init(as_params(START), numbers(0))
    assert expected.rounds is None, "what nobody asks for is not counted"
    for t, chosen in enumerate(COHORTS):
        key, cohort = jax.random.key(t), POPULATION.select(chosen)
        state, metrics = algorithm.round(state, hyper, cohort, key)
        expected, seen = algorithm.round(expected, numbers(t), cohort, key)
        np.testing.assert_allclose(as_vector(state.params), as_vector(expected.params), rtol=EXACT)
        np.testing.assert_allclose(metrics.loss, seen.loss, rtol=EXACT)
    assert int(state.rounds) == len(COHORTS)


@pytest.mark.parametrize("name", STATELESS)
def test_every_hyperparameter_can_be_a_schedule(name):
    """All of them at once, each with a decay of its own."""
    algorithm = TABLE[name].algorithm
    known = fg.hyper.paths(algorithm.hyper)
    values = {path: decay(v, 0.7 + 0.02 * i) for i, (path, v) in enumerate(known.items())}
    same_rounds(algorithm, fg.hyper.replace(algorithm.hyper, values), values)


COSINE, LINEAR = optax.cosine_decay_schedule(0.3, 4), optax.linear_schedule(0.9, 0.2, 3)
SCHEDULED = {  # what a user writes, and what the schedules are called
    "client rate": (
        lambda: fg.fed_avg(loss, client=COSINE),
        {"client.learning_rate": COSINE},
    ),
    "client optimizer": (
        lambda: fg.fed_avg(loss, client=fg.optimizer(optax.adam, learning_rate=COSINE, b1=LINEAR)),
        {"client.learning_rate": COSINE, "client.b1": LINEAR},
    ),
    "server": (
        lambda: fg.fed_avgm(loss, server_learning_rate=COSINE, momentum=LINEAR),
        {"server.learning_rate": COSINE, "server.momentum": LINEAR},
    ),
    "a layer": (
        lambda: fg.fed_avg(loss, {"b": 0.1, "w": COSINE}, {"b": LINEAR, "w": 1.0}),
        {"client.learning_rate.w": COSINE, "server.learning_rate.b": LINEAR},
    ),
    "further ones": (
        lambda: fg.fed_prox(loss, proximal_weight=LINEAR),
        {"proximal_weight": LINEAR},
    ),
    "adaptive": (lambda: fg.fed_adagrad(loss, b1=LINEAR), {"server.b1": LINEAR}),
    "an integer": (
        lambda: fg.fed_avg(loss, server_learning_rate=lambda t: jnp.minimum(t, 1)),
        {"server.learning_rate": lambda t: float(min(t, 1))},
    ),
}


@pytest.mark.parametrize("make, values", SCHEDULED.values(), ids=SCHEDULED)
def test_a_schedule_counts_rounds(make, values):
    algorithm = make()
    same_rounds(algorithm, algorithm.hyper, values)


AMOUNTS = {  # how much a client does, as a schedule, and what that is in each round
    "steps": ({"steps": optax.linear_schedule(1.0, 5.0, 2)}, [1, 3, 5]),
    "fewer steps": ({"steps": lambda t: 4 - t}, [4, 3, 2]),
    "rounded": ({"steps": optax.cosine_decay_schedule(6.4, 3)}, [6, 5, 2]),
    "at least one": ({"steps": lambda t: 2 - 2 * t}, [2, 1, 1]),
    "epochs": ({"epochs": lambda t: 1 + t}, [1, 2, 3]),
}


@pytest.mark.parametrize("executor", ["local", "reference", "chunked"])
@pytest.mark.parametrize("work, each", AMOUNTS.values(), ids=AMOUNTS)
@pytest.mark.parametrize("make", [fg.fed_avgm, fg.fed_nova])
def test_how_much_a_client_does_can_be_a_schedule(make, work, each, executor):
    algorithm = make(loss, ordered(RATE, **work)).on(EXECUTORS[executor])
    (name,) = work
    assert list(fg.hyper.schedules(algorithm.hyper)) == [name]
    state = algorithm.init(as_params(START))
    for t, (chosen, amount) in enumerate(zip(COHORTS, each, strict=True)):
        args = POPULATION.select(chosen), jax.random.key(t)
        plain = make(loss, ordered(RATE, **{name: amount}))
        same = dataclasses.replace(state, rounds=None)
        expected, seen = plain.round(same, plain.hyper, *args)
        state, metrics = algorithm.round(state, algorithm.hyper, *args)
        np.testing.assert_allclose(as_vector(state.params), as_vector(expected.params), rtol=1e-10)
        np.testing.assert_allclose(metrics.loss, seen.loss, rtol=1e-10)


BOUNDED = fg.fed_avg(loss, ordered(RATE, epochs=lambda t: 2 - t % 2))


@pytest.mark.parametrize("executor", ["local", "reference", "chunked"])
@pytest.mark.parametrize("work, within", [({"epochs": 10.0}, 2.0), ({"steps": 10.0}, 3.0)])
def test_more_work_than_there_is_room_for_is_not_less_work(work, within, executor):
    """Where that is known only when the round runs; as much as there is room for is done."""
    (name,) = work
    algorithm = fg.fed_avg(loss, ordered(RATE, **{name: lambda t: within - t % 2}))
    round, state = algorithm.round.on(EXECUTORS[executor]), algorithm.init(as_params(START))
    args = POPULATION.select([0, 1]), jax.random.key(0)
    bad, metrics = round(state, fg.hyper.replace(algorithm.hyper, work), *args)
    assert np.isnan(as_vector(bad.params)).all() and np.isnan(metrics.loss)
    good, _ = round(state, fg.hyper.replace(algorithm.hyper, {name: within}), *args)
    plain = fg.fed_avg(loss, ordered(RATE, **{name: int(within)}))
    expected, _ = plain.round(plain.init(as_params(START)), plain.hyper, *args)
    np.testing.assert_allclose(as_vector(good.params), as_vector(expected.params), rtol=EXACT)


def test_a_schedule_that_grows_after_all_rounds_that_are_looked_at():
    algorithm = fg.fed_avg(loss, ordered(RATE, epochs=lambda t: jnp.where(t < LOOKED_AT, 1, 3)))
    state = algorithm.init(as_params(START))
    for rounds, known in ((LOOKED_AT - 1, True), (LOOKED_AT, False)):
        late = dataclasses.replace(state, rounds=jnp.int32(rounds))
        args = POPULATION.select([0, 1]), jax.random.key(0)
        _, metrics = algorithm.round(late, algorithm.hyper, *args)
        assert np.isfinite(metrics.loss) == known


def test_a_derivative_passes_through_work_that_is_a_schedule():
    """In every mode, by finite differences."""
    algorithm = fg.fed_avg(loss, ordered(RATE, steps=lambda t: 2 + t))
    args = POPULATION.select([0, 1]), jax.random.key(0)
    state = algorithm.init(as_params(START))

    @fg.program(cohort=fg.CLIENTS)
    def last(rate, cohort, key):
        hyper = {**algorithm.hyper, "client": {"learning_rate": rate}}
        return jnp.sum(algorithm.round(state, hyper, cohort, key)[0].params["w"])

    for mode in ("forward", "reverse", "mixed"):
        found = fg.grad(last, mode=mode)(0.3, *args)
        h = 1e-6
        expected = (last(0.3 + h, *args) - last(0.3 - h, *args)) / (2 * h)
        np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_a_schedule_of_the_servers_own_optimizer_counts_rounds_too():
    options = {"client": fg.local_training(optax.sgd(0.1), batch_size=BATCH)}
    ours = fg.fed_opt(loss, server=fg.optimizer(optax.sgd, learning_rate=COSINE), **options)
    theirs = fg.fed_opt(loss, server=optax.sgd(COSINE), **options)
    found, expected = run(ours)[0], run(theirs)[0]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(as_vector(a), as_vector(b), rtol=1e-6)


def warmed_up(learning_rate, warmup):
    return optax.chain(optax.scale_by_schedule(warmup), optax.sgd(learning_rate))


def decayed(learning_rate, decay: float, clip: "float | None" = None, scale=1, mask=None):
    return optax.chain(optax.add_decayed_weights(decay, mask), optax.sgd(learning_rate * scale))


def mask(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 0, params)


# What is given, and which of it are functions that are passed on.
FUNCTIONS = {
    "mask": (optax.adamw, {"learning_rate": COSINE, "weight_decay": LINEAR, "mask": mask}, "mask"),
    "step size": (
        optax.scale_by_schedule,
        {"step_size_fn": optax.constant_schedule(-1.0)},
        "step_",
    ),
    "by name": (warmed_up, {"learning_rate": COSINE, "warmup": LINEAR}, "warmup"),
    "momentum": (optax.sgd, {"learning_rate": 1.0, "momentum": LINEAR}, "none"),
    "a pair": (optax.contrib.prodigy, {"betas": (LINEAR, 0.999)}, "none"),
    "annotated": (decayed, {"learning_rate": 1.0, "decay": LINEAR, "clip": LINEAR}, "none"),
    "by default": (decayed, {"learning_rate": 1.0, "decay": 0.1, "scale": LINEAR}, "none"),
    "a number": (decayed, {"learning_rate": 1.0, "decay": 0.1, "mask": lambda p: 1.0}, "mask"),
}


@pytest.mark.parametrize("make, arguments, left", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_is_a_schedule_where_a_number_is_expected(make, arguments, left):
    made = fg.optimizer(make, **arguments)
    functions = {n for n, v in arguments.items() if any(map(callable, jax.tree.leaves(v)))}
    assert set(made.fixed) == {n for n in functions if n.startswith(left)}
    assert set(made.schedules) == functions - set(made.fixed)


def test_a_function_that_is_passed_on_counts_by_itself():
    """The server's optimizer keeps its state, and with it the count of a schedule of its own."""
    server = fg.optimizer(warmed_up, learning_rate=0.7, warmup=LINEAR)
    found = run(fg.fed_opt(loss, server=server, client=ordered(optax.sgd(RATE))))[0]
    expected = run(fg.fed_avg(loss, server_learning_rate=lambda t: 0.7 * LINEAR(t), **ORDERED))[0]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(as_vector(a), as_vector(b), rtol=1e-6)


OWN = {  # algorithms whose hyper was replaced: what the first state has of it
    "itself": lambda made: made,
    "tuned": lambda made: fg.self_tuning(made, "server.b1"),
    "replaced when tuned": lambda made: dataclasses.replace(
        fg.self_tuning(fg.fed_adam(loss), "server.b1"), hyper=made.hyper
    ),
    "side by side": lambda made: fg.side_by_side(
        made, fg.hyper.replace(made.hyper, {"server.b1": jnp.array([0.5, 0.6])})
    ),
}


@pytest.mark.parametrize("wrap", OWN.values(), ids=OWN)
def test_a_state_starts_from_the_hyperparameters_that_an_algorithm_has(wrap):
    made = fg.fed_adam(loss)
    new = {"server.adaptivity": 0.5, "server.b1": 0.3, "client.learning_rate": COSINE}
    made = dataclasses.replace(made, hyper=fg.hyper.replace(made.hyper, new))
    state = wrap(made).init(as_params(START))
    inner = getattr(state, "inner", state)
    np.testing.assert_allclose(inner.optimizer.second["b"], 0.25)
    assert np.all(inner.rounds == 0), "it counts, because a schedule has to know"
    assert not hasattr(state, "learned") or state.learned["server.b1"] == 0.3


def shrinking(at):
    """FedAvg that shrinks the model after each round, by somebody who heard of `at`, or did not."""
    inner = fg.fed_avg(loss, **ORDERED)

    @fg.program(cohort=fg.CLIENTS)
    def round(state, hyper, cohort, key):
        hyper = at(hyper, state.rounds)
        new, metrics = inner.round(state, hyper, cohort, key)
        with jax.numpy_dtype_promotion("standard"):  # a schedule gives numbers of its own dtype
            params = jax.tree.map(lambda leaf: hyper["shrink"] * leaf, new.params)
        return dataclasses.replace(new, params=params), metrics

    return fg.Algorithm(inner.init, round, {**inner.hyper, "shrink": LINEAR}, loss)


def test_an_algorithm_of_our_own_can_have_schedules():
    algorithm = shrinking(fg.hyper.at)
    same_rounds(algorithm, algorithm.hyper, {"shrink": LINEAR})


USES = {
    "times": lambda s: 2.0 * s,
    "of an array": lambda s: jnp.ones(2) * s,
    "of numpy": lambda s: np.ones(2) - s,
    "jax.numpy": lambda s: jnp.exp(s),
    "compared": lambda s: s < 1,
    "float": lambda s: float(s),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_schedule_is_no_number(use):
    schedule = shrinking(fg.hyper.at).hyper["shrink"]
    with pytest.raises(fg.ArgumentError, match=r"is a schedule.*fg\.hyper\.at\(hyper, round\)"):
        use(schedule)


def test_schedules_side_by_side():
    """All trials follow the schedule, and each has its own number for the rest."""
    algorithm = fg.fed_avg(loss, fg.local_training(COSINE, batch_size=BATCH))
    rates = {"server.learning_rate": jnp.array([0.5, 1.0])}
    trials = fg.side_by_side(algorithm, fg.hyper.replace(algorithm.hyper, rates))
    together, _ = run(trials)
    alone, _ = run(algorithm)
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_allclose(a["w"][1], b["w"], rtol=1e-12)


# ---- schedules inside of a client's optimizer, which would begin again in every round


@dataclass
class Counted:
    start: float

    def __call__(self, count):
        return self.start / (1 + count)

    def method(self, count):
        return self.start * count


def own(schedule):
    """A transformation that optax does not know, with a state of its own."""

    def update(updates, count, params=None):
        return jax.tree.map(lambda u: schedule(count) * u, updates), count + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


contrib = optax.contrib
SCHEDULES_INSIDE = {
    "prodigy": lambda: contrib.prodigy(COSINE),
    "momo": lambda: contrib.momo(COSINE),
    "ademamix": lambda: contrib.ademamix(0.1, alpha=COSINE),
    "ademamix, b3": lambda: contrib.ademamix(0.1, b3=LINEAR),
    "schedule free": lambda: contrib.schedule_free_sgd(COSINE),
    "noisy": lambda: optax.noisy_sgd(COSINE, key=0),
    "accumulated": lambda: optax.MultiSteps(optax.sgd(COSINE), 2).gradient_transformation(),
    "accumulation": lambda: optax.MultiSteps(
        optax.sgd(0.1), lambda step: jnp.minimum(step + 1, 3)
    ).gradient_transformation(),
    "a part": lambda: optax.partition(
        {"a": contrib.prodigy(COSINE)}, lambda params: jax.tree.map(lambda _: "a", params)
    ),
    "a condition": lambda: optax.conditionally_transform(optax.scale(0.5), lambda step: step > 3),
    "our own": lambda: own(COSINE),
    "an object": lambda: own(Counted(0.1)),
    "a method": lambda: own(Counted(0.1).method),
    "a partial": lambda: own(functools.partial(lambda a, count: a * count, 0.1)),
    "an argument": lambda: fg.optimizer(
        lambda learning_rate, warmup: optax.chain(own(warmup), optax.sgd(learning_rate)),
        learning_rate=0.1,
        warmup=COSINE,
    ),
}


def every_other_leaf(params):
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 0, params)


def needs_only_a_rate(make):
    known = inspect.signature(make).parameters.values()
    needed = [p.name for p in known if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    # The first wants a key, too; the second is deprecated.
    return needed == ["learning_rate"] and make not in (optax.noisy_sgd, optax.optimistic_adam)


WITHOUT = {  # optimizers that count, or that are given functions, and have no schedule
    **{
        name: (lambda make=make: make(0.1))
        for name, make in {**vars(optax), **vars(contrib)}.items()
        if inspect.isfunction(make) and needs_only_a_rate(make)
    },
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "masked": lambda: optax.adamw(0.1, mask=every_other_leaf),
    "accumulated": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "a part": lambda: optax.partition(
        {"a": optax.adam(0.1)}, lambda params: jax.tree.map(lambda _: "a", params)
    ),
    "finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "lookalike": lambda: optax.chain(
        optax.adam(0.1), optax.stateless(lambda updates, params: updates)
    ),
    "keeps its start": lambda: optax.chain(
        optax.adam(0.1), optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, s))
    ),
    "ours": lambda: fg.optimizer(contrib.prodigy, learning_rate=COSINE, estim_lr0=1e-3),
}


@pytest.mark.parametrize("client", WITHOUT.values(), ids=WITHOUT)
def test_a_client_that_counts_without_a_schedule_is_accepted(client):
    fg.fed_avg(loss, client=client()).init(as_params(START))


# ---- mistakes


def untraced(round):
    return 0.5 if round < 3 else 0.1


def plain_gradient_twice(loss):
    raise AssertionError("nobody asks for it")


def at_round(algorithm, params=None):
    return lambda: run(algorithm(), cohorts=COHORTS[:1], params=params)


MISTAKES = {
    "weighting": (lambda: fg.fed_avg(loss, weighting="example"), "weighting.*'examples'"),
    "client's rate": (
        lambda: fg.fed_opt(loss, server=optax.sgd(1.0), client_learning_rate=1.0),
        "It is the client:",
    ),
    "misspelt, and of local training": (
        lambda: fg.fed_avg(loss, step=2),
        r"Did you mean 'steps'\?.*client=fg.local_training\(..., steps=...\)",
    ),
    "misspelt": (lambda: fg.fed_avg(loss, epoch=2), r"Did you mean 'epochs'\? Known"),
    "said twice": (
        lambda: fg.fed_avgm(loss, client=0.1, batch_size=10),
        r"fed_avgm\(client=..., batch_size=10\): .*said twice",
    ),
    "said twice, by position": (
        lambda: fg.fed_avgm(loss, 0.1, client_learning_rate=0.2),
        r"client_learning_rate=0.2\): .*said twice",
    ),
    "more work than there is room for": (
        lambda: (
            fg.fed_avg(loss, fg.local_training(steps=lambda t: 3 - t))
            .starting({"steps": lambda t: 4 + 0 * t})
            .init(as_params(START))
        ),
        r"'steps' asks for 4, but .* at most 3. Give the longer one",
    ),
    **{
        f"more epochs than there is room for, {name}": (
            make,
            r"'epochs' asks for 10, but .* at most 2. Give the longer one",
        )
        for name, make in {
            "by a factor": lambda: (
                dataclasses.replace(BOUNDED, hyper=fg.hyper.scalable(BOUNDED.hyper, "epochs"))
                .starting({"epochs.factor": 5.0})
                .init(as_params(START))
            ),
            "side by side": lambda: fg.side_by_side(
                BOUNDED, fg.hyper.replace(BOUNDED.hyper, {"epochs": jnp.array([1.0, 10.0])})
            ).init(as_params(START)),
            "averaged": lambda: fg.averaged(BOUNDED.starting({"epochs": 10})).init(
                as_params(START)
            ),
            "tuned": lambda: fg.self_tuning(BOUNDED.starting({"epochs": 10}), "client").init(
                as_params(START)
            ),
            "later in a race": lambda: fg.race(
                {"a": BOUNDED.starting({"epochs": 1.0}), "b": fg.fed_avg(loss)},
                {0.5: 1},
                changes={0.2: {"a": {"epochs": 10.0}}},
            ).init(as_params(START)),
            "in a search": lambda: fg.grid_search(
                BOUNDED.starting({"epochs": 1.0}),
                POPULATION,
                {"epochs": fg.choice([1.0, 10.0])},
                params=as_params(START),
                rounds=1,
                evaluate=fg.Evaluation({"loss": loss}, POPULATION),
                progress=False,
            ),
        }.items()
    },
    "no number of epochs": (
        lambda: BOUNDED.starting({"epochs": np.nan}).init(as_params(START)),
        "'epochs' asks for nan. Give a finite number",
    ),
    "a batch size that changes": (
        lambda: fg.fed_avg(loss, batch_size=lambda t: 5 + t),
        "batch_size=.*: give a whole number",
    ),
    "no whole batch": (lambda: fg.fed_yogi(loss, batch_size=0), "batch_size=0"),
    "other steps": (lambda: fg.fed_nova(loss, optax.adam(0.1)), "fed_nova: .*plain SGD"),
    "nothing to start with": (
        lambda: fg.fed_avg(loss).starting({"server": {"learning_rate": None}}),
        "'server.learning_rate' is None",
    ),
    "server": (lambda: fg.fed_opt(loss, server=1.0, client=optax.sgd(0.1)), "server= takes"),
    "client": (lambda: fg.fed_avg(loss, client=optax.sgd), "client= takes an optimizer"),
    "argument": (
        lambda: fg.optimizer(optax.sgd, learning_rate=1.0, momentun=0.9),
        "no argument 'momentun'.*'momentum'",
    ),
    "missing": (lambda: fg.optimizer(optax.sgd, momentum=0.9), "needs 'learning_rate'"),
    **{
        f"not proportional, {make.__name__}": (
            lambda make=make: fg.optimizer(make, learning_rate={"b": 1.0, "w": 1.0}),
            f"updates of {make.__name__} are not proportional",
        )
        for make in (contrib.dadapt_adamw, contrib.schedule_free_sgd, contrib.cocob)
    },
    "a hyperparameter of a name that is taken": (
        lambda: fg.fed_opt(
            loss, server=optax.sgd(1.0), client=0.1, hyper={"client": {"learning_rate": 5.0}}
        ),
        "'client' is a hyperparameter already",
    ),
    "a measurement of a name that is taken": (
        at_round(
            lambda: fg.fed_opt(
                loss,
                server=optax.sgd(1.0),
                client=0.1,
                measure=lambda update, examples, hyper: {"training loss": jnp.float64(7.0)},
            )
        ),
        "'training loss' is measured already",
    ),
    "not proportional": (
        lambda: fg.fed_hypergradient(loss, server_learning_rate={"b": 1.0, "w": 1.0}),
        "not proportional",
    ),
    "rates of another model": (
        lambda: fg.fed_avg(loss, server_learning_rate={"w": 1.0}).init(as_params(START)),
        r"rates of \['w'\] do not fit",
    ),
    "client rates of another model": (
        at_round(lambda: fg.fed_avg(loss, client={"w": 1.0, "c": 1.0})),
        r"rates of \['c', 'w'\] do not fit",
    ),
    "a schedule inside": (
        lambda: fg.fed_avg(loss, client=optax.sgd(COSINE)).init(as_params(START)),
        "client= has a schedule inside.*fg.optimizer",
    ),
    "deep inside": (
        at_round(
            lambda: fg.fed_avg(
                loss,
                client=optax.masked(
                    optax.chain(optax.clip(1.0), optax.scale_by_schedule(COSINE)),
                    {"b": True, "w": False},
                ),
            )
        ),
        "client= has a schedule inside",
    ),
    "a decay inside": (
        at_round(lambda: fg.fed_avg(loss, client=optax.adamw(0.1, weight_decay=COSINE))),
        "client= has a schedule inside",
    ),
    "an injected schedule": (
        at_round(
            lambda: fg.fed_avg(loss, client=optax.inject_hyperparams(optax.sgd)(COSINE)),
        ),
        "client= has a schedule inside",
    ),
    **{
        f"a schedule in {name}": (
            lambda client=client: fg.fed_avg(loss, client=client()).init(as_params(START)),
            "client= has a schedule inside.*fg.optimizer",
        )
        for name, client in SCHEDULES_INSIDE.items()
    },
    "a schedule of vectors": (
        lambda: fg.fed_avg(loss, client=lambda t: jnp.ones(2) * t),
        "'client.learning_rate' is a function.*one number",
    ),
    "a schedule that is not traced": (
        lambda: fg.fed_prox(loss, proximal_weight=lambda t: 1.0 if t < 3 else 0.1),
        "'proximal_weight' is a function.*without a Python `if`",
    ),
    **{
        f"an untraced {name}": (make, f"'{name}' is a function.*without a Python `if`")
        for name, make in {
            "server.momentum": lambda: fg.fed_avgm(loss, momentum=untraced),
            "server.b1": lambda: fg.fed_adam(loss, b1=untraced),
            "server.adaptivity": lambda: fg.fed_yogi(loss, adaptivity=untraced),
            "learning_rate.b": lambda: fg.fed_avg(loss, {"b": untraced, "w": 0.5}),
            "client.b2": lambda: fg.fed_avg(
                loss, client=fg.optimizer(optax.adam, learning_rate=0.1, b2=untraced)
            ),
        }.items()
    },
    "a state that does not count": (
        lambda: fg.fed_avg(loss, client=COSINE).round(
            fg.fed_avg(loss).init(as_params(START)),
            fg.fed_avg(loss, client=COSINE).hyper,
            POPULATION.select([0, 1]),
            jax.random.key(0),
        ),
        "'client.learning_rate' is a schedule, but the state does not count",
    ),
    "a schedule used as a number": (
        at_round(lambda: shrinking(lambda hyper, round: hyper)),
        r"is a schedule.*used as a number.*fg\.hyper\.at",
    ),
    "integers": (lambda: fg.fed_avg(loss).init({"w": np.arange(3)}), "found int64"),
    "text": (lambda: fg.fed_avg(loss).init({"w": "zeros"}), "found str"),
    "batch": (lambda: fg.local_training(batch_size=0), "batch_size=0"),
    "batch, fed_sgd": (lambda: fg.fed_sgd(loss, batch_size=0), "batch_size=0"),
    "epochs": (lambda: fg.local_training(epochs=1.5), "epochs=1.5"),
    "steps": (lambda: fg.local_training(steps=-1), "steps=-1"),
    "epochs and steps": (lambda: fg.local_training(epochs=1, steps=3), "give one of them"),
    "two gradients": (
        lambda: fg.fed_prox(loss, fg.local_training(gradient=plain_gradient_twice)),
        "a gradient of its own",
    ),
    "no local training": (
        lambda: fg.fed_sgd(loss, epochs=7, steps=3),
        r"fed_sgd\(\) has no argument 'epochs'. It has no local training",
    ),
    "of local training": (
        lambda: fg.fed_yogi(loss, shuffle=False),
        r"fed_yogi\(\) has no argument 'shuffle'. .*client=fg.local_training\(..., shuffle=",
    ),
    **{
        f"typo in {make.__name__}": (
            lambda make=make: make(loss, weightin="uniform"),
            rf"{make.__name__}\(\) has no argument 'weightin'. Did you mean 'weighting'\?",
        )
        for make in STATELESS.values()
    },
    "too much": (lambda: fg.fed_exp(loss, 0.1, 1.0), r"fed_exp\(\): too many positional"),
    "too little": (lambda: fg.fed_opt(loss, client=0.1), r"fed_opt\(\): missing.*'server'"),
    "column": (at_round(lambda: fg.fed_avg(lambda p, b: loss(p, b)[:, None])), r"\(20,\)"),
    "wrong size": (at_round(lambda: fg.fed_avg(lambda p, b: loss(p, b)[1:])), r"\(19,\)"),
    "pair": (at_round(lambda: fg.fed_avg(lambda p, b: (loss(p, b), {}))), "one number"),
    "pair, fed_sgd": (at_round(lambda: fg.fed_sgd(lambda p, b: (loss(p, b), {}))), "one number"),
    "name": (
        lambda: fg.hyper.replace(fg.fed_avg(loss).hyper, {"server.learning_rat": 1.0}),
        "'server.learning_rate'",
    ),
}


@pytest.mark.parametrize("mistake, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(mistake, message):
    with pytest.raises(fg.ArgumentError, match=message) as raised:
        mistake()
    assert str(raised.value).startswith(__file__), "it names the line of the user"


# ---- hyperparameters by name


def test_names_of_hyperparameters():
    algorithm = fg.fed_prox(
        loss, {"b": 0.1, "w": 0.2}, weighting="power", proximal_weight=0.3, server_learning_rate=1
    )
    assert fg.hyper.paths(algorithm.hyper) == {
        "client.learning_rate.b": 0.1,
        "client.learning_rate.w": 0.2,
        "proximal_weight": 0.3,
        "server.learning_rate": 1.0,
        "weight_exponent": 1.0,
    }
    assert fg.hyper.select(algorithm.hyper, "client") == [
        "client.learning_rate.b",
        "client.learning_rate.w",
    ]
    new = fg.hyper.replace(algorithm.hyper, {"client.learning_rate.w": 5.0})
    assert new["client"]["learning_rate"] == {"b": 0.1, "w": 5.0}
    assert algorithm.hyper["client"]["learning_rate"]["w"] == 0.2


def test_an_algorithm_starts_with_other_hyperparameters():
    """Some by dotted name, or nested as they are; the rest stay."""
    algorithm = fg.fed_avgm(loss)
    for given in ({"server.momentum": 0.5}, {"server": {"momentum": 0.5}}):
        other = algorithm.starting(given)
        assert other.hyper["server"] == {"learning_rate": 1.0, "momentum": 0.5}
        assert other.hyper["client"] == algorithm.hyper["client"]
        assert other.round is algorithm.round
    counted = algorithm.starting({"client.learning_rate": decay(0.1)})
    assert counted.init(as_params(START)).rounds == 0
    with pytest.raises(fg.ArgumentError, match=r"'server\.momentum'"):
        algorithm.starting({"server": {"momentun": 0.5}})


def test_what_is_no_float_is_no_hyperparameter():
    made = fg.optimizer(optax.adam, learning_rate=1, b1=0.5, nesterov=True, mu_dtype=jnp.float32)
    assert made.hyper == {"learning_rate": 1.0, "b1": 0.5}
    schedule = fg.optimizer(optax.sgd, learning_rate=optax.constant_schedule(0.1))
    assert made.fixed["nesterov"] is True and schedule.hyper == {}
