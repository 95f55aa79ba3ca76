"""The node that a site runs, on any engine. It answers one request after another.

The server can make three kinds of requests: describe the data ("describe"), run programs on the
client's own values ("run"), and drop values ("forget"). The policy is checked when a program
arrives, before its first run. Results that a program does not send as a sum stay here.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.core.errors import known_fields
from fedgrad.core.lossless import changed
from fedgrad.federation.protocol.envelope import Envelope, Meta
from fedgrad.federation.protocol.federation_errors import FederationError
from fedgrad.federation.protocol.memory import CONSTANT, KEPT, PROGRAM, Memory
from fedgrad.federation.protocol.node_data import Context, OwnData
from fedgrad.federation.protocol.policy import Policy, Refusal
from fedgrad.federation.protocol.provenance.declarations import At, Declared, Origin
from fedgrad.federation.protocol.stage_program import StageProgram, read_program

log = logging.getLogger("fedgrad.node")


class _Unknown(Exception):
    """A program or constant is not here (any more); the server can send it again."""


class _Lost(Exception):
    """A value that the client should have kept is not here (any more)."""


@known_fields
class Node:
    """One client of a federation: its data, its policy, and what it keeps between messages.

    Args:
        data: A function of the context that returns this client's data, a tree of arrays. It is
            called when they are first needed.
        policy: The programs that the site allows.
        memory_seconds: Seconds after which unused constants and kept values expire.
        context: The configuration of this node.
        memory: The place where values are kept; by default in this process.
    """

    def __init__(
        self,
        data: Callable[[Any], Any],
        policy: Policy,
        memory_seconds: float = 600,
        *,
        context: Context | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.policy, self.context = policy, context or Context()
        self.memory = Memory(memory_seconds) if memory is None else memory
        self.data = OwnData(data, self.context)
        self.platform = jax.default_backend()
        self._programs: dict[str, StageProgram] = {}
        self._on_device: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def handle(self, request: Envelope) -> Envelope:
        """Return the reply to a request. No request can make this raise."""
        answers = {
            "describe": self._describe,
            "run": self._run,
            "forget": self._forget,
        }
        try:
            self.memory.expire()
            if request.kind not in answers:
                raise FederationError(f"this node does not know requests of kind {request.kind!r}")
            # Programs fix their own dtypes; the x64 setting of this process must not change them.
            with jax.enable_x64(True):
                return answers[request.kind](request)
        except Refusal as refusal:
            log.warning("refused: %s", refusal)
            return Envelope("refused", {"reason": str(refusal)})
        except _Unknown as missing:
            return Envelope("unknown", {"reason": f"not here: {missing}", "digest": str(missing)})
        except _Lost as lost:
            return Envelope("error", {"reason": f"has lost a value: {lost}", "lost": True})
        except FederationError as error:
            return Envelope("error", {"reason": str(error)})
        except Exception as error:
            # A foreign exception may quote the data in its text, so only the site sees it.
            log.exception("a request of kind %r failed", request.kind)
            reason = f"{type(error).__name__} on the node, which has the details in its log"
            return Envelope("error", {"reason": reason})

    def _describe(self, request: Envelope) -> Envelope:
        meta: dict[str, Meta] = {"platform": self.platform}
        meta["minimum_cohort"] = self.policy.minimum_cohort
        if self.context.index is not None:
            meta["index"] = self.context.index
        if "part" in request.meta:
            part, examples = str(request.meta["part"]), bool(request.meta["examples"])
            meta.update(self.data.describe(part, examples))
        else:
            meta["parts"] = self.data.parts
        return Envelope("ok", meta)

    def _take(self, blob: Any, signature: str) -> None:
        """Store a new program if the policy allows it."""
        program = read_program(np.asarray(blob, np.uint8).tobytes())
        self.policy.check_program(program, bytes.fromhex(signature), self.platform)
        self.memory.put(PROGRAM + program.digest, np.asarray(blob, np.uint8))
        self._programs[program.digest] = program

    def _forget(self, request: Envelope) -> Envelope:
        self.memory.forget(KEPT + str(name) for name in _names(request.meta.get("names", [])))
        return Envelope("ok", {})

    def _run(self, request: Envelope) -> Envelope:
        """Run stages. `meta` has `work`, a list of stages with the sources of their inputs and the
        names of the outputs to keep; `constants`, digests of constants, and `signatures` of
        programs, whose arrays come last, in this order; and `names`, the values to forget."""
        self._forget(request)
        self.policy.check_bytes(request.bytes, "received")
        constants = _names(request.meta.get("constants", []))
        signatures = _names(request.meta.get("signatures", []))
        sent = list(request.arrays)
        for signature in reversed(signatures):
            self._take(sent.pop(), signature)
        for digest in reversed(constants):
            self._check_memory(sent[-1].nbytes)
            self.memory.put(CONSTANT + digest, sent.pop())
        work = json.loads(str(request.meta["work"]))
        index = self._index(request.meta.get("index"))
        found = [self._program(item["program"]) for item in work]
        for item in work:
            self.policy.check_cohort(int(item["cohort"]))
        summed: list[Any] = []
        for item, program in zip(work, found, strict=True):
            wanted = program.inputs[program.sent :]
            if len(item["inputs"]) != len(wanted) or len(sent) < program.sent:
                raise FederationError("the program takes another number of inputs")
            self._check_sources(program, item["inputs"], item["at"])
            own = [
                self._find(source, index, aval.dtype)
                for source, aval in zip(item["inputs"], wanted, strict=True)
            ]
            inputs, sent = [*sent[: program.sent], *own], sent[program.sent :]
            outputs = program.compile()(*_checked(inputs, program))
            self._keep(item["keep"], outputs[program.summed :], program.declared, item["at"])
            summed += outputs[: program.summed]
            self.memory.forget(KEPT + name for name in item["free"])
        if sent:
            raise FederationError("more arrays came than the programs take")
        reply = Envelope("ok", {}, tuple(np.asarray(x) for x in summed))
        self.policy.check_bytes(reply.bytes, "sent")
        return reply

    def _keep(self, names: list[str], values: list[Any], by: Declared, at: At) -> None:
        if len(names) != len(values):
            raise FederationError("the outputs that stay have not as many names")
        self._check_memory(sum(x.nbytes for x in values))
        for j, (name, value) in enumerate(zip(names, values, strict=True)):
            self.memory.put(KEPT + name, value, by.origin(j, at).text)

    def _check_memory(self, more: int) -> None:
        self.policy.check_memory(self.memory.bytes + more)

    def _program(self, digest: str) -> StageProgram:
        blob = self.memory.get(PROGRAM + digest)
        if blob is None:
            self._programs.pop(digest, None)
            raise _Unknown(digest)
        if digest not in self._programs:  # another process stored it
            self._programs[digest] = read_program(blob.tobytes())
        return self._programs[digest]

    # --- values ---------------------------------------------------------------------------

    def _check_sources(self, program: StageProgram, sources: list[Any], at: Any) -> None:
        """Refuse inputs other than those the program declares: only the program on these inputs was
        allowed or signed."""
        declared, name = program.declared, f"program {program.digest} ({program.name})"
        if not declared.is_iteration(at):
            raise Refusal(
                f"{name} is not run in iteration {at}: the loops around it run "
                f"{list(declared.loops)} times"
            )
        alternatives = declared.choices(at)
        fit = [
            [
                declared.allows(choice, source, self._origin)
                for choice, source in zip(alternative, sources, strict=True)
            ]
            for alternative in alternatives
        ]
        if any(map(all, fit)):
            return
        for i, source in enumerate(sources):
            if not any(fits[i] for fits in fit):
                choices = dict.fromkeys(json.dumps(one[i]) for one in alternatives)
                raise Refusal(
                    f"{name} declares that input {program.sent + i} comes from "
                    f"{' or '.join(choices) or 'nowhere'}, and the server has "
                    f"named {json.dumps(source)}{self._made(source)}"
                )
        raise Refusal(
            f"{name} declares that its inputs from {program.sent} on come together from "
            f"{' or '.join(map(json.dumps, alternatives)) or 'nowhere'}, and the server has named "
            f"{json.dumps(sources)}"
        )

    def _origin(self, name: str) -> Origin:
        text = self.memory.origin(KEPT + name)
        if not text:
            raise _Lost(str(["kept", name]))
        return Origin(*json.loads(text))

    def _made(self, source: Any) -> str:
        """Describe the origin of a kept value in words; "" for any other source."""
        if not isinstance(source, list) or len(source) != 2 or source[0] != "kept":
            return ""
        text = self.memory.origin(KEPT + str(source[1]))
        return f", which is {json.dumps(Origin(*json.loads(text)).result)}" if text else ""

    def _index(self, told: Any) -> Any:
        """Return the index of this client: the site's own, or else the one the server gives."""
        known = self.context.index
        if known is not None and told is not None and told != known:
            raise Refusal(f"this is client {known}, and the server calls it {told}")
        return told if known is None else known

    def _find(self, source: list[Any], index: Any, dtype: Any) -> Any:
        """Return the client's value of a source that was already checked; its data are cast to
        `dtype`."""
        kind, *rest = source
        if kind in ("data", "rows"):
            return self._own(source, dtype)
        if kind == "count":
            return np.int32(self.data.count(rest[0]))
        if kind == "offset":
            return np.int32(0)
        if kind == "index":
            if index is None:
                raise FederationError("this client has no index")
            return np.int32(index)
        if kind == "row":
            rows = self._find(rest[0], index, dtype)
            if rest[1] >= (np.shape(rows) or (0,))[0]:  # JAX would clamp to the last one
                raise FederationError(f"the value here has no row {rest[1]}: {json.dumps(source)}")
            return rows[rest[1]]
        if kind == "stack":
            return jnp.stack([jnp.asarray(self._find(part, index, dtype)) for part in rest[0]])
        if kind == "constant":
            found = self.memory.get(CONSTANT + rest[0])
            if found is None:
                raise _Unknown(rest[0])
            return found
        found = self.memory.get(KEPT + rest[0]) if kind == "kept" else None
        if found is None:
            raise _Lost(str(source))
        return found

    def _own(self, source: list[Any], dtype: Any) -> Any:
        """Return the client's data, moved to the device once."""
        kind, part, position, *capacity = source
        here, key = (kind, part, position), (*capacity, str(dtype))
        if self._on_device.get(here, (None,))[0] != key:
            get = self.data.leaf if kind == "data" else self.data.rows
            self._on_device[here] = key, jnp.asarray(_as(get(part, position, *capacity), dtype))
        return self._on_device[here][1]


def _as(x: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """Cast 64-bit data to 32 bits if a server without x64 asks for that, as JAX does in simulation,
    but refuse numbers that would change."""
    if x.dtype == dtype:
        return x
    if x.dtype.kind != dtype.kind or x.dtype.itemsize != 2 * dtype.itemsize:
        raise FederationError(f"the data are {x.dtype}, the program wants {dtype}")
    if changed(x, dtype):  # the message omits the number, which is private
        raise FederationError(
            f"the data are {x.dtype} and do not fit into {dtype}: use smaller numbers, or "
            'jax.config.update("jax_enable_x64", True) at the server'
        )
    return x.astype(dtype)


def _checked(inputs: list[Any], program: StageProgram) -> list[Any]:
    for x, aval in zip(inputs, program.inputs, strict=True):
        if (np.shape(x), x.dtype) != (aval.shape, aval.dtype):
            raise FederationError(
                f"an input is {x.dtype}{list(np.shape(x))}, the program wants {aval.str_short()}"
            )
    return inputs


def _names(given: Meta) -> list[str]:
    if not isinstance(given, list):
        raise FederationError("a list of names was expected")
    return [str(name) for name in given]
