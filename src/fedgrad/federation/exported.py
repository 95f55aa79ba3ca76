"""Client stages as programs that can be sent: StableHLO, and what may leave the node of it."""

import functools
import hashlib
import json
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import export

from fedgrad.core.errors import ArgumentError, PlanError
from fedgrad.core.graph import read
from fedgrad.core.placement import is_client
from fedgrad.executors.rewrite import evaluate
from fedgrad.federation.declared import Declared, Source
from fedgrad.federation.errors import FederationError, MissingExtra
from fedgrad.federation.origins import Origins
from fedgrad.plan.plan import Plan
from fedgrad.plan.stages import Exchange, Steps

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Where code leaves the device: calls by name, and the queues that it shares with its host.
_OUTSIDE = re.compile(
    r'custom_call\s*@"?([\w.$]+)|call_target_name\s*=\s*"([^"]*)"'
    r"|stablehlo\.(infeed|outfeed|send|recv)\b"
)

_compiling = threading.Lock()


@dataclass(frozen=True)
class StageProgram:
    """What a node runs in one round.

    Its first `sent` inputs come from the server, the others are the client's own, from where it is
    `declared`. Its first `summed` outputs go to the server to be summed, the others stay on the
    node. The digest covers all of that, so who allows a digest allows exactly this use of it.
    """

    name: str  # for people
    sent: int
    summed: int
    declared: Declared
    module: bytes

    @functools.cached_property
    def content(self) -> bytes:
        """The program as bytes."""
        head = {"fedgrad": 2, "name": self.name, "sent": self.sent, "summed": self.summed}
        head |= self.declared.header
        return json.dumps(head, sort_keys=True).encode() + b"\n" + self.module

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the content: the name under which programs are allowed, sent and cached."""
        return hashlib.sha256(self.content).hexdigest()

    @functools.cached_property
    def exported(self) -> export.Exported:
        """The function, with the shapes of its inputs and outputs."""
        return export.deserialize(bytearray(self.module))

    def compile(self) -> Callable[..., list[Any]]:
        """The function, compiled for this process once."""
        with _compiling:
            return self._compiled

    @functools.cached_property
    def _compiled(self) -> Callable[..., list[Any]]:
        return jax.jit(self.exported.call).lower(*self.inputs).compile()

    @property
    def text(self) -> str:
        """The StableHLO, to be read before it is allowed."""
        return self.exported.mlir_module()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the inputs; of keys, of their data."""
        return self.exported.in_avals

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the outputs."""
        return self.exported.out_avals

    @property
    def custom_calls(self) -> set[str]:
        """What the code uses of its host, such as functions of libraries, by name."""
        return {name for found in _OUTSIDE.findall(self.text) for name in found if name}

    @property
    def reads(self) -> tuple[str, ...]:
        """The client's own data that the program is of, directly or by results of others."""
        return self.declared.roots

    def __str__(self) -> str:
        leaves = ", ".join(f"{a.dtype}{list(a.shape)}" for a in self.outputs[: self.summed])
        of = ", ".join(self.reads) or "nothing"
        return f"{self.digest} {self.name}: sums {leaves or 'nothing'} of {of}"


def read_program(content: bytes) -> StageProgram:
    """The program that these bytes are; one object for all nodes of a process that have it."""
    digest = hashlib.sha256(content).hexdigest()
    program = _in_use.get(digest)
    return program if program is not None else _in_use.setdefault(digest, _read(content))


def _read(content: bytes) -> StageProgram:
    # They come from outside: nothing in them is believed.
    head, _, module = content.partition(b"\n")
    try:
        fields = json.loads(head)
        if fields["fedgrad"] != 2:
            raise FederationError("the program is of another version of fedgrad")
        program = StageProgram(
            str(fields["name"]),
            int(fields["sent"]),
            int(fields["summed"]),
            Declared.read(fields),
            module,
        )
        sent, summed = len(program.inputs), len(program.outputs)
    except (FederationError, ImportError):
        raise
    except Exception as error:  # whatever a deserialiser raises on bytes that are not a program
        raise FederationError(f"the bytes are not a program ({type(error).__name__})") from None
    sound = 0 <= program.sent <= sent and 0 <= program.summed <= summed
    sound &= len(program.declared.inputs) == sent - program.sent
    if not sound or program.content != content:  # what is digested is all there is
        raise FederationError("the program's header does not fit its code")
    return program


_in_use: weakref.WeakValueDictionary[str, StageProgram] = weakref.WeakValueDictionary()


