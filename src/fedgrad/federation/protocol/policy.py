"""Policies: what a site allows with its data. The node checks each program when it arrives."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

from fedgrad.core.errors import ArgumentError, known_fields
from fedgrad.federation.protocol.signing import is_signed
from fedgrad.federation.protocol.stage_program import PLATFORMS, StageProgram

# Functions of host libraries that programs may call by name: linear algebra, random bits, markers.
# Functions that call back into Python or bring their own kernel are not among them.
CUSTOM_CALLS = (
    "lapack_*",
    "cusolver_*",
    "cublas_*",
    "hipsolver_*",
    "hipblas_*",
    "cu_threefry2x32*",
    "hip_threefry2x32*",
    "Sharding",
    "SPMD*Shape",
    "Eigh",
    "Qr",
    "LuDecomposition",
    "ProductOfElementaryHouseholderReflectors",
    "ApproxTopK",
    "TopK",
    "mhlo.*",
    "stablehlo.*",
    "shape_assertion",
)


class Refusal(Exception):
    """The policy refuses; the message gives the reason."""


@known_fields
@dataclass(frozen=True)
class Policy:
    """Rules of a site. `Policy()` allows nothing: name the programs, or the operators who sign
    them.

    Args:
        programs: Digests of the stages that may run.
        operators: Public keys (Ed25519, PEM) whose holders may run the programs they sign.
        anything: Whether to allow every program. Only for trials on data that need no protection.
        minimum_cohort: The fewest clients that the server may announce for a sum.
        maximum_bytes: The maximum size of the arrays of one message, in each direction.
        maximum_size: The maximum number of scalars of one array that leaves the node.
        maximum_memory: The maximum number of bytes kept between messages.
        platforms: The platforms on which programs may run.
        custom_calls: Patterns of the host functions that programs may call.
    """

    programs: frozenset[str] = frozenset()
    operators: tuple[bytes, ...] = ()
    anything: bool = False
    minimum_cohort: int = 2
    maximum_bytes: int = 2**28
    maximum_size: int = 2**26
    maximum_memory: int = 2**30
    platforms: tuple[str, ...] = PLATFORMS
    custom_calls: tuple[str, ...] = CUSTOM_CALLS

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a policy from a TOML file with these names; `operators` are paths of PEM files."""
        path = Path(path)
        try:
            given = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ArgumentError.here(f"The policy cannot be read: {path}: {error}.") from None
        known = {field.name: type(field.default) for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ArgumentError.here(f"{path}: unknown {name!r}.", name, known)
            wanted = known[name] if known[name] in (bool, int) else list
            if type(value) is not wanted:
                raise ArgumentError.here(f"{path}: {name} is a {wanted.__name__}, got {value!r}.")
        keys = [path.parent / key for key in given.pop("operators", [])]
        missing = [str(key) for key in keys if not key.is_file()]
        if missing:
            raise ArgumentError.here(f"{path}: there is no key {', '.join(missing)}.")
        settings: dict[str, Any] = {
            name: (frozenset if name == "programs" else tuple)(value)
            if isinstance(value, list)
            else value
            for name, value in given.items()
        }
        return cls(operators=tuple(key.read_bytes() for key in keys), **settings)

    def check_program(self, program: StageProgram, signature: bytes, platform: str) -> None:
        """Refuse a program that must not run here at all."""
        if not self._allows(program.digest, signature):
            raise Refusal(
                f"program {program.digest} ({program.name}) is not on the list of allowed programs"
                f"{' and not signed by an allowed operator' if self.operators else ''}"
            )
        unknown = [
            name
            for name in sorted(program.custom_calls)
            if not any(fnmatchcase(name, pattern) for pattern in self.custom_calls)
        ]
        if unknown:
            raise Refusal(f"the program calls {', '.join(unknown)} on the host")
        if platform not in self.platforms:
            raise Refusal(f"nothing may run on {platform} here, only on {self.platforms}")
        if platform not in program.exported.platforms:
            raise Refusal(f"the program is for {program.exported.platforms}, this is {platform}")
        leaving = program.outputs[: program.summed]
        largest = max((math.prod(a.shape) for a in leaving), default=0)
        if largest > self.maximum_size:
            raise Refusal(
                f"an array of {largest} scalars would leave, at most {self.maximum_size} may"
            )
        self.check_bytes(size(program.inputs[: program.sent]), "received")
        self.check_bytes(size(leaving), "sent")
        self.check_memory(size(program.outputs[program.summed :]))

    def check_cohort(self, clients: int) -> None:
        """Refuse a sum over too few clients."""
        if clients < self.minimum_cohort:
            raise Refusal(
                f"the sum would be over {clients} clients, at least {self.minimum_cohort} have to "
                "take part"
            )

    def check_bytes(self, count: int, way: str) -> None:
        """Refuse a message that is too large."""
        if count > self.maximum_bytes:
            raise Refusal(
                f"{count} bytes would be {way} in one message, at most {self.maximum_bytes} may"
            )

    def check_memory(self, count: int) -> None:
        """Refuse to keep too many bytes."""
        if count > self.maximum_memory:
            raise Refusal(f"{count} bytes would be kept, at most {self.maximum_memory} may")

    def _allows(self, digest: str, signature: bytes) -> bool:
        if self.anything or digest in self.programs:
            return True
        return bool(signature) and any(is_signed(k, digest, signature) for k in self.operators)


def size(avals: Sequence[Any]) -> int:
    """Return the total bytes of arrays of these shapes and dtypes."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)
