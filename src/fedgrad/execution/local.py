"""The default executor: compiles the whole plan as one JAX function, many clients at a time.

Clients are vectorized, as many at once as fit into the processor's cache, and their sums are
accumulated, so a cohort of any size runs in the memory of one chunk. Clients of different sizes are
sorted by size, so that those that run together take about equally long. If there are several local
devices, each takes its share of the clients.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.aggregate.aggregator import Aggregator, plain
from fedgrad.core.arguments import Arguments, read_arguments
from fedgrad.core.control import Scan
from fedgrad.core.errors import ArgumentError, PlanError, known_fields_of
from fedgrad.core.evaluate import AT_CLIENT, Rules, Walk, as_it_is, bodies, evaluate, read
from fedgrad.core.graph import Equation, Exchange, is_client
from fedgrad.core.primitives import jax_primitives, primitives_of, source_p
from fedgrad.core.program import Program
from fedgrad.execution.clients import Clients, Seats, Work, at_home, dealt, map_sum, whole
from fedgrad.execution.convolutions import default_rules
from fedgrad.execution.devices import Devices
from fedgrad.execution.placing import placed
from fedgrad.execution.ragged import early_exit, ends_early, one_by_one
from fedgrad.execution.sharded import by_device
from fedgrad.planning.plan import Plan, ready_plan


@known_fields_of("local")
@dataclass(frozen=True)
class Local:
    """Runs a program on this machine.

    Args:
        chunk: The number of clients that run at a time; by default as many as fit into the cache.
            If it is set, clients also keep nothing between rounds but recompute it, so that memory
            does not grow with the cohort in any mode of differentiation.
        devices: The number of local devices that share the clients; by default all.
        aggregator: How sums are computed.
    """

    chunk: int | None = None
    devices: int | None = None
    aggregator: Aggregator = field(default=plain, repr=False)

    def __post_init__(self) -> None:
        for name in ("chunk", "devices"):
            require_positive("local", name, getattr(self, name))

    def compile(self, program: Program) -> Callable[[dict[str, Any]], Any]:
        """Return the program as a function of its arguments by name."""
        chosen = jax.local_devices()[: self.devices]
        devices = Devices(jax.sharding.Mesh(chosen, ("devices",)), "devices")
        over = devices if len(chosen) > 1 else None
        run = compile_program(program, self.chunk, over, self.aggregator)
        if len(chosen) == len(jax.local_devices()):
            return run
        return lambda arguments: run(placed(program, devices, arguments))


def require_positive(executor: str, name: str, value: Any) -> None:
    """Raise unless an option of an executor is None or an integer of at least 1."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ArgumentError.here(f"{executor}({name}={value!r}): give a number of at least 1.")


def compile_program(
    program: Program, chunk: int | None, devices: Devices | None, aggregator: Aggregator
) -> Callable[[dict[str, Any]], Any]:
    """Return the program as a function of its arguments by name. `chunk` is the number of clients
    that run at a time, `devices` are those that share the clients if there are several, and
    `aggregator` defines how they are summed."""
    names = tuple(program.signature.parameters)

    def run(*values: Any) -> Any:
        arguments = dict(zip(names, values, strict=True))
        return _run(program, chunk, devices, aggregator, arguments)

    run.__name__ = program.name
    compiled = jax.jit(run)

    @functools.wraps(run)
    def call(arguments: dict[str, Any]) -> Any:
        try:
            return compiled(*[arguments[name] for name in names])
        except TypeError:
            read_arguments(program, arguments)  # raises a clearer error if an argument is the cause
            raise

    return call


def _run(
    program: Program,
    chunk: int | None,
    devices: Devices | None,
    aggregator: Aggregator,
    arguments: dict[str, Any],
) -> Any:
    resident = devices is not None and devices.resident
    if devices is not None and resident:
        arguments = {name: by_device(a, devices) for name, a in arguments.items()}
    args = read_arguments(program, arguments)
    plan = ready_plan(program, args, chunk is not None, aggregator)
    if not resident and max(args.clients.values(), default=1) == 1:
        devices = None  # a single client is faster with all cores
    seats = {}
    for at, n in args.clients.items():
        may_move = not resident or _is_light(at, args, plan)
        mine = [arguments[name] for name, p in program.placements.items() if p.name == at]
        seats[at] = at_home(mine) or dealt(n, args.sizes.get(at), devices, may_move)
    # One row per seat instead of one per client.
    inputs = [
        seats[v.at].seated(x) if is_client(v.at) and not v.shared else x
        for v, x in zip(args.values, args.leaves, strict=True)
    ]
    indices = {at: seats[at].seated(index) for at, index in args.indices.items()}
    walk = _Vectorized(indices, set(args.sizes), seats, devices, chunk)
    outputs = walk.run(plan.graph, inputs)
    results = [
        seats[value.at].result(x) if is_client(value.at) else whole(x, devices)
        for value, x in zip(plan.graph.outputs, outputs, strict=True)
    ]
    if plan.graph.opened:
        results = _only_by_fedgrad(results, program.name, plan.graph.opened)
    return jax.tree.unflatten(plan.outputs, results)


