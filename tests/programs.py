"""The table of programs that the laws are tested on. A new program joins by being added here."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedgrad as fg
from fedgrad.core.arguments import read_arguments
from fedgrad.planning.plan import ready_plan

TRAIN, EVAL = fg.Placement("train"), fg.Placement("eval")


def forgetting(program, *args):
    """The plan in which clients remember nothing."""
    return ready_plan(program, read_arguments(program, program.bind(args, {})), recompute=True)


@dataclass(frozen=True)
class Case:
    """A program, and all that the laws need to know about it."""

    name: str
    program: fg.Program
    args: Callable[[int], tuple[Any, ...]]  # float64 arguments for n clients
    centralized: Callable[..., Any]  # the same result in plain JAX, from the same arguments
    rounds: int
    server_argnums: tuple[int, ...] = (0,)  # the server's differentiable arguments
    scalar: bool = True  # the result is one scalar at the server
    client_outputs: tuple[int, ...] = ()  # which leaves of the result are at clients
    symmetric: bool = True  # nothing depends on the order of the clients
    carries: bool = False  # a loop carries values of clients, which then have to remember them
    decided: bool = False  # data decide how often there is communication
    reverse: bool = True  # JAX can pull back through it


TABLE: list[Case] = []


def case(
    args: Callable[[int], tuple[Any, ...]], centralized: Callable[..., Any], **facts: Any
) -> Callable[[fg.Program], fg.Program]:
    """Put a program into the table."""

    def add(program: fg.Program) -> fg.Program:
        # Over all clients at once, plain formulas broadcast; programs have nothing to broadcast.
        formula = jax.numpy_rank_promotion("allow")(centralized)
        TABLE.append(Case(program.name, program, args, formula, **facts))
        return program

    return add


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def server_and_clients(n: int) -> tuple[jax.Array, jax.Array]:
    """A vector of the server and a vector of each client."""
    return normal(0, 3), normal(1, n, 3)


def counts(n: int) -> jax.Array:
    return jnp.arange(1.0, n + 1) * 3


def per_client(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Plain JAX: the mean over rows of a function of (x, row)."""
    return lambda x, z: jnp.stack([fun(x, row) for row in z]).mean(0)


# --- one round ----------------------------------------------------------------------------------


def _class_1(x, z):
    return jnp.sum(jnp.tanh(z * (jnp.sin(x) * x)).sum(0) ** 2)


@case(server_and_clients, _class_1, rounds=1)
@fg.program(z=fg.CLIENTS)
def class_1(x, z):
    u = jnp.sin(x) * x  # f1, at the server
    y = jnp.tanh(z * fg.broadcast(u))  # f2, at each client
    return jnp.sum(fg.sum(y) ** 2)  # f3, at the server


def _squares(x, z):
    return ((x - z) ** 2).sum(1)


@case(server_and_clients, lambda x, z: _squares(x, z).mean(), rounds=1)
@fg.program(z=fg.CLIENTS)
def unweighted_mean(x, z):
    return fg.mean(jnp.sum((fg.broadcast(x) - z) ** 2))


@case(
    lambda n: (*server_and_clients(n), counts(n)),
    lambda x, z, count: (_squares(x, z) * count).sum() / count.sum(),
    rounds=1,
)
@fg.program(z=fg.CLIENTS, count=fg.CLIENTS)
def weighted_mean(x, z, count):
    return fg.mean(jnp.sum((fg.broadcast(x) - z) ** 2), weights=count)


def _weight_exponent(q, x, z, count):
    return jnp.average(_squares(x, z), weights=count**q)


@case(
    lambda n: (jnp.float64(0.7), *server_and_clients(n), counts(n)),
    _weight_exponent,
    rounds=1,
    server_argnums=(0, 1),
)
@fg.program(z=fg.CLIENTS, count=fg.CLIENTS)
def weight_exponent(q, x, z, count):
    losses = jnp.sum((fg.broadcast(x) - z) ** 2)
    return fg.mean(losses, weights=count ** fg.broadcast(q))


MIXING = normal(7, 4, 2)


def _distillation(x, z):
    return jnp.tanh(z * (MIXING @ x)).mean()


@case(lambda n: (normal(0, 2), normal(1, n, 4)), _distillation, rounds=1)
@fg.program(z=fg.CLIENTS)
def distillation(x, z):
    synthetic = MIXING @ x  # what is sent is larger than what is learned
    return fg.mean(jnp.mean(jnp.tanh(z * fg.broadcast(synthetic))))


