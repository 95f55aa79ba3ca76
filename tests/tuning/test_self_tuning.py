"""Self-tuning: its hypergradients against formulas, centralized AD and finite differences; what it
sends; what keeps it in its bounds and from running away."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import by_hand
import fedgrad as fg
from by_hand import START, Sgd, as_params, as_vector, loss
from fedgrad.algorithms.parametrization import FORMS, learned, usual
from fedgrad.core.loss_limit import ran_away

BATCH = 4
CLIENTS = by_hand.make_clients([7, 2, 4, 6, 9], seed=1)
POPULATION = fg.population(CLIENTS)
TRAIN, FRESH = [0, 1, 2], [3, 4]
ordered = functools.partial(fg.local_training, batch_size=BATCH, shuffle=False)
SPEED = 0.02  # of the hyperparameters
KEY = jax.random.key(0)
EXECUTORS = {
    "local": fg.executors.local(),
    "reference": fg.executors.reference(),
    "chunk2": fg.executors.local(chunk=2),
}


def together(chosen):
    """The examples of these clients as one batch: its mean loss is the example-weighted one."""
    return {name: np.concatenate([CLIENTS[i][name] for i in chosen]) for name in CLIENTS[0]}


# ---- the same rounds in plain JAX, with all data in one place


def batch_loss(params, batch):
    return jnp.mean(loss(params, batch))


def times(rate, tree):
    """A rate for all, or for each layer."""
    return {k: (rate[k] if isinstance(rate, dict) else rate) * v for k, v in tree.items()}


def minus(a, b):
    return jax.tree.map(jnp.subtract, a, b)


def local_training(start, client, rate, gradient):
    now = start
    for batch in by_hand.batches(client, BATCH):
        now = minus(now, times(rate, gradient(now, start, batch)))
    return minus(start, now)


def mean_update(hyper, start, clients, gradient, exponent=1.0):
    weights = jnp.array([float(len(c["y"])) for c in clients]) ** exponent
    rate = hyper["client"]["learning_rate"]
    updates = [local_training(start, c, rate, gradient) for c in clients]
    return jax.tree.map(lambda *d: weights @ jnp.stack(d) / jnp.sum(weights), *updates)


def plain(now, start, batch):
    return jax.grad(batch_loss)(now, batch)


def central_fed_avgm(hyper, state, clients):
    update = mean_update(hyper, state.params, clients, plain)
    trace = optax.tree_utils.tree_get(state.optimizer, "trace")
    m = jax.tree.map(lambda a, d: hyper["server"]["momentum"] * a + d, trace, update)
    return minus(state.params, times(hyper["server"]["learning_rate"], m))


def central_fed_adam(hyper, state, clients):
    update = mean_update(hyper, state.params, clients, plain)
    lr, b1, b2, tau = (hyper["server"][n] for n in ("learning_rate", "b1", "b2", "adaptivity"))

    def new(x, m, v, d):
        m, v = b1 * m + (1 - b1) * d, b2 * v + (1 - b2) * d**2
        return x - lr * m / (jnp.sqrt(v) + tau)

    return jax.tree.map(new, state.params, state.optimizer.first, state.optimizer.second, update)


def central_fed_prox(hyper, state, clients):
    def proximal(now, start, batch):
        def objective(w):
            far = sum(jnp.sum((w[k] - start[k]) ** 2) for k in w)
            return batch_loss(w, batch) + hyper["proximal_weight"] / 2 * far

        return jax.grad(objective)(now)

    update = mean_update(hyper, state.params, clients, proximal, hyper["weight_exponent"])
    return minus(state.params, times(hyper["server"]["learning_rate"], update))


def central_per_fed_avg(hyper, state, clients):
    def adapted(now, start, batch):
        def after(w):
            slope = jax.grad(batch_loss)(w, batch)
            return batch_loss(minus(w, times(hyper["adaptation_rate"], slope)), batch)

        return jax.grad(after)(now)

    update = mean_update(hyper, state.params, clients, adapted)
    return minus(state.params, times(hyper["server"]["learning_rate"], update))


@dataclasses.dataclass(frozen=True)
class Row:
    algorithm: fg.Algorithm
    learn: Any
    central: Any


TABLE = {
    "fedavgm": Row(
        fg.fed_avgm(loss, ordered(0.3), 0.7, 0.8), ["server", "client"], central_fed_avgm
    ),
    "fedadam": Row(fg.fed_adam(loss, ordered(0.3)), ["server", "client"], central_fed_adam),
    "fedprox": Row(
        fg.fed_prox(
            loss,
            ordered({"b": 0.2, "w": 0.4}),
            {"b": 1.0, "w": 0.8},
            proximal_weight=0.6,
            weighting="power",
        ),
        ["server", "client", "proximal_weight", "weight_exponent"],
        central_fed_prox,
    ),
    "perfedavg": Row(
        fg.per_fed_avg(loss, ordered(0.3), adaptation_rate=0.4),
        ["server", "client", "adaptation_rate"],
        central_per_fed_avg,
    ),
}


def tuned(name, schedule, mode="auto", **options):
    row = TABLE[name]
    options = {
        "learn": row.learn,
        "optimizer": optax.sgd(SPEED),
        "gradient_from": fg.GradientCohort(batch_size=4),
        **options,
    }
    return fg.self_tuning(row.algorithm, schedule=schedule, mode=mode, **options)


def run(algorithm, rounds, hyper=None, executor=None, fresh=FRESH, params=None, state=None):
    """[(the state before, the metrics)] of each round, and the last state."""
    if state is None:
        state = algorithm.init(as_params(START) if params is None else params, hyper)
    hyper = algorithm.hyper if hyper is None else hyper
    round = algorithm.round if executor is None else algorithm.round.on(EXECUTORS[executor])
    more = {name: POPULATION.select(fresh) for name in algorithm.cohorts}
    seen = []
    for t in range(rounds):
        key = jax.random.fold_in(KEY, t)
        new, metrics = round(state, hyper, POPULATION.select(TRAIN), key, **more)
        seen.append((state, metrics))
        state = new
    return seen, state


ROUNDS = 3


@functools.cache
def history(name, schedule, mode, executor):
    algorithm = tuned(name, schedule, mode)
    return algorithm, *run(algorithm, ROUNDS, executor=executor)


def of(name, schedule):
    return history(*next(case for case in CASES if case[:2] == (name, schedule)))


@functools.cache
def central(name):
    """(values by name, state, clients) -> (new model, its Jacobian), as vectors."""
    row = TABLE[name]

    @jax.jit
    def model_and_jacobian(values, state, clients):
        def model(values):
            new = row.central(fg.hyper.replace(row.algorithm.hyper, values), state, clients)
            new = jnp.concatenate([jnp.atleast_1d(new["b"]), new["w"]])
            return new, new

        slope, new = jax.jacfwd(model, has_aux=True)(values)
        return new, slope

    clients = [CLIENTS[i] for i in TRAIN]
    return lambda values, state: model_and_jacobian(values, state, clients)


def close(found, expected, rtol=1e-10):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-13)


# Everything that can be learned; in both schedules, all modes.
CASES = [
    ("fedavgm", "serial", "auto", "local"),
    ("fedprox", "serial", "auto", "local"),
    ("fedprox", "serial", "reverse", "local"),
    ("fedadam", "serial", "mixed", "chunk2"),
    ("perfedavg", "serial", "forward", "local"),
    ("fedavgm", "parallel", "auto", "local"),
    ("fedprox", "parallel", "forward", "local"),
    ("perfedavg", "parallel", "reverse", "chunk2"),
]


LIMITS = {
    "server.adaptivity": (1e-8, None),
    "server.b1": (0, 0.999),
    "server.b2": (0, 0.9999),
    "server.momentum": (0, 0.999),
}


@pytest.mark.parametrize("name, schedule, mode, executor", CASES)
def test_hypergradients_are_those_of_centralized_ad(name, schedule, mode, executor):
    algorithm, seen, last = history(name, schedule, mode, executor)
    data = together(FRESH)
    slopes = None
    for state, metrics in seen:
        new, slopes_now = central(name)(metrics.hyper, state.inner)
        if schedule == "serial":
            g, chained = by_hand.slope(np.asarray(new), data), slopes_now
            at = new
        else:  # the gradient at the model before, with what that one was made with
            at = as_vector(state.params)
            g, chained = by_hand.slope(at, data), slopes
        close(metrics.gradient_loss, by_hand.value(np.asarray(at), data))
        assert set(metrics.hypergradient) == set(metrics.hyper) == set(slopes_now)
        for path, found in metrics.hypergradient.items():
            close(found, 0.0 if chained is None else g @ chained[path])
        slopes = slopes_now
    close(as_vector(last.params), new)
    # Those that are learned moved by these, in bounds; the others did not.
    values = [metrics.hyper for _, metrics in seen] + [last.learned]
    for (_, metrics), old, now in zip(seen, values, values[1:], strict=False):
        for path, slope in metrics.hypergradient.items():
            close(now[path], np.clip(old[path] - SPEED * slope, *LIMITS.get(path, (0, None))))
    assert int(last.rejected) == 0 and int(last.rounds) == ROUNDS


@pytest.mark.parametrize("name", TABLE)
def test_hypergradients_by_finite_differences(name):
    """Of the second round, which has a past; the values are moved in the state."""
    algorithm, seen, _ = of(name, "serial")
    state, metrics = seen[1]
    for path, found in metrics.hypergradient.items():
        value = float(state.learned[path])
        h = 1e-5 * max(value, 1e-3)

        def after(value, path=path):
            moved = {**state.learned, path: jnp.asarray(value, float)}
            start = dataclasses.replace(state, learned=moved)
            return float(run(algorithm, 1, state=start)[0][0][1].gradient_loss)

        assert found != 0
        close(found, (after(value + h) - after(value - h)) / (2 * h), rtol=2e-6)


def test_the_parallel_chain_is_the_formula_for_server_rate_and_momentum():
    """dL/d eta = -<g, m_{t+1}>, dL/d mu = -eta <g, m_t>, all of it in numpy."""
    _, seen, last = of("fedavgm", "parallel")
    data = together(FRESH)
    x, m, chained = START, np.zeros(3), None
    hyper = {path: float(value) for path, value in seen[0][1].hyper.items()}
    for _, metrics in seen:
        for path, value in hyper.items():
            close(metrics.hyper[path], value)
        g = by_hand.slope(x, data)
        if chained is not None:
            slopes = {path: g @ s for path, s in chained.items()}
            for path, slope in slopes.items():
                close(metrics.hypergradient[path], slope)
            # The client's rate has no closed formula; its slope is checked against AD above.
            slopes["client.learning_rate"] = float(metrics.hypergradient["client.learning_rate"])
        rate, momentum = hyper["server.learning_rate"], hyper["server.momentum"]
        deltas, weights = local_updates(x, Sgd, hyper["client.learning_rate"])
        m_before, m = m, momentum * m + by_hand.mean(weights, deltas)
        x = x - rate * m
        if chained is not None:
            hyper = {path: hyper[path] - SPEED * slopes[path] for path in hyper}
        chained = {"server.learning_rate": -m, "server.momentum": -rate * m_before}
    close(as_vector(last.params), x)


def local_updates(x, optimizer, rate, gradient=None):
    clients = [CLIENTS[i] for i in TRAIN]
    deltas = [by_hand.train(x, c, optimizer(rate), gradient, size=BATCH)[0] for c in clients]
    return np.array(deltas), by_hand.sizes_of(clients).astype(float)


def test_the_parallel_chain_is_the_formula_for_the_weight_exponent():
    """d Delta/dq = sum_i P_i ln(n_i) (Delta_i - Delta), P_i = n_i^q / sum_j n_j^q."""
    _, seen, _ = of("fedprox", "parallel")
    data = together(FRESH)

    def both_layers(hyper, which):
        b, w = (float(hyper[f"{which}.learning_rate.{layer}"]) for layer in "bw")
        return np.array([b, w, w])

    chained = None
    for state, metrics in seen:
        x, hyper = as_vector(state.params), metrics.hyper
        if chained is not None:
            found = metrics.hypergradient["weight_exponent"]
            close(found, by_hand.slope(x, data) @ chained)
        mu, q = float(hyper["proximal_weight"]), float(hyper["weight_exponent"])
        deltas, sizes = local_updates(
            x,
            Sgd,
            both_layers(hyper, "client"),
            lambda now, start, batch, mu=mu: by_hand.slope(now, batch) + mu * (now - start),
        )
        share = sizes**q / np.sum(sizes**q)
        spread = (share * np.log(sizes)) @ (deltas - share @ deltas)
        chained = -both_layers(hyper, "server") * spread


# ---- whose loss it is


def test_gradient_from():
    """The loss is that of the cohort that was asked for; only "same" needs no further cohort."""
    one = {"learn": "server.learning_rate", "schedule": "parallel"}
    algorithm = fg.fed_sgd(loss, batch_size=BATCH)
    same = fg.self_tuning(algorithm, gradient_from="same", **one)
    fresh = fg.self_tuning(algorithm, **one)
    other = fg.self_tuning(algorithm, gradient_from=POPULATION, **one)
    assert (same.cohorts, fresh.cohorts) == ({}, {"gradient_cohort": None})
    assert other.cohorts == {"gradient_cohort": POPULATION}
    asked = run(same, 2)[0][-1]
    told = run(fresh, 2, fresh=TRAIN)[0][-1]
    jax.tree.map(close, asked[1], told[1])
    assert asked[1].hypergradient["server.learning_rate"] != 0
    close(asked[1].gradient_loss, by_hand.value(as_vector(asked[0].params), together(TRAIN)))


def test_another_loss():
    """Hyperparameters follow another loss than the one that is trained on."""
    algorithm = fg.fed_sgd(loss, batch_size=BATCH)
    other = fg.GradientCohort("same", loss=lambda params, batch: 3 * loss(params, batch))
    plain = run(fg.self_tuning(algorithm, "server", gradient_from="same"), 2)[0][-1][1]
    found = run(fg.self_tuning(algorithm, "server", gradient_from=other), 2)[0][-1][1]
    close(found.loss, plain.loss)
    close(found.gradient_loss, 3 * plain.gradient_loss)
    for name, slope in plain.hypergradient.items():
        close(found.hypergradient[name], 3 * slope)


def test_the_more_exact_name_says_how_it_is_learned():
    made = learned(
        TABLE["fedavgm"].algorithm.hyper, {"server.momentum": fg.logit(0, 1), "server": fg.log(0.1)}
    )
    assert {name: (one.kind, one.bounds) for name, one in made.items()} == {
        "server.momentum": ("logit", (0, 1)),
        "server.learning_rate": ("log", (0.1, math.inf)),
    }


# ---- what it sends, worked out by hand from the tables in the paper's terms. Beyond them, every
# training round also sends the client's learning rate (1 down) and the loss as a metric (1 up),
# and a mean sends its weight (1 up). n is the size of the model.

N = 3
BASE = (N + 1, N + 1 + 1)  # train with FedAvgM: model and rate down; update, weight, loss up
POWER = (N + 1 + 1, N + 1 + 1)  # the same with the exponent down
TRAFFIC = {
    # what is learned, mode: (train stage, loss stage), each (down, up)
    ("server", "forward"): (BASE, (3 * N, 3 + 1)),
    ("server", "mixed"): (BASE, (N, 1 + N + 1)),
    ("server", "reverse"): (BASE, (N + 1, 1 + N + 1)),
    ("weight_exponent", "forward"): ((POWER[0], 2 * (N + 1) + 1), (2 * N, 2 + 1)),
    ("weight_exponent", "mixed"): ((POWER[0], 2 * (N + 1) + 1), (N, 1 + N + 1)),
    ("weight_exponent", "reverse"): (
        (2 * (N + 1) + 1, (N + 1) + 1 + 1),
        (N + 1, 1 + N + 1),
    ),
    ("client", "mixed"): ((BASE[0], BASE[1] + N), (N, 1 + N + 1)),
}
PLANNED = {
    "server": fg.fed_avgm(loss, ordered()),
    "client": fg.fed_avgm(loss, ordered()),
    "weight_exponent": fg.fed_avg(loss, ordered(), weighting="power"),
}


def planned(learn, schedule, mode):
    algorithm = fg.self_tuning(PLANNED[learn], learn, schedule=schedule, mode=mode)
    plan = fg.plan(
        algorithm.round,
        algorithm.init(as_params(START)),
        algorithm.hyper,
        POPULATION.select(TRAIN),
        KEY,
        POPULATION.select(FRESH),
    )
    assert plan.audit().only_sums
    total = {
        at: tuple(
            sum(getattr(t, way) for t in plan.traffic if t.placement == at)
            for way in ("down", "up")
        )
        for at in ("clients", "gradient")
    }
    return plan, (total["clients"], total["gradient"])


@pytest.mark.parametrize("learn, mode", TRAFFIC)
def test_traffic_of_the_serial_schedule(learn, mode):
    plan, total = planned(learn, "serial", mode)
    assert total == TRAFFIC[learn, mode]
    again = {"server": ("gradient",), "weight_exponent": ("clients", "gradient")}
    assert plan.readdressed == (again[learn] if mode == "reverse" else ())
    assert plan.rounds == (3 if (learn, mode) == ("weight_exponent", "reverse") else 2)


@pytest.mark.parametrize("learn", PLANNED)
def test_traffic_of_the_parallel_schedule(learn):
    """One round, in which both cohorts are asked once: what mixed mode sends."""
    plan, total = planned(learn, "parallel", "auto")
    assert (plan.rounds, plan.readdressed, plan.client_memory) == (
        1,
        (),
        {"clients": 0, "gradient": 0},
    )
    assert total == TRAFFIC[learn, "mixed"]


# ---- how hyperparameters are written


FORMS_AND_BOUNDS = {
    "client.learning_rate": ("log", (0.05, 0.5)),
    "server.learning_rate": ("logit", (0.01, 1.5)),
    "server.momentum": ("linear", (0.1, 0.9)),
}
FORMED = tuned(
    "fedavgm",
    "serial",
    learn={path: FORMS[form](*bounds) for path, (form, bounds) in FORMS_AND_BOUNDS.items()},
    optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=SPEED),
)


def test_chain_rule_of_a_parametrization():
    """d/d raw = d/d value times d value/d raw; and the value that is used is the same."""
    seen, last = run(FORMED, 1)
    found, plain = seen[0][1], of("fedavgm", "serial")[1][0][1]
    for path, (form, (low, high)) in FORMS_AND_BOUNDS.items():
        value = float(plain.hyper[path])
        close(found.hyper[path], value)
        slope, raw = {
            "linear": (1.0, value),
            "log": (value, math.log(value)),
            "logit": (
                (value - low) * (high - value) / (high - low),
                math.log((value - low) / (high - value)),
            ),
        }[form]
        close(found.hypergradient[path], plain.hypergradient[path] * slope)
        close(last.learned[path], raw - SPEED * found.hypergradient[path])


ranges = st.tuples(st.floats(0, 10), st.floats(1e-2, 1e4)).map(lambda r: (r[0], r[0] + r[1]))


@given(
    st.sampled_from(sorted(FORMS)),
    ranges,
    st.floats(0.001, 0.999),
    st.floats(-1e300, 1e300),
    st.sampled_from([np.float32, np.float64]),
)
def test_no_step_leaves_the_bounds(form, bounds, part, step, dtype):
    one = learned({"q": 0.0}, {"q": FORMS[form](*bounds)})["q"]
    low, high = (dtype(b) for b in bounds)
    value = dtype(low + part * (high - low))
    raw = one.raw(jnp.asarray(value, dtype))
    close(one.value(raw), value, rtol=1e-3 if dtype == np.float32 else 1e-9)
    with np.errstate(over="ignore"):
        moved = one.value(one.project(raw + jnp.asarray(dtype(step))))
    slack = 1e-5 * (high - low) + 1e-5 * high
    assert low - slack <= moved <= high + slack and jnp.isfinite(one.project(moved))


def test_huge_steps_of_the_hyperparameters():
    """Wherever a step is meant to lead, values stay in bounds and finite, and so does the model."""
    state = FORMED.init(as_params(START))
    state.optimizer.hyperparams["learning_rate"] = jnp.asarray(1e12, float)
    seen, last = run(FORMED, 4, state=state)
    for path, (_, (low, high)) in FORMS_AND_BOUNDS.items():
        values = np.array([metrics.hyper[path] for _, metrics in seen])
        assert (values > low - 1e-12).all() and (values < high + 1e-12).all()
        # The first step of a momentum is 0: there is none yet.
        moved = values[2:] if path == "server.momentum" else values[1:]
        near = np.minimum(abs(moved - low), abs(moved - high))
        assert (near < 1e-5).all(), "each went as far as it may"
    assert np.isfinite(as_vector(last.params)).all() and int(last.rejected) == 0


def test_bounds_that_go_with_a_name():
    """Also where layers are called like hyperparameters."""
    names = ["server.learning_rate.b1", "server.momentum", "weight_exponent", "server.b2"]
    hyper = dict.fromkeys(names, 0.0)
    found = {name: one.bounds for name, one in learned(hyper, names).items()}
    assert found == {
        "server.learning_rate.b1": (0.0, math.inf),
        "server.momentum": (0.0, 0.999),
        "weight_exponent": (-math.inf, math.inf),
        "server.b2": (0.0, 0.9999),
    }


def test_how_names_alone_are_learned():
    """Rates by their logarithms; but as they are, as in the paper, with a step somebody chose."""
    names = ["server.learning_rate.b1", "server.adaptivity", "client.learning_rate.factor"]
    others = ["server.momentum", "weight_exponent", "server.b2", "proximal_weight"]
    hyper = dict.fromkeys([*names, *others], 0.5)
    kinds = {name: one.kind for name, one in learned(hyper, [*hyper], usual()).items()}
    assert kinds == dict.fromkeys(names, "log") | dict.fromkeys(others, "linear")
    assert {one.kind for one in learned(hyper, [*hyper]).values()} == {"linear"}
    below = learned({"learning_rate": -0.5}, {"learning_rate": usual(-1, 1)})
    assert below["learning_rate"].kind == "linear"  # no logarithm has that range


@pytest.mark.parametrize("schedule", ["serial", "parallel"])
def test_no_step_is_far_where_nothing_is_said(schedule):
    """However steep the loss is: a client's rate of 0.02 once went to 441,000."""

    def steep(params, batch):
        return 1e4 * loss(params, batch)

    names = ["client.learning_rate", "server.learning_rate", "server.momentum"]
    seen, _ = run(fg.self_tuning(fg.fed_avgm(steep, ordered(0.02)), names, schedule=schedule), 4)
    assert max(abs(float(m.hypergradient[names[0]])) for _, m in seen) > 1e3
    for name, most in zip(names, (math.exp(0.01), math.exp(0.01), None), strict=True):
        values = np.array([float(metrics.hyper[name]) for _, metrics in seen])
        steps = abs(np.diff(values)) if most is None else np.exp(abs(np.diff(np.log(values))))
        assert (steps <= (0.01 if most is None else most) * (1 + 1e-6)).all() and steps.max() > 0


