"""Running a program, as the server and one client see it, with a rule for each round.

What is evaluated here is about to be differentiated by JAX. Rounds with the rule push or pull are
left to the primitives' own derivatives; rounds with the rule local are given one.
"""

from collections.abc import Callable, Sequence
from functools import partial as _partial
from typing import Any

import jax.numpy as jnp

from fedgrad.ad.activity import depends, has_custom_vjp
from fedgrad.ad.branches import pulled_cond
from fedgrad.ad.local import local_round
from fedgrad.core.control import Cond
from fedgrad.core.errors import PlanError
from fedgrad.core.graph import Equation, Value, read
from fedgrad.core.primitives import (
    at_source,
    bind,
    broadcast_p,
    client_index,
    sum_p,
    where,
)
from fedgrad.plan.cut import is_local_copy
from fedgrad.plan.stages import Exchange, Loop, Step, Steps

Env = dict[Value, Any]
RuleOf = Callable[[Exchange | Loop], str]  # "push", "local" or "pull"


def evaluate(steps: Steps, inputs: Sequence[Any], rule_of: RuleOf, back: bool) -> list[Any]:
    """The outputs of a program (cut with recompute, so that every stage stands for itself).

    `back`: a derivative will be pulled back through it, and not pushed forward.
    """
    env = start(steps, inputs)
    for step in steps.steps:
        advance(step, env, rule_of, back)
    return [read(env, v) for v in steps.outputs]


def start(steps: Steps, inputs: Sequence[Any]) -> Env:
    env: Env = dict(zip(steps.inputs, inputs, strict=True))
    env.update((v, client_index(placement)) for placement, v in steps.indices.items())
    return env


def advance(step: Step, env: Env, rule_of: RuleOf, back: bool) -> None:
    """One step; adds to `env` what it computes."""
    for exchange in step.exchanges:
        if rule_of(exchange) == "local" and exchange.up and not _complex(exchange):
            _local_exchange(exchange, env)
        else:
            _plain_exchange(exchange, env)
    for loop in step.loops:
        _loop(loop, env, rule_of(loop), back)
    _run(step.server, env)


def _run(equations: Sequence[Equation], env: Env) -> None:
    for equation in equations:
        if all(v in env for v in equation.outputs) and equation.outputs:
            continue  # an earlier round computed it: a client does not do the same work twice
        with at_source(equation.source):
            inputs = [read(env, v) for v in equation.inputs]
            if equation.indexed:  # here JAX still knows the client's index by itself
                inputs.pop()
            if is_local_copy(equation):  # to be placed again, it has to say where it is
                outputs = [broadcast_p.bind(*inputs, placement=equation.at)]
            else:
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


def _complex(exchange: Exchange) -> bool:
    """A Jacobian of complex values is not one matrix; the primitives' own rules know better."""
    values = [v for pair in (*exchange.down, *exchange.up) for v in pair]
    return any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in values)


def _refuse_custom_vjp(exchange: Exchange) -> None:
    reached = depends(exchange.stage.equations, [r for _, r in exchange.down])
    for equation in exchange.stage.equations:
        if any(v in reached for v in equation.inputs) and has_custom_vjp(equation):
            raise PlanError(
                f"{where(equation.source)}: a custom_vjp at clients is not taken in mixed mode: "
                "its backward function need not be linear in the cotangent, and then a Jacobian is "
                "another derivative. Use mode='reverse', or a custom_jvp."
            )


def _local_exchange(exchange: Exchange, env: Env) -> None:
    _refuse_custom_vjp(exchange)
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


def _loop(loop: Loop, env: Env, rule: str, back: bool) -> None:
    equation = loop.equation
    inputs = [read(env, v) for v in equation.inputs]
    ours = rule == "local" or (rule == "pull" and has_cond(loop))
    with at_source(equation.source):
        if loop.control is None or not ours:
            outputs = bind(equation.primitive, equation.params, inputs)
        elif isinstance(loop.control, Cond) and back:
            branches = [_partial(_evaluate_body, body, rule, back) for body in loop.bodies]
            outputs = pulled_cond(inputs[0], inputs[1:], branches, remember=rule == "local")
        else:
            bodies = [_partial(_evaluate_body, body, rule, back) for body in loop.bodies]
            outputs = loop.control.rebuilt(inputs, bodies)
    env.update(zip(equation.outputs, outputs, strict=True))


def _evaluate_body(body: Steps, rule: str, back: bool, inputs: list[Any]) -> list[Any]:
    return evaluate(body, inputs, lambda unit: rule, back)


def has_cond(loop: Loop) -> bool:
    """Is this a cond around communication, or is there one inside? JAX's own way back through a
    cond is not ours (branches.py)."""
    inner = [x for body in loop.bodies for step in body.steps for x in step.loops]
    return loop.kind == "cond" or any(map(has_cond, inner))