def _pytrees(params, data):
    inner = data["x"] @ params["w"] + params["b"]
    error = jnp.tanh(inner) - data["y"][0]
    return {"loss": (error**2).mean(), "bias": (jnp.sin(error).sum(), params["b"] * 2)}


@case(
    lambda n: (
        {"w": normal(0, 3), "b": normal(2)},
        {"x": normal(1, n, 3), "y": (normal(3, n),)},
    ),
    _pytrees,
    rounds=1,
    scalar=False,
)
@fg.program(data=fg.CLIENTS)
def pytrees_and_aux(params, data):
    here = fg.broadcast(params)
    error = jnp.tanh(data["x"] @ here["w"] + here["b"]) - data["y"][0]
    return {"loss": fg.mean(error**2), "bias": (fg.sum(jnp.sin(error)), params["b"] * 2)}


@case(
    server_and_clients,
    lambda x, z: ((x * z).sum(0), jnp.sin(z * x), z * 2),
    rounds=1,
    scalar=False,
    client_outputs=(1, 2),
)
@fg.program(z=fg.CLIENTS)
def client_outputs(x, z):
    v = fg.broadcast(x)
    return fg.sum(v * z), jnp.sin(z * v), z * 2


# --- several rounds -----------------------------------------------------------------------------


def _rounds(k):
    def centralized(x, z):
        for i in range(k):
            x = jnp.sin(x) + jnp.cos((i + 1) * x * z).mean(0) ** 2
        return jnp.sum(x**3)

    return centralized


def _round(i, x, z):
    return jnp.sin(x) + fg.mean(jnp.cos((i + 1) * fg.broadcast(x) * z)) ** 2


@case(server_and_clients, _rounds(2), rounds=2)
@fg.program(z=fg.CLIENTS)
def two_rounds(x, z):
    return jnp.sum(_round(1, _round(0, x, z), z) ** 3)


@case(server_and_clients, _rounds(3), rounds=3)
@fg.program(z=fg.CLIENTS)
def three_rounds(x, z):
    for i in range(3):
        x = _round(i, x, z)
    return jnp.sum(x**3)


def _stateful(x, z):
    s = jnp.tanh(x * z)
    return ((s - jnp.sin(s.mean(0))) ** 2).sum()


@case(server_and_clients, _stateful, rounds=2)
@fg.program(z=fg.CLIENTS)
def stateful(x, z):
    s = jnp.tanh(fg.broadcast(x) * z)  # each client keeps its s for the second round
    center = jnp.sin(fg.mean(s))
    return fg.sum(jnp.sum((s - fg.broadcast(center)) ** 2))


def _state_in_and_out(x, z, state):
    new = state * 0.5 + x * z
    return jnp.sin(new.mean(0)).sum(), new


@case(
    lambda n: (*server_and_clients(n), normal(2, n, 3)),
    _state_in_and_out,
    rounds=1,
    scalar=False,
    client_outputs=(1,),
)
@fg.program(z=fg.CLIENTS, state=fg.CLIENTS)
def state_in_and_out(x, z, state):
    state = state * 0.5 + fg.broadcast(x) * z
    return jnp.sum(jnp.sin(fg.mean(state))), state


def _recursion(x, z, depth=2):
    if depth == 0:
        return x
    half = _recursion(x, z, depth - 1)
    return jnp.sin(half) + (half * z).mean(0)


@case(server_and_clients, lambda x, z: _recursion(x, z).sum(), rounds=2)
@fg.program(z=fg.CLIENTS)
def recursion(x, z):
    def descend(x, depth):
        if depth == 0:
            return x
        half = descend(x, depth - 1)
        return jnp.sin(half) + fg.mean(fg.broadcast(half) * z)

    return jnp.sum(descend(x, 2))


@fg.program(z=fg.CLIENTS)
def mean_cosine(x, z):
    """A program that others call."""
    return fg.mean(jnp.cos(fg.broadcast(x) * z))


def _nested(x, z):
    first = jnp.cos(x * z).mean(0)
    return (jnp.cos((x * first) * z * 2).mean(0) ** 2).sum()


@case(server_and_clients, _nested, rounds=2)
@fg.program(z=fg.CLIENTS)
def nested(x, z):
    return jnp.sum(mean_cosine(x * mean_cosine(x, z), z=z * 2) ** 2)


# --- several placements -------------------------------------------------------------------------


def train_and_eval(n: int) -> tuple[Any, ...]:
    return normal(0, 3), normal(1, n, 3), normal(2, n + 2, 3)


def _train_then_eval(x, z, held_out):
    trained = x - 0.1 * jnp.tanh(x * z).mean(0)
    return jnp.sin(trained * held_out).sum(1).mean()