def programs(
    plan: Plan, sources: Sequence[Source], platforms: Sequence[str] = PLATFORMS
) -> tuple[StageProgram, ...]:
    """Everything that nodes are sent to run for this plan, for a site to look at and to allow.

    `sources`: what each leaf of the client arguments is on the nodes, as in
    `["data", "train", 0]`, which is the first array of the part "train" of a node's data.
    """
    found = Exported(plan, platforms).programs(sources)
    return tuple({program.digest: program for program in found.values()}.values())


class Exported:
    """The client stages of a plan, exported once, whatever the plan is run on."""

    def __init__(self, plan: Plan, platforms: Sequence[str]) -> None:
        self.name = plan.name
        self.numbers = {x: k for k, x in enumerate(all_exchanges(plan.steps))}
        self.modules = {x: export_stage(x, plan.name, platforms) for x in self.numbers}
        arguments = [v for v in plan.steps.inputs if is_client(v.at)]
        self.arguments = len(arguments)
        self.origins = Origins(self.numbers)
        self.origins.run(
            plan.steps,
            [
                [["argument", arguments.index(v)]] if is_client(v.at) else None
                for v in plan.steps.inputs
            ],
        )
        stages = [
            [len(x.down), len(x.up), self.origins.inputs(x), hashlib.sha256(code).hexdigest()]
            for x, code in self.modules.items()
        ]
        self.digest = hashlib.sha256(json.dumps(stages, sort_keys=True).encode()).hexdigest()
        self._made: dict[str, dict[Exchange, StageProgram]] = {}

    def programs(self, sources: Sequence[Source]) -> dict[Exchange, StageProgram]:
        """The stages as programs whose arguments have these sources."""
        key = json.dumps(list(sources))
        if len(sources) != self.arguments:
            raise ArgumentError.here(
                f"{self.name}: its arguments have {self.arguments} arrays at clients, and "
                f"{len(sources)} sources were given: {key}. Name one for each, such as "
                '["data", "", 0] for the first array that a node has.'
            )
        if key not in self._made:
            self._made[key] = {x: self._program(x, tuple(sources)) for x in self.numbers}
        return self._made[key]

    def _program(self, x: Exchange, sources: tuple[Source, ...]) -> StageProgram:
        loops = self.origins.loops.get(x, ())
        declared = Declared(self.digest, self.numbers[x], loops, sources, self.origins.inputs(x))
        return StageProgram(self.name, len(x.down), len(x.up), declared, self.modules[x])


def all_exchanges(steps: Steps) -> list[Exchange]:
    """The exchanges of a plan in order, also those inside of loops and those without a message."""
    found: list[Exchange] = []
    for step in steps.steps:
        found += step.exchanges
        for loop in step.loops:
            for body in loop.bodies:
                found += all_exchanges(body)
    return found


def export_stage(exchange: Exchange, name: str, platforms: Sequence[str]) -> bytes:
    """The code of one client stage for nodes of these platforms."""
    stage = exchange.stage
    structs = [data_struct(v.aval) for v in stage.inputs]

    def run(*inputs: Any) -> list[Any]:
        pairs = zip(stage.inputs, inputs, strict=True)
        env = {v: from_data(x, v.aval.dtype) for v, x in pairs}
        evaluate(stage.equations, env)
        return [to_data(read(env, v)) for v in stage.outputs]

    try:
        made = export.export(jax.jit(run), platforms=platforms)
        module = _without_locations(lambda: made(*structs))
    except Exception as error:
        raise PlanError.here(
            f"{name}: what its {exchange.placement} compute cannot be sent to nodes: {error} "
            "Client code on a federation has no callbacks and no debug prints."
        ) from error
    try:
        return bytes(module.serialize())
    except ImportError as error:
        raise MissingExtra.here(f"{error}: pip install 'fedgrad[flower]'.") from None


# --- typed PRNG keys travel as the integers they are made of ----------------------------------


def is_key(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def to_data(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(jax.numpy.result_type(x)) else x


def from_data(x: Any, dtype: Any) -> Any:
    return jax.random.wrap_key_data(x, impl=_key_implementation(dtype)) if is_key(dtype) else x


def data_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a value as it travels."""
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
    """Files and lines of the user's code are nobody's business, and would change the digest."""
    with _locations:
        before = jax.config.values[_LIMIT]
        jax.config.update(_LIMIT, 0)
        try:
            return make()
        finally:
            jax.config.update(_LIMIT, before)