# ---- limits on a step


def limits(clip=None, normalize=False):
    """What optax has for it: each hypergradient of norm 1, together of at most the norm `clip`."""
    return optax.chain(
        optax.scale_by_sign() if normalize else optax.identity(),
        optax.identity() if clip is None else optax.clip_by_global_norm(clip),
    )


def test_clip_and_normalize():
    gradient = {"a": jnp.array(3.0), "b": jnp.array([0.0, -4.0]), "c": jnp.array(0.0)}

    def limited(gradient, **options):
        one = limits(**options)
        return one.update(gradient, one.init(gradient))[0]

    def values(**options):
        return {n: np.asarray(g).tolist() for n, g in limited(gradient, **options).items()}

    assert values() == {"a": 3.0, "b": [0.0, -4.0], "c": 0.0}
    assert values(clip=5.1) == {"a": 3.0, "b": [0.0, -4.0], "c": 0.0}
    half = limited(gradient, clip=2.5)
    jax.tree.map(close, half, jax.tree.map(lambda g: g / 2, gradient))
    assert values(normalize=True) == {"a": 1.0, "b": [0.0, -1.0], "c": 0.0}
    jax.tree.map(
        close,
        limited(gradient, clip=1.0, normalize=True),
        {"a": math.sqrt(0.5), "b": np.array([0, -math.sqrt(0.5)]), "c": 0.0},
    )