@case(train_and_eval, _train_then_eval, rounds=2)
@fg.program(z=TRAIN, held_out=EVAL)
def train_then_eval(x, z, held_out):
    trained = x - 0.1 * fg.mean(jnp.tanh(fg.broadcast(x, TRAIN) * z), at=TRAIN)
    return fg.mean(jnp.sum(jnp.sin(fg.broadcast(trained, at=EVAL) * held_out)), at=EVAL)


@case(
    train_and_eval,
    lambda x, z, held_out: jnp.tanh(x * z).sum() * jnp.cos(x * held_out).sum(),
    rounds=1,
)
@fg.program(z=TRAIN, held_out=EVAL)
def parallel_placements(x, z, held_out):
    a = fg.sum(jnp.sum(jnp.tanh(fg.broadcast(x, TRAIN) * z)), TRAIN)
    b = fg.sum(jnp.sum(jnp.cos(fg.broadcast(x, EVAL) * held_out)), EVAL)
    return a * b


def _loss(w, data):
    return jnp.mean((jnp.tanh(data["x"] @ w) - data["y"]) ** 2)


def _examples(seed, n):
    return {"x": normal(seed, n, 4, 2), "y": normal(seed + 1, n, 4)}


def _fedavgm(hyper, w, velocity, train, test):
    deltas = []
    for i in range(len(train["y"])):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], train)
        local = w
        for _ in range(2):
            local = local - 0.3 * jax.grad(_loss)(local, one)
        deltas.append(local - w)
    velocity = hyper["momentum"] * velocity + sum(deltas) / len(deltas)
    w = w + hyper["lr"] * velocity
    return jax.vmap(_loss, (None, 0))(w, test).mean()


@case(
    lambda n: (
        {"lr": jnp.float64(0.8), "momentum": jnp.float64(0.5)},
        normal(0, 2),
        normal(1, 2),
        _examples(2, n),
        _examples(4, n + 1),
    ),
    _fedavgm,
    rounds=2,
    server_argnums=(0, 1, 2),
)
@fg.program(train=TRAIN, test=EVAL)
def fedavgm(hyper, w, velocity, train, test):
    start = fg.broadcast(w, TRAIN)

    def step(local, _):
        return local - 0.3 * jax.grad(_loss)(local, train), None

    local, _ = jax.lax.scan(step, start, None, length=2)
    velocity = hyper["momentum"] * velocity + fg.mean(local - start, at=TRAIN)
    w = w + hyper["lr"] * velocity
    return fg.mean(_loss(fg.broadcast(w, EVAL), test), at=EVAL)


def _client_learning_rate(lr, w, data):
    def trained(one):
        local = w
        for i in range(4):
            local = local - lr * jax.grad(_loss)(local, jax.tree.map(lambda leaf: leaf[i], one))
        return local

    single = jax.tree.map(lambda leaf: leaf[:, :, None], data)
    return jnp.sum(jax.vmap(trained)(single).mean(0) ** 2)


@case(
    lambda n: (jnp.float64(0.2), normal(0, 2), _examples(1, n)),
    _client_learning_rate,
    rounds=1,
    server_argnums=(0, 1),
)
@fg.program(data=fg.CLIENTS)
def client_learning_rate(lr, w, data):
    lr, start = fg.broadcast((lr, w))

    def step(local, example):
        return local - lr * jax.grad(_loss)(local, example), None

    local, _ = jax.lax.scan(step, start, data)
    return jnp.sum(fg.mean(local) ** 2)


# --- control flow around communication ----------------------------------------------------------


def _scan_rounds(x, rates, z):
    losses = []
    for rate in rates:
        losses.append(_squares(x, z).mean())
        x = x - rate * jnp.tanh(x - z).mean(0)
    return jnp.sum(x), jnp.stack(losses)


@case(
    lambda n: (normal(0, 3), jnp.array([0.1, 0.4, 0.2]), normal(1, n, 3)),
    _scan_rounds,
    rounds=3,
    server_argnums=(0, 1),
    scalar=False,
)
@fg.program(z=fg.CLIENTS)
def scan_rounds(x, rates, z):
    def body(x, rate):
        here = fg.broadcast(x)
        loss = fg.mean(jnp.sum((here - z) ** 2))
        return x - rate * fg.mean(jnp.tanh(here - z)), loss

    x, losses = jax.lax.scan(body, x, rates)
    return jnp.sum(x), losses