def _is_light(placement: str, args: Arguments, plan: Plan) -> bool:
    """Whether moving a client to another device costs nothing, because it is only a position in a
    store."""
    own = [v for v in args.values if v.at == placement and not v.shared]
    results = [v for v in plan.graph.outputs if v.at == placement]
    return not results and all(v.aval.shape == () for v in own)


@dataclass(frozen=True, eq=False)
class _Vectorized(Walk):
    """Represents a client value as one array with a row per seat."""

    indices: dict[str, Any]
    ragged: set[str]
    seats: dict[str, Seats]
    devices: Devices | None
    chunk: int | None

    def index(self, placement: str) -> Any:
        seats = self.seats[placement]
        if placement in self.indices:
            return self.indices[placement]
        return seats.seated(jnp.arange(seats.clients, dtype=jnp.int32))

    def at_clients(self, x: Any, placement: str) -> Any:
        x, seats = jnp.asarray(x), self.seats[placement]
        return seats.spread(jnp.broadcast_to(x, (seats.count, *x.shape)))

    def exchange(self, exchange: Exchange, sent: list[Any], own: list[Any]) -> list[Any]:
        stage, seats, devices = exchange.stage, self.seats[exchange.placement], self.devices
        messages = [v for pair in (*exchange.down, *exchange.up) for v in pair[:1]]
        clients = Clients(
            seats.count if devices is None else seats.count // devices.count,
            exchange.placement in self.ragged,
            self.chunk,
            devices is None or max(devices.devices_of.values()) == 1,
            sum(v.bytes for v in (*exchange.own, *messages) if not v.shared),
            tuple(v.aval for v, _ in exchange.up),
        )
        pairs = list(zip(exchange.own, own, strict=True))
        # A constant of an outer loop is the same for all clients, like a store of examples.
        constants = [(v, x) for v, x in pairs if not v.shared and not is_client(v.at)]
        stores = [(v, x) for v, x in pairs if v.shared]
        each = [(v, x) for v, x in pairs if not v.shared and is_client(v.at)]
        names = [r for _, r in exchange.down] + [v for v, _ in (*constants, *stores, *each)]

        def one(rules: Rules, *values: list[Any]) -> tuple[list[Any], list[Any]]:
            local = dict(zip(names, [x for part in values for x in part], strict=True))
            evaluate(stage.equations, local, rules)
            results = [read(local, v) for v in stage.outputs]
            return results[: len(exchange.up)], results[len(exchange.up) :]

        inside = primitives_of(stage.equations)
        plain: dict[Any, Any] = dict(AT_CLIENT)
        if jax_primitives.conv_general_dilated_p in inside:
            plain.update(default_rules())
        fast = dict(plain)
        if any(e.primitive is source_p for e in stage.equations):
            fast[source_p] = as_it_is  # marks matter only to derivatives
        loops = jax_primitives.scan_p in inside and ends_early(stage.equations)
        if loops or exchange.placement in self.ragged:
            fast[jax_primitives.dynamic_slice_p] = one_by_one
            fast[jax_primitives.scan_p] = early_exit(fast)
        to_derive = functools.partial(one, plain) if fast != plain else None
        work = Work(functools.partial(one, fast), to_derive)
        run = functools.partial(map_sum, work, clients)
        down = [*sent, *(x for _, x in constants)]
        values = (seats.taken, down, [x for _, x in stores], [x for _, x in each])
        if devices is None:
            totals, kept = run(*values)
        else:
            totals, kept = devices.total(run, *values, split=(True, False, seats.own_stores, True))
        sums = [x.astype(v.aval.dtype) for (_, v), x in zip(exchange.up, totals, strict=True)]
        return [*sums, *kept]

    def loop(self, loop: Equation, inputs: list[Any]) -> list[Any]:
        assert loop.control is not None
        scan, run = loop.control, bodies(loop, self.run)
        if not isinstance(scan, Scan):
            return scan.rebuilt(inputs, run)
        consts, carry, xs = scan.split(inputs)
        _, _, rows = scan.split(loop.inputs_at)
        xs = [_time_first(x, at) for x, at in zip(xs, rows, strict=True)]
        carry, ys = scan.split_outputs(scan.rebuilt([*consts, *carry, *xs], run))
        _, stacked = scan.split_outputs(loop.outputs)
        return [*carry, *[_time_first(y, v.at) for y, v in zip(ys, stacked, strict=True)]]


def _time_first(x: Any, at: str) -> Any:
    """Swap the axes of clients and of iterations of a client value."""
    return jnp.swapaxes(x, 0, 1) if is_client(at) else x


def _only_by_fedgrad(results: list[Any], name: str, lines: tuple[str, ...]) -> list[Any]:
    """Make results raise an error if JAX differentiates them. To run a function with a custom
    derivative and communication inside, it was inlined, so JAX would silently compute a different
    derivative."""
    same = jax.custom_jvp(lambda xs: xs)

    def refuse(primals: Any, tangents: Any) -> Any:
        raise PlanError.here(
            f"jax differentiates a call of {name}, but {lines[0]} has a custom "
            f"derivative around communication, which is not seen from outside. Differentiate the "
            f"program instead: fg.grad({name})."
        )

    same.defjvp(refuse)
    return same(results)