def test_clipped_and_normalized_rounds():
    """The metrics have the hypergradient as it is; the step is what the optimizer makes of it."""
    optimizer = optax.chain(limits(1e-3, True), optax.sgd(SPEED))
    algorithm = fg.self_tuning(fg.fed_sgd(loss), "server", optimizer, "serial")
    ((before, metrics),), after = run(algorithm, 1, executor="reference")
    g = by_hand.slope(START - 0.1 * by_hand.slope(START, together(TRAIN)), together(FRESH))
    expected = -g @ by_hand.slope(START, together(TRAIN))
    (name,) = metrics.hypergradient
    close(metrics.hypergradient[name], expected)
    close(after.learned[name], before.learned[name] - SPEED * 1e-3 * np.sign(expected))


# ---- the guard


def overflowing(params, batch):
    """As logistic regression, but infinite where the model is large."""
    return loss(params, batch) * jnp.where(jnp.abs(params["w"][0]) < 1e3, 1.0, jnp.inf)


GUARDED = {
    schedule: fg.self_tuning(
        fg.fed_sgd(overflowing, 1.0, batch_size=BATCH),
        "server.learning_rate",
        schedule=schedule,
        optimizer=optax.adam(0.0),
        guard=10.0,
    )
    for schedule in ("serial", "parallel")
}