def _scan_state(x, z, steps):
    state, seen = jnp.zeros_like(z), []
    for i in range(2):
        state = state + x * z * steps[:, i, None]
        x = x + jnp.sin(state).mean(0)
        seen.append(state.sum(1))
    return jnp.sum(x**2), state, jnp.stack(seen, 1)


@case(
    lambda n: (*server_and_clients(n), normal(2, n, 2)),
    _scan_state,
    rounds=2,
    scalar=False,
    client_outputs=(1, 2),
    carries=True,
)
@fg.program(z=fg.CLIENTS, steps=fg.CLIENTS)
def scan_client_state(x, z, steps):
    def body(carry, step):
        x, state = carry
        state = state + fg.broadcast(x) * z * step
        return (x + fg.mean(jnp.sin(state)), state), jnp.sum(state)

    (x, state), seen = jax.lax.scan(body, (x, jnp.zeros(3)), steps)
    return jnp.sum(x**2), state, seen


@case(
    server_and_clients,
    lambda x, z: jnp.where(x.sum() > 0, (x * z).mean(0).sum(), jnp.sin(x).sum()),
    rounds=1,
    decided=True,
)
@fg.program(z=fg.CLIENTS)
def cond(x, z):
    return jax.lax.cond(
        jnp.sum(x) > 0,
        lambda x: jnp.sum(fg.mean(fg.broadcast(x) * z)),
        lambda x: jnp.sum(jnp.sin(x)),
        x,
    )


@case(
    lambda n: (normal(0, 3), jnp.int64(2), normal(1, n, 3)),
    lambda x, which, z: jnp.cos(x * z).mean(0).sum(),
    rounds=1,
    decided=True,
)
@fg.program(z=fg.CLIENTS)
def switch(x, which, z):
    branches = [
        lambda x: jnp.sum(x),
        lambda x: fg.sum(jnp.sum(fg.broadcast(x) + z)),
        lambda x: jnp.sum(fg.mean(jnp.cos(fg.broadcast(x) * z))),
    ]
    return jax.lax.switch(which, branches, x)


def _while(x, z):
    for _ in range(3):
        x = x + 0.5 * jnp.cos(x * z).mean(0)
    return jnp.sum(x**2)


@case(server_and_clients, _while, rounds=1, decided=True, reverse=False)
@fg.program(z=fg.CLIENTS)
def while_loop(x, z):
    def more(state):
        i, x = state
        return (i < 3) & (jnp.sum(x**2) < 1e6)

    def body(state):
        i, x = state
        return i + 1, x + 0.5 * fg.mean(jnp.cos(fg.broadcast(x) * z))

    return jnp.sum(jax.lax.while_loop(more, body, (0, x))[1] ** 2)


# --- other transformations of JAX ---------------------------------------------------------------


@jax.custom_jvp
def doubled_slope(x):
    """The identity, with a derivative of 2: only its own rule gives that."""
    return x * 1.0


doubled_slope.defjvps(lambda t, ans, x: 2 * t)


@jax.custom_vjp
def clipped_slope(x):
    """The identity, whose cotangents are clipped."""
    return x * 1.0


clipped_slope.defvjp(lambda x: (x * 1.0, None), lambda _, ct: (jnp.clip(ct, -0.05, 0.05),))


def _custom_jvp_inside(x, z):
    return jnp.sin(doubled_slope(doubled_slope(x) * z)).mean(0).sum()


@case(server_and_clients, _custom_jvp_inside, rounds=1)
@fg.program(z=fg.CLIENTS)
def custom_jvp_inside(x, z):
    here = fg.broadcast(doubled_slope(x))
    return jnp.sum(fg.mean(jnp.sin(doubled_slope(here * z))))


def _custom_vjp_inside(x, z):
    x = clipped_slope(x)
    return sum(jnp.sin(clipped_slope(x * row)) for row in z).sum()


@case(server_and_clients, _custom_vjp_inside, rounds=1)
@fg.program(z=fg.CLIENTS)
def custom_vjp_inside(x, z):
    here = fg.broadcast(clipped_slope(x))
    return jnp.sum(fg.sum(jnp.sin(clipped_slope(here * z))))


@jax.custom_jvp
def mean_product(x, z):
    """Communication within a custom_jvp, whose rule communicates too."""
    return fg.mean(fg.broadcast(x) * z)


@mean_product.defjvp
def _mean_product_jvp(primals, tangents):
    (x, z), (dx, dz) = primals, tangents
    return mean_product(x, z), fg.mean(fg.broadcast(dx) * z + fg.broadcast(x) * dz)


@case(server_and_clients, lambda x, z: jnp.sin((x * z).mean(0)).sum(), rounds=1)
@fg.program(z=fg.CLIENTS)
def custom_jvp_around(x, z):
    return jnp.sum(jnp.sin(mean_product(x, z)))


