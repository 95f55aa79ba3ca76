"""Running a program, as the server and one client see it, with a rule for each round.

What is evaluated here is about to be differentiated by JAX. Rounds with the rule push or pull are
left to the primitives' own derivatives; rounds with the rule local are given one.
"""

from collections.abc import Callable, Sequence
from functools import partial as _partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.ad.activity import depends, differentiable
from fedgrad.ad.local import local_round
from fedgrad.core.control import cond_of
from fedgrad.core.errors import PlanError
from fedgrad.core.graph import Equation, Value, read
from fedgrad.core.primitives import (
    ClosedJaxpr,
    at_source,
    bind,
    broadcast_p,
    client_index,
    jax_primitives,
    primitives_inside,
    sum_p,
    where,
)
from fedgrad.plan.stages import Exchange, Loop, Step, Steps

Env = dict[Value, Any]
RuleOf = Callable[[Exchange | Loop], str]  # "push", "local" or "pull"


def evaluate(steps: Steps, inputs: Sequence[Any], rule_of: RuleOf) -> list[Any]:
    """The outputs of a program (cut with recompute, so that every stage stands for itself)."""
    env = start(steps, inputs)
    for step in steps.steps:
        advance(step, env, rule_of)
    return [read(env, v) for v in steps.outputs]


def start(steps: Steps, inputs: Sequence[Any]) -> Env:
    env: Env = dict(zip(steps.inputs, inputs, strict=True))
    env.update((v, client_index(placement)) for placement, v in steps.indices.items())
    return env


def advance(step: Step, env: Env, rule_of: RuleOf) -> None:
    """One step; adds to `env` what it computes."""
    for exchange in step.exchanges:
        if rule_of(exchange) == "local" and exchange.up and not _complex(exchange):
            _local_exchange(exchange, env)
        else:
            _plain_exchange(exchange, env)
    for loop in step.loops:
        _loop(loop, env, rule_of)
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


def _complex(exchange: Exchange) -> bool:
    """A Jacobian of complex values is not one matrix; the primitives' own rules know better."""
    values = [v for pair in (*exchange.down, *exchange.up) for v in pair]
    return any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in values)


def _refuse_custom_vjp(exchange: Exchange) -> None:
    reached = depends(exchange.stage.equations, [r for _, r in exchange.down])
    for equation in exchange.stage.equations:
        if any(v in reached for v in equation.inputs) and _has_custom_vjp(equation):
            raise PlanError(
                f"{where(equation.source)}: a custom_vjp at clients is not taken in mixed mode: "
                "its backward function need not be linear in the cotangent, and then a Jacobian is "
                "another derivative. Use mode='reverse', or a custom_jvp."
            )


def _has_custom_vjp(equation: Equation) -> bool:
    primitive = jax_primitives.custom_vjp_call_p
    return equation.primitive is primitive or primitive in primitives_inside(equation.params)


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


def _loop(loop: Loop, env: Env, rule_of: RuleOf) -> None:
    equation = loop.equation
    inputs = [read(env, v) for v in equation.inputs]
    with at_source(equation.source):
        if loop.control is not None and rule_of(loop) == "local":
            bodies = [_partial(_evaluate_body, body) for body in loop.bodies]
            outputs = loop.control.rebuilt(inputs, bodies)
        elif loop.kind == "cond" and rule_of(loop) == "pull":
            outputs = _pulled_cond(loop, inputs)
        else:
            outputs = bind(equation.primitive, equation.params, inputs)
    env.update(zip(equation.outputs, outputs, strict=True))


def _evaluate_body(body: Steps, inputs: list[Any]) -> list[Any]:
    return evaluate(body, inputs, lambda unit: "local")


def _pulled_cond(loop: Loop, inputs: list[Any]) -> list[Any]:
    """A cond whose way back runs the branch again, and pulls back through it there.

    JAX's own way back hands over what the branches remember in shared slots, in which one branch's
    value of a client can meet the other's of the server.
    """
    branches = cond_of(loop.equation.params).bodies
    floats = [i for i, v in enumerate(loop.equation.inputs[1:]) if differentiable(v)]

    def run(branch: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        return list(jax.core.eval_jaxpr(branch.jaxpr, branch.consts, *operands))

    def choose(index: Any, operands: list[Any]) -> list[Any]:
        return list(jax.lax.switch(index, [_partial(run, b) for b in branches], operands))

    @jax.custom_vjp
    def cond(index: Any, operands: list[Any]) -> list[Any]:
        return choose(index, operands)

    def back(kept: Any, cotangents: list[Any]) -> Any:
        index, operands = kept

        def through(branch: ClosedJaxpr, operands: list[Any], cotangents: list[Any]) -> list[Any]:
            def of_floats(xs: list[Any]) -> list[Any]:
                full = list(operands)
                for i, x in zip(floats, xs, strict=True):
                    full[i] = x
                return run(branch, full)

            _, pull = jax.vjp(of_floats, [operands[i] for i in floats])
            return list(pull(cotangents)[0])

        ways = [_partial(through, b) for b in branches]
        pulled = dict(zip(floats, jax.lax.switch(index, ways, operands, cotangents), strict=True))
        return _zero(index), [pulled.get(i, _zero(x)) for i, x in enumerate(operands)]

    cond.defvjp(lambda index, operands: (choose(index, operands), (index, operands)), back)
    return cond(inputs[0], list(inputs[1:]))


def _zero(x: Any) -> Any:
    return np.zeros(jnp.shape(x), jax.dtypes.float0)
