"""Running a program, as the server and one client see it, with a rule for each round.

What is evaluated here is about to be differentiated by JAX. Rounds with the rule push or pull are
left to the primitives' own derivatives; rounds with the rule local are given one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from fedgrad.ad.activity import depends
from fedgrad.ad.local import local_round
from fedgrad.core.graph import Equation, Value, read
from fedgrad.core.primitives import (
    at_source,
    bind,
    broadcast_p,
    client_index,
    jax_primitives,
    sum_p,
)
from fedgrad.plan.stages import Exchange, Loop, Step, Steps

Env = dict[Value, Any]
IsLocal = Callable[[Exchange | Loop], bool]


def evaluate(steps: Steps, inputs: Sequence[Any], is_local: IsLocal) -> list[Any]:
    """The outputs of a program (cut with recompute, so that every stage stands for itself)."""
    env = start(steps, inputs)
    for step in steps.steps:
        advance(step, env, is_local)
    return [read(env, v) for v in steps.outputs]


def start(steps: Steps, inputs: Sequence[Any]) -> Env:
    env: Env = dict(zip(steps.inputs, inputs, strict=True))
    env.update((v, client_index(placement)) for placement, v in steps.indices.items())
    return env


def advance(step: Step, env: Env, is_local: IsLocal) -> None:
    """One step; adds to `env` what it computes."""
    for exchange in step.exchanges:
        if is_local(exchange) and exchange.up:
            _local_exchange(exchange, env)
        else:
            _plain_exchange(exchange, env)
    for loop in step.loops:
        _loop(loop, env, is_local)
    _run(step.server, env)


def _run(equations: Sequence[Equation], env: Env) -> None:
    for equation in equations:
        if all(v in env for v in equation.outputs) and equation.outputs:
            continue  # an earlier round computed it: a client does not do the same work twice
        with at_source(equation.source):
            inputs = [read(env, v) for v in equation.inputs]
            if equation.indexed:  # here JAX still knows the client's index by itself
                inputs.pop()
            outputs = bind(equation.primitive, equation.params, inputs)
        env.update(zip(equation.outputs, outputs, strict=True))


def _receive(exchange: Exchange, env: Env) -> None:
    for sent, received in exchange.down:
        if received not in env:
            env[received] = broadcast_p.bind(read(env, sent), placement=exchange.placement)


def _plain_exchange(exchange: Exchange, env: Env) -> None:
    _receive(exchange, env)
    _run(exchange.stage.equations, env)
    for value, total in exchange.up:
        env[total] = sum_p.bind(read(env, value), placement=exchange.placement)


def _local_exchange(exchange: Exchange, env: Env) -> None:
    stage, received = exchange.stage, [r for _, r in exchange.down]
    own = [v for v in stage.inputs if v not in received]
    operands = [v for v, _ in exchange.up]

    def run(received_values: list[Any], own_values: list[Any]) -> list[Any]:
        inner: Env = dict(zip([*received, *own], [*received_values, *own_values], strict=True))
        _run(stage.equations, inner)
        return [read(inner, v) for v in operands]

    reach = [depends(stage.equations, [r]) for r in received]
    table = [[v in reached for reached in reach] for v in operands]
    round_ = local_round(run, exchange.placement, table)
    totals = round_([read(env, s) for s, _ in exchange.down], [env[v] for v in own])
    env.update(zip([total for _, total in exchange.up], totals, strict=True))
    if exchange.kept:
        _receive(exchange, env)
        _run(exchange.stage.equations, env)


def _loop(loop: Loop, env: Env, is_local: IsLocal) -> None:
    equation = loop.equation
    inputs = [read(env, v) for v in equation.inputs]
    rebuild = _REBUILD.get(equation.primitive)
    with at_source(equation.source):
        if rebuild is None or not is_local(loop):
            outputs = bind(equation.primitive, equation.params, inputs)
        else:
            outputs = rebuild(loop, inputs)
    env.update(zip(equation.outputs, outputs, strict=True))


def _everywhere_local(_: Exchange | Loop) -> bool:
    return True


def _scan(loop: Loop, inputs: list[Any]) -> list[Any]:
    params = loop.equation.params
    n, m = params["num_consts"], params["num_carry"]

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        out = evaluate(loop.bodies[0], [*inputs[:n], *carry, *xs], _everywhere_local)
        return out[:m], out[m:]

    carry, ys = jax.lax.scan(
        step,
        inputs[n : n + m],
        inputs[n + m :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(loop: Loop, inputs: list[Any]) -> list[Any]:
    n, m = (loop.equation.params[k] for k in ("cond_nconsts", "body_nconsts"))
    cond, body = loop.bodies
    return list(
        jax.lax.while_loop(
            lambda carry: evaluate(cond, [*inputs[:n], *carry], _everywhere_local)[0],
            lambda carry: evaluate(body, [*inputs[n : n + m], *carry], _everywhere_local),
            inputs[n + m :],
        )
    )


def _cond(loop: Loop, inputs: list[Any]) -> list[Any]:
    branches = [lambda *xs, b=body: evaluate(b, xs, _everywhere_local) for body in loop.bodies]
    return list(jax.lax.switch(inputs[0], branches, *inputs[1:]))


_REBUILD = {
    jax_primitives.scan_p: _scan,
    jax_primitives.while_p: _while,
    jax_primitives.cond_p: _cond,
}