@jax.custom_vjp
def sum_product(x, z):
    """Communication within a custom_vjp, whose rule communicates too."""
    return fg.sum(fg.broadcast(x) * z)


def _sum_product_fwd(x, z):
    return sum_product(x, z), (x, z)


def _sum_product_bwd(saved, ct):
    x, z = saved
    there = fg.broadcast(ct)
    return fg.sum(there * z), there * fg.broadcast(x)


sum_product.defvjp(_sum_product_fwd, _sum_product_bwd)


@case(server_and_clients, lambda x, z: jnp.sin((x * z).sum(0)).sum(), rounds=1)
@fg.program(z=fg.CLIENTS)
def custom_vjp_around(x, z):
    return jnp.sum(jnp.sin(sum_product(x, z)))


@case(server_and_clients, _rounds(2), rounds=2)
@fg.program(z=fg.CLIENTS)
def checkpoint_around(x, z):
    x = jax.checkpoint(functools.partial(_round, 0))(x, z)
    return jnp.sum(jax.checkpoint(lambda x: _round(1, x, z))(x) ** 3)


@case(server_and_clients, _rounds(2), rounds=2)
@fg.program(z=fg.CLIENTS)
def jit_around_and_inside(x, z):
    around = jax.jit(_round, static_argnums=0)
    inside = jax.jit(lambda x, z: jnp.cos(2 * x * z))
    x = around(0, x, z)
    return jnp.sum((jnp.sin(x) + fg.mean(inside(fg.broadcast(x), z)) ** 2) ** 3)


def _vmap_inside(x, z):
    return sum(jnp.tanh(row * z).sum(1).mean() ** 2 for row in x)


@case(lambda n: (normal(0, 2, 3), normal(1, n, 3)), _vmap_inside, rounds=1)
@fg.program(z=fg.CLIENTS)
def vmap_inside(x, z):
    def one(row):
        here = fg.broadcast(row)
        return fg.mean(jnp.sum(jax.vmap(jnp.tanh)(here * z)))  # vmaps around and at the client

    return jnp.sum(jax.vmap(one)(x) ** 2)


# --- randomness and ragged clients --------------------------------------------------------------


def _random(x, key, z):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(z)))
    noise = jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys)
    return jnp.sin(x * z + noise).mean(0).sum()


@case(
    lambda n: (normal(0, 3), jax.random.key(3), normal(1, n, 3)),
    _random,
    rounds=1,
    symmetric=False,  # the noise of a client goes with its position
)
@fg.program(z=fg.CLIENTS)
def client_randomness(x, key, z):
    noise = jax.random.normal(fg.client_key(key), (3,))
    return jnp.sum(fg.mean(jnp.sin(fg.broadcast(x) * z + noise)))


def ragged_clients(n: int) -> list[dict[str, np.ndarray]]:
    """n clients with 1, 3, 5, ... examples, not in the order of their sizes."""
    sizes = np.roll(1 + 2 * np.arange(n), 1)
    rng = np.random.default_rng(5)
    return [{"x": rng.normal(size=(k, 2)), "y": rng.normal(size=k)} for k in sizes]


def masked_loss(w, batch, mask):
    errors = (jnp.tanh(batch["x"] @ w) - batch["y"]) ** 2
    return jnp.mean(errors, where=mask)


def unpadded(cohort: fg.Cohort) -> list[Any]:
    """Each client's own examples, read back from a cohort."""
    ends = zip(
        np.asarray(cohort.offset), np.asarray(cohort.offset) + np.asarray(cohort.count), strict=True
    )
    return [jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], cohort.store) for a, b in ends]


def _ragged_sgd(lr, w, data):
    clients, total = unpadded(data), 0.0
    for one in clients:
        local = w
        for start in range(0, len(one["y"]), 2):
            part = jax.tree.map(lambda leaf, s=start: leaf[s : s + 2], one)
            local = local - lr * jax.grad(_loss)(local, part)
        total = total + local * len(one["y"])
    return jnp.sum((total / sum(len(one["y"]) for one in clients)) ** 2)


@case(
    lambda n: (jnp.float64(0.3), normal(0, 2), fg.cohort(ragged_clients(n))),
    _ragged_sgd,
    rounds=1,
    server_argnums=(0, 1),
)
@fg.program(data=fg.CLIENTS)
def ragged_sgd(lr, w, data):
    lr, start = fg.broadcast((lr, w))

    def step(local, batch, mask):
        return local - lr * jax.grad(masked_loss)(local, batch, mask)

    return jnp.sum(fg.mean(data.fold(step, start, 2), weights=data.count) ** 2)


