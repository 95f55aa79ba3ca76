"""The default executor: the whole plan in one jit, many clients at a time.

Clients are vectorised, as many at once as fit into the processor's cache, and their sums are
accumulated; so a cohort of any size runs in the memory of one chunk. Clients of different sizes
are sorted by size, so that those that run together are about equally long. Where there are several
local devices, each takes its share of the clients.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.core.control import rebuild
from fedgrad.core.errors import ArgumentError, PlanError
from fedgrad.core.graph import Value, read
from fedgrad.core.placement import is_client
from fedgrad.core.primitives import jax_primitives
from fedgrad.core.program import Program
from fedgrad.core.trace import Arguments, read_arguments
from fedgrad.executors.clients import Clients, Work, map_sum
from fedgrad.executors.convolutions import default_rules
from fedgrad.executors.loops import early_exit, ends_early
from fedgrad.executors.rewrite import Rules, evaluate
from fedgrad.executors.slices import one_by_one
from fedgrad.executors.walk import Env, Walk
from fedgrad.plan.plan import make_plan
from fedgrad.plan.stages import Exchange, Loop


@dataclass(frozen=True)
class Local:
    """Runs a program on this machine.

    `chunk`: how many clients run at a time; by default as many as fit into the cache. If you set
    it, clients also remember nothing between rounds (they compute it again), so that memory does
    not grow with the cohort in any mode of differentiation.
    `devices`: over how many local devices the clients are dealt; by default all.
    """

    chunk: int | None = None
    devices: int | None = None

    def __post_init__(self) -> None:
        for name in ("chunk", "devices"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ArgumentError.here(f"local({name}={value!r}): give a number of at least 1.")

    def compile(self, program: Program) -> Callable[[dict[str, Any]], Any]:
        """The program as a function of its arguments by name."""

        names = tuple(program.signature.parameters)

        def run(*values: Any) -> Any:
            args = read_arguments(program, dict(zip(names, values, strict=True)))
            plan = make_plan(program, args, recompute=self.chunk is not None)
            walk = _Vectorised(args, self)
            inputs = [walk.sort(v, x) for v, x in zip(args.values, args.leaves, strict=True)]
            outputs = walk.run(plan.steps, inputs)
            results = [
                walk.unsort(v.at, x) for v, x in zip(plan.steps.outputs, outputs, strict=True)
            ]
            if plan.opened:
                results = _only_by_fedgrad(results, program.name, plan.opened)
            return jax.tree.unflatten(plan.outputs, results)

        run.__name__ = program.name
        compiled = jax.jit(run)

        @functools.wraps(run)
        def call(arguments: dict[str, Any]) -> Any:
            try:
                return compiled(*[arguments[name] for name in names])
            except TypeError:
                read_arguments(program, arguments)  # says it better, if it is about an argument
                raise

        return call


class _Vectorised(Walk):
    """A client value is one array with a leading axis over the clients, sorted by size."""

    def __init__(self, args: Arguments, executor: Local) -> None:
        self.clients, self.indices, self.executor = args.clients, args.indices, executor
        self.order = {p: jnp.argsort(-count) for p, count in args.sizes.items()}
        self.ragged = set(args.sizes)

    def sort(self, value: Value, x: Any) -> Any:
        if not is_client(value.at) or value.shared or value.at not in self.order:
            return x
        return jax.tree.map(lambda leaf: leaf[self.order[value.at]], x)

    def unsort(self, at: str, x: Any) -> Any:
        if at not in self.order:
            return x
        return x[jnp.argsort(self.order[at])]

    def index(self, placement: str) -> Any:
        index = self.indices.get(placement, jnp.arange(self.clients[placement], dtype=jnp.int32))
        return index[self.order[placement]] if placement in self.order else index

    def at_clients(self, x: Any, placement: str) -> Any:
        x = jnp.asarray(x)
        return jnp.broadcast_to(x, (self.clients[placement], *x.shape))

    def exchange(self, exchange: Exchange, env: Env) -> None:
        stage = exchange.stage
        down = [read(env, sent) for sent, _ in exchange.down]
        own = exchange.own
        messages = [v for pair in (*exchange.down, *exchange.up) for v in pair[:1]]
        clients = Clients(
            self.clients[exchange.placement],
            exchange.placement in self.ragged,
            self.executor.chunk,
            self.executor.devices,
            sum(v.bytes for v in (*own, *messages) if not v.shared),
            tuple(v.aval for v, _ in exchange.up),
        )
        # A constant of an outer loop is the same for all clients, like a store of examples.
        same = [v for v in own if v.shared or not is_client(v.at)]
        shared = [(v, env[v]) for v in same]
        each = [(v, env[v]) for v in own if v not in same]

        names = [r for _, r in exchange.down] + [v for v, _ in shared] + [v for v, _ in each]

        def one(rules: Rules, *values: list[Any]) -> tuple[list[Any], list[Any]]:
            local = dict(zip(names, [x for part in values for x in part], strict=True))
            evaluate(stage.equations, local, rules)
            results = [read(local, v) for v in stage.outputs]
            return results[: len(exchange.up)], results[len(exchange.up) :]

        plain = default_rules()
        work = Work(functools.partial(one, plain))
        if exchange.placement in self.ragged or ends_early(stage.equations):
            fast: dict[Any, Any] = {**plain, jax_primitives.dynamic_slice_p: one_by_one}
            fast[jax_primitives.scan_p] = early_exit(fast)
            work = Work(functools.partial(one, fast), functools.partial(one, plain))
        totals, kept = map_sum(work, clients, down, [x for _, x in shared], [x for _, x in each])
        env.update(zip([total for _, total in exchange.up], totals, strict=True))
        env.update(zip(exchange.kept, kept, strict=True))

    def scan(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        params = loop.equation.params
        n, m = params["num_consts"], params["num_carry"]
        xs_at = [v.at for v in loop.bodies[0].inputs[n + m :]]
        xs = [_time_first(x, at) for x, at in zip(inputs[n + m :], xs_at, strict=True)]
        out = self._rebuild(loop, [*inputs[: n + m], *xs])
        ys_at = [v.at for v in loop.equation.outputs[m:]]
        return [*out[:m], *[_time_first(y, at) for y, at in zip(out[m:], ys_at, strict=True)]]

    def while_(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        return self._rebuild(loop, inputs)

    def cond(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        return self._rebuild(loop, inputs)

    def _rebuild(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        places = [v.at for v in loop.equation.outputs]
        bodies = [functools.partial(self.run, body, at=places) for body in loop.bodies]
        if loop.kind == "while":  # its first body is the condition, which gives one server value
            bodies[0] = functools.partial(self.run, loop.bodies[0])
        return rebuild(loop.equation.primitive, loop.equation.params, inputs, bodies)


def _time_first(x: Any, at: str) -> Any:
    """Swap the axes over clients and over iterations of a client value."""
    return jnp.swapaxes(x, 0, 1) if is_client(at) else x


def _only_by_fedgrad(results: list[Any], name: str, lines: tuple[str, ...]) -> list[Any]:
    """The results, refusing to be differentiated by JAX: a function with a custom derivative and
    communication inside was opened to be run, so JAX would silently take another derivative."""
    same = jax.custom_jvp(lambda xs: xs)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise PlanError.here(
            f"jax differentiates a call of {name}, but {lines[0]} has a custom "
            f"derivative around communication, which is not seen from outside. Differentiate the "
            f"program instead: fg.grad({name})."
        )

    same.defjvp(refuse)
    return same(results)
