"""Client stages of a plan as programs that can be sent: StableHLO and the sources of inputs."""

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export

from fedgrad.core.errors import ArgumentError, PlanError, known_arguments, needs
from fedgrad.core.evaluate import AT_CLIENT, evaluate, read
from fedgrad.core.graph import Exchange, Graph, Round, fold, is_client
from fedgrad.federation.protocol.federation_errors import FederationError
from fedgrad.federation.protocol.provenance.declarations import Declared
from fedgrad.federation.protocol.provenance.origins import Origins
from fedgrad.federation.protocol.provenance.sources import ARGUMENT, Source, check_source
from fedgrad.federation.protocol.stage_program import PLATFORMS, StageProgram
from fedgrad.planning.plan import Plan


@known_arguments()
def programs(
    plan: Plan, sources: Sequence[Source], platforms: Sequence[str] = PLATFORMS
) -> tuple[StageProgram, ...]:
    """Return every program that this plan sends to nodes, for a site to review and allow.

    Args:
        plan: The plan, from `fg.plan`.
        sources: The source on the nodes of each leaf of the client arguments, such as
            `["data", "train", 0]`: the first array of the part "train" of a node's data.
        platforms: The platforms to compile the stages for.

    Returns:
        The programs, without duplicates.

    Raises:
        ArgumentError: If the number of sources is wrong, or one of them is malformed.
    """
    found = Exported(plan, platforms).programs(sources)
    return tuple({program.digest: program for program in found.values()}.values())


class Exported:
    """The client stages of a plan, exported once for all runs of the plan."""

    def __init__(self, plan: Plan, platforms: Sequence[str]) -> None:
        self.name = plan.name
        self.numbers = {x: k for k, x in enumerate(all_exchanges(plan.graph))}
        arguments = [v for v in plan.graph.inputs if is_client(v.at)]
        self.arguments = len(arguments)
        self.origins = Origins(plan.name, self.numbers)
        fold(plan.graph, self.origins.walk)(
            [
                ["argument", arguments.index(v)] if is_client(v.at) else None
                for v in plan.graph.inputs
            ],
        )
        self.modules = {x: export_stage(x, plan.name, platforms) for x in self.numbers}
        stages = [
            [len(x.down), len(x.up), self.origins.inputs(x), hashlib.sha256(code).hexdigest()]
            for x, code in self.modules.items()
        ]
        self.digest = hashlib.sha256(json.dumps(stages, sort_keys=True).encode()).hexdigest()
        self._made: dict[str, dict[Exchange, StageProgram]] = {}

    def programs(self, sources: Sequence[Source]) -> dict[Exchange, StageProgram]:
        """Return the stages as programs whose arguments have these sources."""
        key = json.dumps(list(sources))
        if len(sources) != self.arguments:
            raise ArgumentError.here(
                f"{self.name}: its arguments have {self.arguments} arrays at clients, and "
                f"{len(sources)} sources were given: {key}. Name one for each, such as "
                '["data", "", 0] for the first array that a node has.'
            )
        if key not in self._made:
            try:
                for i, source in enumerate(sources):
                    check_source(source, ARGUMENT, f"source {i}")
                self._made[key] = {x: self._program(x, tuple(sources)) for x in self.numbers}
            except FederationError as error:
                raise ArgumentError.here(
                    f"{self.name}: {error}. Name what each array at clients is on the nodes, such "
                    'as ["data", "train", 0] for the first array of the part "train".'
                ) from None
        return self._made[key]

    def _program(self, x: Exchange, sources: tuple[Source, ...]) -> StageProgram:
        loops = self.origins.loops.get(x, ())
        declared = Declared(self.digest, self.numbers[x], loops, sources, self.origins.inputs(x))
        return StageProgram(self.name, len(x.down), len(x.up), declared, self.modules[x])


def all_exchanges(graph: Graph) -> list[Exchange]:
    """Return the exchanges of a plan in order, also those in loops and those without a message."""

    def of(graph: Graph, inside: list[list[list[Exchange]]]) -> list[Exchange]:
        return [
            x
            for e, bodies in zip(graph.equations, inside, strict=True)
            for x in (e.exchanges if isinstance(e, Round) else [x for b in bodies for x in b])
        ]

    return fold(graph, of)


def export_stage(exchange: Exchange, name: str, platforms: Sequence[str]) -> bytes:
    """Return the serialized code of one client stage for nodes of these platforms."""
    stage = exchange.stage
    structs = [data_struct(v.aval) for v in stage.inputs]

    def run(*inputs: Any) -> list[Any]:
        pairs = zip(stage.inputs, inputs, strict=True)
        env = {v: from_data(x, v.aval.dtype) for v, x in pairs}
        evaluate(stage.equations, env, AT_CLIENT)
        return [to_data(read(env, v)) for v in stage.outputs]

    try:
        made = export.export(jax.jit(run), platforms=platforms)
        module = _without_locations(lambda: made(*structs))
    except Exception as error:
        raise PlanError.here(
            f"{name}: what its {exchange.placement} compute cannot be sent to nodes: {error} "
            "Client code on a federation has no callbacks and no debug prints."
        ) from error
    with needs("A stage that is sent to nodes", "flower"):
        return bytes(module.serialize())


# --- typed PRNG keys are sent as their key data ------------------------------------------------


def is_key(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def to_data(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(jax.numpy.result_type(x)) else x


def from_data(x: Any, dtype: Any) -> Any:
    return jax.random.wrap_key_data(x, impl=_key_implementation(dtype)) if is_key(dtype) else x


def data_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a value as it is sent."""
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.eval_shape(jax.random.key_data, struct) if is_key(aval.dtype) else struct


@functools.cache
def _key_implementation(dtype: Any) -> Any:
    found: list[Any] = []
    jax.eval_shape(
        lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype)
    )
    return found[0]


# --- the same program has the same digest everywhere -------------------------------------------

_LIMIT = "jax_traceback_in_locations_limit"
_locations = threading.Lock()


def _without_locations(make: Callable[[], export.Exported]) -> export.Exported:
    """Export without source locations: they are private to the user and would change the digest."""
    with _locations:
        before = jax.config.values[_LIMIT]
        jax.config.update(_LIMIT, 0)
        try:
            return make()
        finally:
            jax.config.update(_LIMIT, before)