@pytest.mark.parametrize("schedule", GUARDED)
# It diverges; the loss is infinite after the first round; the model (in float32) is.
@pytest.mark.parametrize("start", [100.0, 1e9, 1e39])
def test_a_server_rate_that_diverges_is_halved_until_it_does_not(schedule, start):
    algorithm = GUARDED[schedule]
    hyper = fg.hyper.replace(algorithm.hyper, {"server.learning_rate": start})
    params = jax.tree.map(lambda leaf: leaf.astype("float32"), as_params(START))
    rounds = 40 + math.ceil(math.log2(start)) * (1 if schedule == "serial" else 2)
    seen, last = run(algorithm, rounds, hyper, params=params)
    rejected = np.array([metrics.rejected for _, metrics in seen])
    values = np.array([metrics.hyper["server.learning_rate"] for _, metrics in seen])
    losses = np.array([metrics.gradient_loss for _, metrics in seen])
    models = np.array([as_vector(state.params) for state, _ in seen])
    assert rejected.dtype.kind == "i" and rejected.sum() == int(last.rejected) > 0
    assert values[0] == start
    close(values[1:], np.where(rejected, values / 2, values)[:-1])
    assert not rejected[-10:].any(), "it trains in the end"
    assert by_hand.value(as_vector(last.params), together(FRESH)) < 20
    for t in np.flatnonzero(rejected[:-1]):
        (state, _), (new, _) = seen[t], seen[t + 1]
        jax.tree.map(np.testing.assert_array_equal, state.optimizer, new.optimizer)
        if schedule == "serial":  # nothing is left of a round that was undone
            jax.tree.map(np.testing.assert_array_equal, state.inner, new.inner)
        else:  # it goes back to a model whose loss was good
            assert (models[t + 1] == models[losses < 20]).all(axis=1).any()
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(new.sensitivity))


