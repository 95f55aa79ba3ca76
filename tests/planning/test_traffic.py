"""What a derivative sends: exactly the tables of the paper, for sizes that are parameters.

A mean sends one more number up, its count or sum of weights; the tables do not count it.
"""

import collections

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgrad as fg
from programs import EVAL, TABLE, TRAIN, Moved, normal

MODES = ("forward", "reverse", "mixed")
N = 3
size = st.integers(1, 5)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float64)


def sent(plan, placement=fg.CLIENTS):
    """Scalars (down, up) that a client of a placement receives and sends, in all rounds."""
    here = [t for t in plan.traffic if t.placement == placement.name]
    assert all(t.times == 1 for t in here)
    assert sum(t.down_bytes for t in plan.traffic) == plan.bytes[0]
    assert sum(t.up_bytes for t in plan.traffic) == plan.bytes[1]
    return sum(t.down for t in here), sum(t.up for t in here)


# --- class 1 ------------------------------------------------------------------------------------


def class_1(d, m, p, k, last=jnp.sin):
    """x in R^d -> u in R^m -> clients -> R^p -> y in R^k."""
    a, b, c = normal(0, m, d), normal(1, p, m), normal(2, k, p)

    @fg.program(z=fg.CLIENTS)
    def program(x, z):
        v = fg.broadcast(jnp.tanh(a @ x))
        return last(c @ fg.sum(jnp.tanh(b @ (v * z))))

    return program, (floats(d), floats(N, m))


@settings(max_examples=8)
@given(size, size, size, size)
def test_class_1(d, m, p, k):
    program, args = class_1(d, m, p, k)
    assert sent(fg.plan(program, *args)) == (m, p)
    forward, reverse, mixed = (fg.plan(fg.jacobian(program, mode=mode), *args) for mode in MODES)
    assert sent(forward) == (m * (1 + d), p * (1 + d))
    assert sent(reverse) == (m + k * p, p + k * m)
    assert sent(mixed) == (m, p * (1 + m))
    assert [plan.rounds for plan in (forward, reverse, mixed)] == [1, 2, 1]
    assert [plan.readdressed for plan in (forward, reverse, mixed)] == [(), ("clients",), ()]
    assert [plan.rules for plan in (forward, reverse, mixed)] == [("push",), ("pull",), ("local",)]
    assert forward.client_memory == mixed.client_memory == {"clients": 0}

    # One round of reverse is the program's own; the other carries cotangents.
    assert [(t.down, t.up) for t in reverse.traffic] == [(m, p), (k * p, k * m)]


@settings(max_examples=8)
@given(size, size, size, size)
def test_class_1_in_one_direction(d, m, p, k):
    program, args = class_1(d, m, p, k)
    push = fg.plan(fg.jvp(program), *args, floats(d))
    assert sent(push) == (m * 2, p * 2) and push.rounds == 1
    pull = fg.plan(fg.vjp(program), *args, floats(k))
    assert sent(pull) == (m + p, p + m) and pull.readdressed == ("clients",)


@settings(max_examples=8)
@given(size, size, size, size)
def test_linear_tail_needs_no_second_pass(d, m, p, k):
    program, args = class_1(d, m, p, k, last=lambda y: y)
    reverse = fg.plan(fg.jacobian(program, mode="reverse"), *args)
    assert sent(reverse) == (m, k * m) and reverse.rounds == 1 and not reverse.readdressed
    assert reverse.client_memory == {"clients": 0}
    mixed = fg.plan(fg.jacobian(program, mode="mixed"), *args)
    assert sent(mixed) == (m, p * m)
    auto = fg.plan(fg.jacobian(program), *args)
    assert sum(sent(auto)) <= min(sum(sent(reverse)), sum(sent(mixed)))
    if k < p:  # the cotangents of fewer outputs than there are sums
        assert auto.rules == ("pull",)


# --- distillation -------------------------------------------------------------------------------


