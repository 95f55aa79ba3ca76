"""A plan made ready to be run many times: clients' stages exported, the server's compiled."""

from collections.abc import Callable
from typing import Any

import jax

from fedgrad.core.graph import Value, evaluate, read
from fedgrad.core.placement import is_client
from fedgrad.federation.protocol.exported import Exported
from fedgrad.plan.plan import Plan
from fedgrad.plan.stages import Exchange, Step, Steps

Env = dict[Value, Any]


class Prepared:
    """What is the same in every call of a program with arguments of the same shapes."""

    def __init__(self, plan: Plan, platforms: tuple[str, ...]) -> None:
        self.plan = plan
        self.exported = Exported(plan, platforms)
        self.last_reads: dict[Exchange, set[Value]] = {}
        self.server: dict[Step, Callable[[Env], None]] = {}
        self._prepare(plan.steps)

    def _prepare(self, steps: Steps) -> None:
        self.last_reads.update(_last_reads(steps))
        for step in steps.steps:
            self.server[step] = _compiled(step, _read_outside(steps, step))
            for loop in step.loops:
                for body in loop.bodies:
                    self._prepare(body)


def _compiled(step: Step, wanted: set[Value]) -> Callable[[Env], None]:
    """The server's work of one step, as one compiled function that adds to an environment."""
    made = [v for e in step.server for v in e.outputs]
    reads = {v: None for e in step.server for v in e.inputs if v.constant is None}
    inputs = [v for v in reads if v not in set(made)]
    outputs = [v for v in made if v in wanted]

    @jax.jit
    def work(*values: Any) -> list[Any]:
        env = dict(zip(inputs, values, strict=True))
        evaluate(step.server, env)
        return [read(env, v) for v in outputs]

    def run(env: Env) -> None:
        if step.server:
            env.update(zip(outputs, work(*[env[v] for v in inputs]), strict=True))

    return run


def _read_outside(steps: Steps, one: Step) -> set[Value]:
    """What is read of a step's results by anything but its own server stage."""
    found = set(steps.outputs)
    for step in steps.steps:
        for x in step.exchanges:
            found |= {sent for sent, _ in x.down} | set(x.own)
        for loop in step.loops:
            found |= set(loop.equation.inputs)
        if step is not one:
            found |= {v for e in step.server for v in e.inputs}
    return found


def _last_reads(steps: Steps) -> dict[Exchange, set[Value]]:
    """Which values that clients keep each stage is the last one to read: then they are freed."""
    reader: dict[Value, Exchange | None] = {}
    for step in steps.steps:
        for x in step.exchanges:
            reader.update(dict.fromkeys(x.kept))  # nobody so far
            reader.update((v, x) for v in x.own if v in reader)
        for loop in step.loops:
            reader.update((v, None) for v in loop.equation.inputs if v in reader)
    found: dict[Exchange, set[Value]] = {}
    for v, last in reader.items():
        if last is not None and v not in steps.outputs and is_client(v.at):
            found.setdefault(last, set()).add(v)
    return found