@jax.custom_jvp
def trap(x, scale):
    """The identity, with a derivative that is wrong by a factor."""
    return x


trap.defjvp(lambda primals, tangents: (primals[0], primals[1] * tangents[0]))


def trapped(params, batch):
    return trap(loss(params, batch), batch["scale"])


# With the state of the one, and without any that would be infinite too.
@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(0.1), optax.sgd(0.1), optax.chain(limits(1.0, True), optax.sgd(0.1))],
    ids=["adam", "sgd", "limited"],
)
def test_a_hypergradient_that_is_not_finite_is_left_out(optimizer):
    """The model goes on; what is learned, and its optimizer, stay as they are."""
    algorithm = fg.self_tuning(
        fg.fed_sgd(trapped, 0.5, batch_size=BATCH),
        "server.learning_rate",
        schedule="serial",
        optimizer=optimizer,
        gradient_from=fg.GradientCohort(batch_size=1),
    )

    # One example, so that infinite terms do not cancel to NaN: the hypergradient is infinite too.
    one = {name: leaf[:1] for name, leaf in CLIENTS[0].items()}

    def cohort(scale):
        return fg.cohort([{**one, "scale": np.array([scale])}])

    for bad in (math.nan, math.inf, -math.inf, 1.0):
        first = algorithm.init(as_params(START))
        state, metrics = algorithm.round(first, algorithm.hyper, cohort(1.0), KEY, cohort(bad))
        assert int(metrics.rejected) == (bad != 1.0)
        slope = float(metrics.hypergradient["server.learning_rate"])
        if bad == 1.0:
            assert math.isfinite(slope) and state.learned != first.learned
        else:
            assert math.isnan(slope) if math.isnan(bad) else slope == -bad
            jax.tree.map(np.testing.assert_array_equal, state.learned, first.learned)
            jax.tree.map(np.testing.assert_array_equal, state.optimizer, first.optimizer)
        close(as_vector(state.params), START - 0.5 * by_hand.slope(START, one))


