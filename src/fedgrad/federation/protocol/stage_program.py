"""Stage programs, which nodes run: code, which results may leave, and the sources of inputs."""

import functools
import hashlib
import json
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import export

from fedgrad.federation.protocol.federation_errors import FederationError
from fedgrad.federation.protocol.provenance.declarations import Declared

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Where code leaves the device: calls by name, and queues that it shares with its host.
_OUTSIDE = re.compile(
    r'custom_call\s*@"?([\w.$]+)|call_target_name\s*=\s*"([^"]*)"'
    r"|stablehlo\.(infeed|outfeed|send|recv)\b"
)

_compiling = threading.Lock()


@dataclass(frozen=True)
class StageProgram:
    """The program that a node runs for one stage in a round.

    Its first `sent` inputs come from the server; the others are the client's own, from the sources
    in `declared`. Its first `summed` outputs go to the server to be summed; the others stay on the
    node. The digest covers all of that. The client's own arrays are declared by position, so
    allowing a digest allows this use of whichever arrays are at these positions.
    """

    name: str  # for display only
    sent: int
    summed: int
    declared: Declared
    module: bytes

    @functools.cached_property
    def content(self) -> bytes:
        """The program as bytes."""
        head = {"fedgrad": 3, "name": self.name, "sent": self.sent, "summed": self.summed}
        head |= self.declared.header
        return json.dumps(head, sort_keys=True).encode() + b"\n" + self.module

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the content, under which programs are allowed, sent and cached."""
        return hashlib.sha256(self.content).hexdigest()

    @functools.cached_property
    def exported(self) -> export.Exported:
        """The function, with the shapes of its inputs and outputs."""
        return export.deserialize(bytearray(self.module))

    def compile(self) -> Callable[..., list[Any]]:
        """Return the function, compiled once in this process."""
        with _compiling:
            return self._compiled

    @functools.cached_property
    def _compiled(self) -> Callable[..., list[Any]]:
        return jax.jit(self.exported.call).lower(*self.inputs).compile()

    @property
    def text(self) -> str:
        """The StableHLO text, for review before it is allowed."""
        return self.exported.mlir_module()

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the inputs; PRNG keys count as their key data."""
        return self.exported.in_avals

    @property
    def outputs(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the outputs."""
        return self.exported.out_avals

    @property
    def custom_calls(self) -> set[str]:
        """Names of what the code uses of its host, such as library functions."""
        return {name for found in _OUTSIDE.findall(self.text) for name in found if name}

    @property
    def reads(self) -> tuple[str, ...]:
        """The client's own data that the program reads, directly or through earlier results."""
        return self.declared.roots

    def __str__(self) -> str:
        leaves = ", ".join(f"{a.dtype}{list(a.shape)}" for a in self.outputs[: self.summed])
        of = ", ".join(self.reads) or "nothing"
        return f"{self.digest} {self.name}: sums {leaves or 'nothing'} of {of}"


def read_program(content: bytes) -> StageProgram:
    """Return the program of these bytes; nodes of one process share a single object."""
    digest = hashlib.sha256(content).hexdigest()
    program = _in_use.get(digest)
    return program if program is not None else _in_use.setdefault(digest, _read(content))


def _read(content: bytes) -> StageProgram:
    # The bytes come from outside and are not trusted.
    head, _, module = content.partition(b"\n")
    try:
        fields = json.loads(head)
        if fields["fedgrad"] != 3:
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
    except Exception as error:  # deserializers raise anything on bytes that are no program
        raise FederationError(f"the bytes are not a program ({type(error).__name__})") from None
    sound = 0 <= program.sent <= sent and 0 <= program.summed <= summed
    sound &= program.declared.takes(sent - program.sent)
    if not sound or program.content != content:  # the digest must cover everything
        raise FederationError("the program's header does not fit its code")
    return program


_in_use: weakref.WeakValueDictionary[str, StageProgram] = weakref.WeakValueDictionary()