@settings(max_examples=8)
@given(size, size, st.booleans())
def test_distillation(n, m, mean):
    a = normal(0, m, n)

    @fg.program(z=fg.CLIENTS)
    def loss(x, z):
        v = fg.broadcast(jnp.tanh(a @ x))
        losses = jnp.sum(jnp.sin(v) * z) ** 2
        return fg.mean(losses) if mean else jnp.exp(fg.sum(losses))

    args, count = (floats(n), floats(N, m)), int(mean)
    forward, reverse, mixed = (fg.plan(fg.value_and_grad(loss, mode=mode), *args) for mode in MODES)
    assert sent(fg.plan(loss, *args)) == (m, 1 + count)
    assert sent(forward) == (m + m * n, 1 + n + count)
    assert sent(reverse) == (m + 1, 1 + m + count)
    assert sent(mixed) == (m, 1 + m + count)
    assert [plan.rounds for plan in (forward, reverse, mixed)] == [1, 2, 1]
    assert reverse.readdressed == ("clients",)
    assert not forward.readdressed and not mixed.readdressed


# --- hyperparameters of federated training ------------------------------------------------------


def training(learned, local_steps=2):
    """One round of FedAvgM and one of its loss on other clients, by some hyperparameters."""

    @fg.program(train=TRAIN, count=TRAIN, test=EVAL, test_count=EVAL)
    def loss(hyper, w, velocity, train, count, test, test_count):
        h = {"lr": 1.0, "momentum": 0.9, **hyper}
        start = fg.broadcast(w, TRAIN)
        client_lr = fg.broadcast(h["client_lr"], TRAIN) if "client_lr" in hyper else 0.1
        exponent = fg.broadcast(h["exponent"], TRAIN) if "exponent" in hyper else 1.0

        def step(local, _):
            slope = jax.grad(lambda v: jnp.sum(jnp.tanh(v * train) ** 2))(local)
            return local - client_lr * slope, None

        local, _ = jax.lax.scan(step, start, None, length=local_steps)
        delta = fg.mean(local - start, weights=count**exponent, at=TRAIN)
        velocity = h["momentum"] * velocity + delta
        there = fg.broadcast(w + h["lr"] * velocity, EVAL)
        return fg.mean(jnp.sum(jnp.sin(there * test)), weights=test_count, at=EVAL)

    def args(n):
        data = (floats(N, n), floats(N), floats(N + 1, n), floats(N + 1))
        return {name: floats() for name in learned}, floats(n), floats(n), *data

    return loss, args


def stages(learned, n, mode):
    program, args = training(learned)
    if mode is None:
        return fg.plan(program, *args(n))
    return fg.plan(fg.value_and_grad(program, "hyper", mode=mode), *args(n))


WEIGHT = 1


@pytest.mark.parametrize("n", [2, 7])
def test_fedavgm(n):
    """lr and momentum of the server: the training round has no part in it."""
    base, forward, reverse, mixed = (stages(("lr", "momentum"), n, mode) for mode in (None, *MODES))
    assert sent(base, TRAIN) == (n, n + WEIGHT)
    for plan in (forward, reverse, mixed):
        assert sent(plan, TRAIN) == sent(base, TRAIN)
        assert "train" not in plan.readdressed and plan.client_memory["train"] == 0
        assert len(plan.rules) == 1
    assert sent(base, EVAL) == (n, 1 + WEIGHT)
    assert sent(forward, EVAL) == (3 * n, 3 + WEIGHT)
    assert sent(reverse, EVAL) == (n + 1, 1 + n + WEIGHT)
    assert sent(mixed, EVAL) == (n, 1 + n + WEIGHT)
    # Reverse needs the loss cohort twice, but not a third round: asked for its weight next to the
    # training, it gives the server all that the cotangent depends on.
    assert [plan.rounds for plan in (base, forward, reverse, mixed)] == [2, 2, 2, 2]
    assert (forward.readdressed, reverse.readdressed, mixed.readdressed) == ((), ("eval",), ())


@pytest.mark.parametrize("n", [2, 7])
def test_weight_exponent(n):
    base, forward, reverse, mixed = (stages(("exponent",), n, mode) for mode in (None, *MODES))
    assert (sent(base, TRAIN), sent(base, EVAL)) == ((n + 1, n + 1), (n, 1 + WEIGHT))
    assert sent(forward, TRAIN) == (n + 1, 2 * (n + 1))
    assert sent(forward, EVAL) == (2 * n, 2 + WEIGHT)
    assert sent(mixed, TRAIN) == (n + 1, 2 * (n + 1))
    assert sent(mixed, EVAL) == (n, 1 + n + WEIGHT)
    assert sent(reverse, TRAIN) == (2 * (n + 1), (n + 1) + 1)
    assert sent(reverse, EVAL) == (n + 1, 1 + n + WEIGHT)
    assert not forward.readdressed and not mixed.readdressed
    assert set(reverse.readdressed) == {"train", "eval"}