RAN_AWAY = [  # loss, first loss, whether it has, by more than 100 times the first
    (100.0, 1.0, False),
    (102.0, 1.0, True),
    (-0.5, -1.0, False),
    (98.0, -1.0, False),
    (100.0, -1.0, True),
    (1e-7, 1e-9, False),
    (99.0, 1e-9, True),
    (101.0, 0.0, False),  # nothing is known of a first loss of 0
    (1e30, math.nan, False),
    (math.nan, 1.0, True),
    (math.inf, math.inf, True),
    (math.inf, 0.0, True),
    (-math.inf, 1.0, True),
]


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("number", [float, jnp.float32, jnp.float64])
def test_what_has_run_away(number, scale):
    """Of numbers of Python and of JAX, and in whatever unit a loss is."""
    for value, first, expected in RAN_AWAY:
        found = ran_away(number(value * scale), number(first * scale), 100.0)
        assert bool(found) is expected, (value, first)


@pytest.mark.parametrize("schedule", GUARDED)
@pytest.mark.parametrize("scale", [2.0**-160, 2.0**-20, 2.0**20, 2.0**160])
def test_the_guard_does_not_depend_on_the_scale_of_the_loss(schedule, scale):
    """A loss times a constant with rates over it is the same training, and the same is undone."""

    def rejected(scale):
        algorithm = fg.self_tuning(
            fg.fed_sgd(lambda p, batch: scale * loss(p, batch), 1.0, batch_size=BATCH),
            "server.learning_rate",
            schedule=schedule,
            optimizer=optax.adam(0.0),
            guard=10.0,
        )
        hyper = fg.hyper.replace(algorithm.hyper, {"server.learning_rate": 1e4 / scale})
        return [int(metrics.rejected) for _, metrics in run(algorithm, 30, hyper)[0]]

    wanted = rejected(1.0)
    assert 3 < sum(wanted) < 30 and rejected(scale) == wanted


@pytest.mark.parametrize("schedule", GUARDED)
def test_a_first_loss_of_zero_says_nothing(schedule):
    """The first loss that is not 0 is the one that others are compared with."""

    def hinge(params, batch):
        return jnp.maximum(loss(params, batch) - loss(as_params(START), batch), 0)

    algorithm = fg.self_tuning(
        fg.fed_sgd(lambda p, batch: loss(p, batch) - loss(as_params(START), batch), 0.1),
        "server.learning_rate",
        schedule=schedule,
        optimizer=optax.adam(0.0),
        gradient_from=fg.GradientCohort(loss=hinge),
        guard=10.0,
    )
    seen, last = run(algorithm, 4)
    assert float(seen[0][1].gradient_loss) == 0.0 or schedule == "serial"
    assert not any(int(metrics.rejected) for _, metrics in seen)