# --- what once went wrong -----------------------------------------------------------------------


def _some_dropped(n: int) -> tuple[Any, ...]:
    """Of many clients, one has bad data and one an infinite slope; neither counts."""
    x, z, w = normal(0, 3), np.array(normal(1, n, 3)), np.arange(1.0, n + 1)
    if n > 2:
        z[0], z[1], w[:2] = np.nan, x, 0
    return x, jnp.asarray(z), jnp.asarray(w)


def _dropped_clients(x, z, w):
    kept = np.flatnonzero(np.asarray(w))
    return jnp.average(jax.vmap(lambda row: jnp.linalg.norm(x - row))(z[kept]), weights=w[kept])


@case(_some_dropped, _dropped_clients, rounds=1)
@fg.program(z=fg.CLIENTS, w=fg.CLIENTS)
def dropped_clients(x, z, w):
    return fg.mean(jnp.linalg.norm(fg.broadcast(x) - z), weights=w)


@case(_some_dropped, lambda x, z, w: _dropped_clients(x, z, w) * w.sum(), rounds=1)
@fg.program(z=fg.CLIENTS, w=fg.CLIENTS)
def dropped_and_counted(x, z, w):
    """What a client does for a mean in which it does not count, it does inside of a jit, and uses
    for a sum in which it does count."""
    norm = jax.jit(lambda v: jnp.linalg.norm(v - z))
    mean = jax.jit(lambda loss: fg.mean(loss, weights=w))(norm(fg.broadcast(x)))
    return mean * fg.sum(w)


def _on_sphere(w, batch, mask):
    """A loss that is singular at zero: rows of zeros would make it NaN, masked or not."""
    rows = batch["x"] / jnp.linalg.norm(batch["x"], axis=1, keepdims=True)
    return jnp.mean((rows @ w) ** 2, where=mask)


def _singular_at_zero(w, data):
    clients = unpadded(data)
    steps = []
    for one in clients:
        local = w
        for start in range(0, len(one["y"]), 4):
            part = jax.tree.map(lambda leaf, s=start: leaf[s : s + 4], one)
            local = local - 0.3 * jax.grad(_on_sphere)(local, part, jnp.ones(len(part["y"]), bool))
        steps.append(local)
    return jnp.sum((sum(steps) / len(steps)) ** 2)


@case(lambda n: (normal(0, 2), fg.cohort(ragged_clients(n))), _singular_at_zero, rounds=1)
@fg.program(data=fg.CLIENTS)
def singular_at_zero(w, data):
    def step(local, batch, mask):
        return local - 0.3 * jax.grad(_on_sphere)(local, batch, mask)

    return jnp.sum(fg.mean(data.fold(step, fg.broadcast(w), 4)) ** 2)


def _vmapped_while(x, z):
    total = 0.0
    for row, times in zip(x, (1, 3), strict=True):
        for _ in range(times):
            row = row + 0.5 * jnp.cos(row * z).mean(0)
        total = total + jnp.sum(row**2)
    return total


@case(
    lambda n: (normal(0, 2, 3), normal(1, n, 3)),
    _vmapped_while,
    rounds=1,
    decided=True,
    reverse=False,
)
@fg.program(z=fg.CLIENTS)
def vmapped_while(x, z):
    """Under vmap every row ends when it is done."""

    def one(row, times):
        def body(state):
            i, row = state
            return i + 1, row + 0.5 * fg.mean(jnp.cos(fg.broadcast(row) * z))

        return jax.lax.while_loop(lambda state: state[0] < times, body, (0, row))[1]

    return jnp.sum(jax.vmap(one)(x, jnp.array([1, 3])) ** 2)


def _cond_with_dead_communication(x, z):
    scale = jnp.where(x.sum() > 0, 2.0, 1.0)
    second = jnp.where(x.sum() > 0, (x * z).mean(0), x)
    return (x * (z * scale) ** 2).sum() + jnp.sum(jnp.sign(second))


@case(server_and_clients, _cond_with_dead_communication, rounds=3, decided=True, carries=True)
@fg.program(z=fg.CLIENTS)
def cond_with_dead_communication(x, z):
    """The sum inside of the cond has no derivative; what is left of the cond only clients do."""
    here = fg.broadcast(x)
    mine, ours = jax.lax.cond(jnp.sum(x) > 0, lambda: (z * 2.0, fg.mean(here * z)), lambda: (z, x))
    return fg.sum(jnp.sum(here * mine**2)) + jnp.sum(jnp.sign(ours))