@pytest.mark.parametrize("n", [2, 7])
def test_client_learning_rate(n):
    """One tangent through local SGD, and never an n x n Jacobian."""
    base, forward, reverse, mixed = (stages(("client_lr",), n, mode) for mode in (None, *MODES))
    assert sent(base, TRAIN) == (n + 1, n + WEIGHT)
    assert sent(forward, TRAIN) == (n + 1, 2 * n + WEIGHT)
    assert sent(mixed, TRAIN) == (n + 1, 2 * n + WEIGHT)
    assert sent(reverse, TRAIN) == (n + 1 + n, n + WEIGHT + 1)
    assert sent(forward, EVAL) == (2 * n, 2 + WEIGHT)
    assert sent(mixed, EVAL) == (n, 1 + n + WEIGHT)
    assert sent(reverse, EVAL) == (n + 1, 1 + n + WEIGHT)
    assert not forward.readdressed and not mixed.readdressed
    assert set(reverse.readdressed) == {"train", "eval"}


def test_all_hyperparameters_together():
    n, learned = 5, ("lr", "momentum", "exponent", "client_lr")
    mixed = stages(learned, n, "mixed")
    # A column each for the client learning rate and the exponent; the weights do not know the
    # learning rate. Loss stage as for any of them: one gradient.
    assert sent(mixed, TRAIN) == (n + 2, n + WEIGHT + 2 * n + 1)
    assert sent(mixed, EVAL) == (n, 1 + n + WEIGHT)
    assert stages(learned, n, "auto").rules == ("local", "local")


# --- rounds in a loop ---------------------------------------------------------------------------


@pytest.mark.parametrize("n, length", [(2, 3), (4, 2)])
def test_scan_of_rounds(n, length):
    """Mixed sends nothing more down and asks nobody again on the way back."""

    @fg.program(z=fg.CLIENTS)
    def f(w, z):
        def body(w, _):
            return w - jnp.sin(fg.sum(jnp.tanh(fg.broadcast(w) * z))), None

        return jnp.sum(jax.lax.scan(body, w, None, length=length)[0] ** 2)

    args = (floats(n), floats(N, n))

    def traffic(mode):
        plan = fg.plan(fg.value_and_grad(f, mode=mode), *args)
        return plan.rounds, [(t.down, t.up, t.times) for t in plan.traffic]

    assert traffic("forward") == (length, [(n * (1 + n), n * (1 + n), length)])
    assert traffic("mixed") == (length, [(n, n * (1 + n), length)])
    assert traffic("reverse") == (2 * length, [(n, n, length), (n, n, length)])


# --- a plan counts what really moves ------------------------------------------------------------

REAL = ("weight_exponent", "stateful", "train_then_eval", "fedavgm", "scan_client_state")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REAL)
def test_plan_counts_what_the_reference_moves(name, mode):
    case = next(c for c in TABLE if c.name == name)
    moved, settings_ = Moved(), {"mode": mode, "has_aux": bool(case.client_outputs)}
    program = case.program
    if case.client_outputs:  # (y, aux) of several aux

        def pair(*args):
            y, *aux = case.program(*args)
            return y, aux

        pair.__signature__ = program.signature
        program = fg.Program(pair, program.placements)
    gradient = fg.value_and_grad(program, case.server_argnums[0], **settings_)
    args = case.args(N)
    gradient.on(fg.executors.reference(observe=moved))(*args)
    plan = fg.plan(gradient, *args)
    for placement, clients in plan.clients.items():
        counted = collections.Counter()
        for t in plan.traffic:
            if t.placement == placement:
                counted[t.down, t.down_bytes, t.up, t.up_bytes] += t.times
        for client in range(clients):
            assert collections.Counter(moved.messages[placement, client]) == counted