def test_without_a_guard_nothing_is_kept_back():
    algorithm = fg.self_tuning(
        fg.fed_sgd(overflowing, 1e30, batch_size=BATCH), "server.learning_rate", guard=None
    )
    seen, last = run(algorithm, 3)
    assert int(last.rejected) == 0 and last.fallback is None
    assert not np.isfinite(as_vector(last.params)).all()


# ---- state, compilation, random losses


def test_rounds_are_compiled_once():
    traces = []

    def counted(params, batch):
        traces.append(None)
        return loss(params, batch)

    algorithm = fg.self_tuning(
        fg.fed_sgd(counted, batch_size=BATCH),
        "server",
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)),
        mode="forward",  # derivatives have the dtype of the model, in other modes that of the rate
    )
    # A Python number, and a dtype that is not that of the rate.
    state = first = algorithm.init({"b": 0.1, "w": jnp.asarray(START[1:], jnp.bfloat16)})
    for t in range(4):
        key = jax.random.key(t)
        cohorts = POPULATION.sample(key, 3), key, POPULATION.sample(key, 2)
        state, _ = algorithm.round(state, algorithm.hyper, *cohorts)
        assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, first)
        if t == 0:
            once = len(traces)
    assert len(traces) == once


def test_a_random_loss_can_be_tuned():
    def dropped(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return loss(params, {**batch, "x": 2.0 * kept.astype(float) * batch["x"]})

    algorithm = fg.self_tuning(fg.fed_sgd(dropped, batch_size=BATCH), "server", schedule="serial")
    (_, (_, metrics)), last = run(algorithm, 2)
    assert metrics.hypergradient["server.learning_rate"] != 0
    assert np.isfinite(as_vector(last.params)).all()


def test_beside_a_schedule_others_are_learned():
    """The schedule goes on while it is tuned, and the derivative is at its value."""
    rate = optax.linear_schedule(0.3, 0.1, 2)
    scheduled = fg.fed_avgm(loss, ordered(rate), 0.7, 0.8)
    one = {"learn": "server", "schedule": "serial", "optimizer": optax.sgd(0.0)}
    seen, last = run(fg.self_tuning(scheduled, **one), 3)
    plain = fg.self_tuning(fg.fed_avgm(loss, ordered(0.3), 0.7, 0.8), **one)
    state = plain.init(as_params(START))
    for t, (_, metrics) in enumerate(seen):
        hyper = fg.hyper.replace(plain.hyper, {"client.learning_rate": float(rate(t))})
        ((_, expected),), state = run(plain, 1, hyper, state=state)
        for path, slope in metrics.hypergradient.items():
            close(slope, expected.hypergradient[path], rtol=1e-6)
    assert int(last.inner.rounds) == 3


# ---- a factor on a schedule

COSINE, LINEAR = optax.cosine_decay_schedule(0.3, 5), optax.linear_schedule(0.2, 0.8, 3)
FACTORS = {  # an algorithm, and its schedules
    "client": (
        lambda: fg.fed_avgm(loss, ordered(COSINE), 0.7, 0.5),
        {"client.learning_rate": COSINE},
    ),
    "server": (
        lambda: fg.fed_avgm(loss, ordered(0.3), COSINE, LINEAR),
        {"server.learning_rate": COSINE, "server.momentum": LINEAR},
    ),
    "proximal": (
        lambda: fg.fed_prox(loss, ordered(0.3), proximal_weight=LINEAR),
        {"proximal_weight": LINEAR},
    ),
    "a layer": (
        lambda: fg.fed_avg(loss, ordered({"b": 0.1, "w": COSINE})),
        {"client.learning_rate.w": COSINE},
    ),
    "weights": (
        lambda: fg.fed_avg(loss, ordered(0.3), weighting="power").starting(
            {"weight_exponent": LINEAR}
        ),
        {"weight_exponent": LINEAR},
    ),
}
STILL = {
    "optimizer": optax.set_to_zero(),
    "guard": None,
    "gradient_from": fg.GradientCohort(batch_size=4),
}


def loss_after(make, schedules, factors, rounds):
    """The loss at the fresh clients after so many rounds; factors 1 but for those given."""

    def scaled(name, schedule):
        return lambda t: factors.get(name, 1.0) * jnp.float64(schedule(t))

    with jax.numpy_dtype_promotion("standard"):
        algorithm = make().starting({n: scaled(n, s) for n, s in schedules.items()})
        state = algorithm.init(as_params(START))
        for t in range(rounds):
            key = jax.random.fold_in(KEY, t)
            state, _ = algorithm.round(state, algorithm.hyper, POPULATION.select(TRAIN), key)
    return float(batch_loss(state.params, together(FRESH)))


@pytest.mark.promotes("dtype")
@pytest.mark.parametrize("make, schedules", FACTORS.values(), ids=FACTORS)
def test_the_derivative_by_a_factor_is_that_of_finite_differences(make, schedules):
    """Of the loss after three rounds, through all of them."""
    one = fg.self_tuning(make(), list(schedules), schedule="serial", horizon=math.inf, **STILL)
    seen, _ = run(one, 3)
    found, h = seen[-1][1].hypergradient, 1e-5
    assert sorted(found) == sorted(f"{name}.factor" for name in schedules)
    for name in schedules:
        above, below = (loss_after(make, schedules, {name: 1 + d}, 3) for d in (h, -h))
        close(found[f"{name}.factor"], (above - below) / (2 * h), rtol=2e-6)


def test_a_schedule_keeps_its_form_while_its_factor_is_learned():
    made = fg.fed_avgm(loss, ordered(COSINE), 0.7, 0.5)
    tuned = fg.self_tuning(made, {"client": fg.log()}, optax.sgd(2.0))
    assert tuned.hyper["client"]["learning_rate"].factor == 1.0
    result = fg.fit(
        tuned,
        POPULATION,
        params=as_params(START),
        rounds=6,
        cohort_size=3,
        key=KEY,
        progress=False,
    )
    factors = result.history["hyper.client.learning_rate.factor"]
    assert factors[0] == 1.0 and len(set(factors)) > 3 and (factors > 0).all()
    last = result.hyper["client"]["learning_rate"]
    assert last.factor == factors[-1]
    rates = fg.hyper.at(result.hyper, 2)["client"]["learning_rate"]
    close(rates, factors[-1] * float(COSINE(2)), rtol=1e-6)


def test_a_factor_can_be_set_and_drawn():
    made = fg.fed_avgm(loss, ordered(fg.hyper.Scaled(fg.hyper.Schedule(COSINE), 0.5)))
    assert fg.hyper.paths(made.hyper)["client.learning_rate.factor"] == 0.5
    assert list(fg.hyper.schedules(made.hyper)) == ["client.learning_rate"]
    other = made.starting({"client.learning_rate.factor": 2.0})
    close(fg.hyper.at(other.hyper, 1)["client"]["learning_rate"], 2 * float(COSINE(1)), rtol=1e-6)
    found = fg.random_search(
        made,
        POPULATION,
        {"client.learning_rate.factor": fg.log_uniform(0.1, 10)},
        params=as_params(START),
        trials=2,
        rounds=2,
        cohort_size=2,
        key=KEY,
        evaluate=fg.Evaluation({"loss": loss}, POPULATION),
        progress=False,
    )
    drawn = found.tried["client.learning_rate.factor"]
    close(found.hyper["client"]["learning_rate"].factor, drawn[found.best], rtol=1e-6)


# ---- mistakes


AVGM = TABLE["fedavgm"].algorithm
MISTAKES = {
    "name": (lambda: fg.self_tuning(AVGM, "server.learning_rat"), "'server.learning_rate'"),
    "nothing": (lambda: fg.self_tuning(AVGM, []), "name a hyperparameter"),
    "schedule": (lambda: fg.self_tuning(AVGM, "server", schedule="serie"), "'serial'"),
    "cohort": (lambda: fg.self_tuning(AVGM, "server", gradient_from="train"), '"fresh"'),
    "population": (lambda: fg.self_tuning(AVGM, "server", gradient_from=3), '"fresh"'),
    "batch": (lambda: fg.GradientCohort(batch_size=0), "batch_size=0"),
    "optimizer": (lambda: fg.self_tuning(AVGM, "server", 0.1), "an optax optimizer, got 0.1"),
    "option": (
        lambda: fg.self_tuning(AVGM, "server", schedul="serial"),
        r"self_tuning\(\) has no argument 'schedul'. Did you mean 'schedule'\?",
    ),
    "form": (lambda: fg.self_tuning(AVGM, {"server": "lag"}), "'log'"),
    "form of another": (
        lambda: fg.self_tuning(AVGM, {"server": fg.log(), "server.lr": fg.linear(0, 1)}),
        "no hyperparameter 'server.lr'",
    ),
    "empty bounds": (
        lambda: fg.self_tuning(AVGM, {"server.momentum": fg.linear(1, 0)}),
        "not below",
    ),
    "logit without bounds": (
        lambda: fg.self_tuning(AVGM, {"server": fg.logit()}),
        "finite bounds",
    ),
    "log of what may be negative": (
        lambda: fg.self_tuning(fg.fed_avg(loss, weighting="power"), {"weight_exponent": fg.log()}),
        "logarithm",
    ),
    "log of 0": (
        lambda: fg.self_tuning(fg.fed_avgm(loss, momentum=0.0), {"server.momentum": fg.log()}).init(
            as_params(START)
        ),
        "no logarithm",
    ),
    "amount of work": (
        lambda: run(fg.self_tuning(fg.fed_avg(loss, ordered(0.1, steps=LINEAR)), "steps"), 1),
        "no derivative by 'steps.factor'",
    ),
    "schedule of a round, at fit": (
        lambda: fg.fit(
            fg.self_tuning(AVGM, "server").starting({"server.momentum": lambda round: 0.1 * round}),
            fg.population(CLIENTS),
            params=as_params(START),
            rounds=1,
            cohort_size=2,
            key=jax.random.key(0),
            progress=False,
        ),
        "'server.momentum' is a schedule",
    ),
    "twice": (lambda: fg.self_tuning(fg.self_tuning(AVGM, "server"), "client"), "again"),
}


@pytest.mark.parametrize("mistake, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(mistake, message):
    with pytest.raises(fg.ArgumentError, match=message) as raised:
        mistake()
    assert str(raised.value).startswith(__file__), "it names the line of the user"