def _cond_in_scan(x, z):
    for i in range(3):
        if i % 2:
            x, z = x + jnp.cos(x * z).mean(0), z * 0.5
        else:
            x, z = jnp.sin(x), z * x
    return jnp.sum(x) + jnp.sum(z)


@case(server_and_clients, _cond_in_scan, rounds=4, decided=True, carries=True)
@fg.program(z=fg.CLIENTS)
def cond_in_scan(x, z):
    """Each branch keeps values of the server and of clients for the way back."""

    def body(carry, i):
        return jax.lax.cond(
            i % 2 == 1,
            lambda x, z: (x + fg.mean(jnp.cos(fg.broadcast(x) * z)), z * 0.5),
            lambda x, z: (jnp.sin(x), z * fg.broadcast(x)),
            *carry,
        ), None

    (x, z), _ = jax.lax.scan(body, (x, z), jnp.arange(3))
    return jnp.sum(x) + fg.sum(jnp.sum(z))


@case(
    server_and_clients,
    lambda x, z: ((x * z).sum(0), (x * z)[:, :0]),
    rounds=1,
    scalar=False,
    client_outputs=(1,),
)
@fg.program(z=fg.CLIENTS)
def nothing_each(x, z):
    """Every client returns an array of size zero."""
    product = fg.broadcast(x) * z
    return fg.sum(product), product[:0]


def large_counts(n: int) -> jax.Array:
    """Whole numbers whose sum no 64 bits can hold; 4e18 is below 2**62."""
    return jnp.arange(n, dtype=jnp.int64) % 2 * 10**18 + 4 * 10**18


@case(
    lambda n: (*server_and_clients(n), large_counts(n)),
    lambda x, z, count: jnp.average(_squares(x, z), weights=count.astype(float)),
    rounds=1,
)
@fg.program(z=fg.CLIENTS, count=fg.CLIENTS)
def large_integer_weights(x, z, count):
    return fg.mean(jnp.sum((fg.broadcast(x) - z) ** 2), weights=count)


# --- a cond that is decided before its scan: JAX would take it apart ------------------------------


def decided_before(n: int) -> tuple[jax.Array, ...]:
    """(x, s, z): each program takes one branch by s, and the other one by -s."""
    return normal(0, 3), jnp.float64(1.3), normal(1, n, 3)


def both_branches(run: Callable[..., Any]) -> Callable[..., Any]:
    """A number of what `run(x, s, z)` gives if the first branch is taken, and if the second."""

    def both(x, s, z):
        return sum(jnp.sum(run(x, sign * s, z) ** 2) for sign in (1.0, -1.0))

    both.__name__ = run.__name__
    return both


def twice(step: Callable[..., Any], start: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (step(carry), None), start, None, length=2)[0]


def _hands_on(x, s, z):
    for _ in range(2):
        x = jnp.where(s > 0, (jnp.tanh(x) * z).mean(0), x)
    return x


@case(decided_before, both_branches(_hands_on), rounds=4, decided=True)
@fg.program(z=fg.CLIENTS)
@both_branches
def cond_hands_on_the_carry(x, s, z):
    def step(c):
        return jax.lax.cond(s > 0, lambda c: fg.mean(jnp.tanh(fg.broadcast(c)) * z), lambda c: c, c)

    return twice(step, x)


def _reads_captured(x, s, z):
    c = x
    for _ in range(2):
        c = jnp.where(s > 0, (jnp.tanh(c) * z * x).mean(0), x * s)
    return c


@case(decided_before, both_branches(_reads_captured), rounds=4, decided=True, server_argnums=(0, 1))
@fg.program(z=fg.CLIENTS)
@both_branches
def cond_reads_what_is_captured(x, s, z):
    def step(c):
        return jax.lax.cond(
            s > 0,
            lambda c: fg.mean(jnp.tanh(fg.broadcast(c)) * z * fg.broadcast(x)),
            lambda c: x * s,
            c,
        )

    return twice(step, x)


def _keeps_constants(x, s, z):
    fixed = jnp.cos(jnp.arange(3.0))
    w, v = z * x, z * x
    for _ in range(2):
        moved = w * jnp.sin(fixed) * jnp.cos(jnp.arange(3.0)) * x
        x = jnp.where(s > 0, jnp.tanh(moved).mean(0) + jnp.floor(v).sum(0), x * s)
        w = jnp.where(s > 0, moved, w * fixed)
    return x + (jnp.sin(w) * x + v).mean(0)


@case(decided_before, both_branches(_keeps_constants), rounds=6, decided=True, carries=True)
@fg.program(z=fg.CLIENTS)
@both_branches
def cond_keeps_constants_of_clients(x, s, z):
    """Clients use constants on the way back; `v` has a cotangent, but no branch adds to it."""
    fixed = jnp.cos(jnp.arange(3.0))

    def up(x, w, v):
        w = w * jnp.sin(fixed) * jnp.cos(jnp.arange(3.0)) * fg.broadcast(x)
        return fg.mean(jnp.tanh(w)) + fg.sum(jnp.floor(v)), w

    def step(carry):
        x, w, v = carry
        return *jax.lax.cond(s > 0, up, lambda x, w, v: (x * s, w * fixed), x, w, v), v

    start = z * fg.broadcast(x)
    x, w, v = twice(step, (x, start, start))
    return x + fg.mean(jnp.sin(w) * fg.broadcast(x) + v)


def _cond_nested(x, s, z):
    c = x
    for i in range(2):
        inside = c
        for _ in range(2):
            inside = (jnp.tanh(inside * x) * z).mean(0) if i else x * s
        c = jnp.where(s > 0, inside, (c * z).mean(0) if i else x * s) * x
    return c


@case(decided_before, both_branches(_cond_nested), rounds=8, decided=True)
@fg.program(z=fg.CLIENTS)
@both_branches
def cond_in_scan_in_switch_in_scan(x, s, z):
    def outer(c, i):
        def inner(c):
            ways = lambda c: fg.mean(jnp.tanh(fg.broadcast(c * x)) * z), lambda c: x * s
            return jax.lax.cond(s < 2, lambda c: jax.lax.cond(i > 0, *ways, c), lambda c: c, c)

        ways = [
            lambda c: twice(inner, c),
            lambda c: x * s,
            lambda c: fg.mean(fg.broadcast(c) * z),
        ]
        return jax.lax.switch(jnp.where(s > 0, 0, i + 1), ways, c) * x, None

    return jax.lax.scan(outer, x, jnp.arange(2))[0]


def _while_in_cond(x, s, z):
    for _ in range(2):
        y = x
        for _ in range(2):
            y = y + 0.5 * jnp.cos(y * z).mean(0)
        x = jnp.where(s > 0, y, x * s)
    return x


@case(decided_before, both_branches(_while_in_cond), rounds=4, decided=True, reverse=False)
@fg.program(z=fg.CLIENTS)
@both_branches
def while_in_cond_in_scan(x, s, z):
    def step(state):
        return state[0] + 1, state[1] + 0.5 * fg.mean(jnp.cos(fg.broadcast(state[1]) * z))

    def up(x):
        return jax.lax.while_loop(lambda state: state[0] < 2, step, (0, x))[1]

    return twice(lambda x: jax.lax.cond(s > 0, up, lambda x: x * s, x), x)


# --- comparing ----------------------------------------------------------------------------------


def assert_same(found: Any, expected: Any, rtol: float = 1e-9) -> None:
    """Equal trees of equal shapes and dtypes, up to rounding."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (jnp.shape(a), jnp.result_type(a)) == (jnp.shape(b), jnp.result_type(b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12)


def permuted(program: fg.Program, args: tuple[Any, ...], orders: dict[str, Any]) -> list[Any]:
    """The same arguments with the clients of each placement in another order."""

    def reorder(order: Any, x: Any) -> Any:
        if isinstance(x, fg.Cohort):
            return fg.Cohort(x.store, x.offset[order], x.count[order], x.index[order], x.capacity)
        return x[order]

    result = []
    for name, arg in zip(program.signature.parameters, args, strict=True):
        placement = program.placements.get(name)
        if placement is not None:
            order = orders[placement.name]
            arg = jax.tree.map(
                lambda x, o=order: reorder(o, x), arg, is_leaf=lambda x: isinstance(x, fg.Cohort)
            )
        result.append(arg)
    return result


class Moved:
    """An observer of the reference executor: what one client of each placement sent and got."""

    def __init__(self) -> None:
        self.messages: dict[tuple[str, int], list[tuple[int, int, int, int]]] = {}

    def __call__(self, placement: str, client: int, down: list[Any], up: list[Any]) -> None:
        sizes = [sum(_words(x)[i] for x in part) for part in (down, up) for i in (0, 1)]
        if any(sizes):
            self.messages.setdefault((placement, client), []).append(tuple(sizes))


def _words(x: Any) -> tuple[int, int]:
    """(scalars, bytes) of one value that was sent."""
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(x)
    return x.size, x.size * x.dtype.itemsize
