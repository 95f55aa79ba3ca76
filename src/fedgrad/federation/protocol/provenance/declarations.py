"""Declarations of the sources of a stage's inputs, made by the program and checked by the node.

The server names a source for each input that is the client's own. If it could name any source, an
allowed mean of one array could become a mean of another array, or of a single row. So a program
declares the sources of all inputs of a stage jointly. Where branches depend on data, it declares
one alternative for each path of the run, and not separately for each input everything that it can
be on any path.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedgrad.federation.protocol.federation_errors import FederationError
from fedgrad.federation.protocol.provenance.sources import (
    ARGUMENT,
    DECIDED,
    INPUT,
    NAMED,
    Source,
    check_source,
    is_number,
    is_source,
    resolved,
    roots,
)

At = list[int]
Alternative = list[Source]  # one source for each own input of a stage


class Origin(NamedTuple):
    """The provenance of a value that a node keeps: the stage, the iteration and the data."""

    arguments: str  # digest of the arguments' sources
    result: Source  # the source that a program declares when it takes the value as an argument

    @property
    def text(self) -> str:
        """The JSON text that is stored beside the value."""
        return json.dumps(self)


@dataclass(frozen=True)
class Declared:
    """A stage's declaration of its own inputs. `plan` is the digest of the code of all stages of
    the program and `arguments` are the sources it runs on; inputs come from these arguments or from
    stages of the same program."""

    plan: str
    stage: int  # its number within the plan
    loops: tuple[int | None, ...]  # lengths of the loops around it; None if data decide
    arguments: tuple[Source, ...]
    inputs: dict[str, list[Alternative]]  # joint alternatives, by iteration ("": all of them)

    def __post_init__(self) -> None:
        """Validate the declaration, which may come from outside, against the grammar."""
        if type(self.plan) is not str or not is_number(self.stage):
            raise FederationError(f"no stage of a plan is {self.plan!r}, {self.stage!r}")
        if not all(n is None or is_number(n) for n in self.loops):
            raise FederationError(f"no loops run {list(self.loops)} times")
        for i, source in enumerate(self.arguments):
            check_source(source, ARGUMENT, f"argument {i}")
        if not isinstance(self.inputs, dict) or ("" in self.inputs and len(self.inputs) > 1):
            raise FederationError("inputs are not declared by iteration")
        for key, alternatives in self.inputs.items():
            if key and not self._is_key(key):
                raise FederationError(f"inputs are declared for {key!r}, which is no iteration")
            if not isinstance(alternatives, list):
                raise FederationError("what inputs may be is no list")
            for alternative in alternatives:
                if not isinstance(alternative, list):
                    raise FederationError("what inputs may be together is no list")
                for i, source in enumerate(alternative):
                    check_source(source, INPUT, f"own input {i}")
                    resolved(source, self.arguments)  # raises if out of range
        if len({len(a) for alternatives in self.inputs.values() for a in alternatives}) > 1:
            raise FederationError("alternatives are of different numbers of inputs")

    def _is_key(self, key: Any) -> bool:
        try:
            at = [int(i) for i in key.split(",")]
        except (ValueError, AttributeError):
            return False
        return iteration(at) == key and self.is_iteration(at)

    @property
    def header(self) -> dict[str, Any]:
        """The fields for the header of a program."""
        names = ("plan", "stage", "loops", "arguments", "inputs")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def read(cls, header: dict[str, Any]) -> "Declared":
        """Read the declaration from the header of a program."""
        loops, arguments = (tuple(header[name]) for name in ("loops", "arguments"))
        return cls(header["plan"], header["stage"], loops, arguments, header["inputs"])

    def takes(self, own: int) -> bool:
        """Return whether the stage has this many own inputs."""
        return all(len(a) == own for alternatives in self.inputs.values() for a in alternatives)

    @functools.cached_property
    def made_of(self) -> list[list[str]]:
        """For each argument, the data from which it is computed."""
        return [sorted(roots(source)) for source in self.arguments]

    @property
    def roots(self) -> tuple[str, ...]:
        """All data on which the values of this program depend."""
        return tuple(sorted({root for of in self.made_of for root in of}))

    def origin(self, output: int, at: Sequence[int]) -> Origin:
        """Return the origin of a value that this stage keeps."""
        result = ["result", self.plan, self.stage, output, list(at), self.made_of]
        return Origin(self._arguments, result)

    @functools.cached_property
    def _arguments(self) -> str:
        return hashlib.sha256(json.dumps(self.arguments).encode()).hexdigest()

    def is_iteration(self, at: Any) -> bool:
        """Return whether this stage is run in iteration `at`."""
        if not isinstance(at, list) or len(at) != len(self.loops):
            return False
        return all(
            type(i) is int and (i == DECIDED if n is None else 0 <= i < n)
            for i, n in zip(at, self.loops, strict=True)
        )

    def choices(self, at: At) -> list[Alternative]:
        """Return the joint alternatives of own inputs in an iteration, with arguments resolved."""
        found = self.inputs[""] if "" in self.inputs else self.inputs.get(iteration(at), [])
        return [[resolved(source, self.arguments) for source in one] for one in found]

    def allows(self, choice: Source, source: Any, origin: Callable[[str], Origin | None]) -> bool:
        """Return whether a source that the server names matches the declared one. `origin` returns
        the origin of a kept value by its name."""
        return is_source(source, NAMED) and self._is(choice, source, origin)

    def _is(self, choice: Source, source: Source, origin: Callable[[str], Origin | None]) -> bool:
        kind, *rest = source
        if kind == "constant":
            return choice == ["constant"]
        if kind == "kept":
            if choice[0] not in ("kept", "result"):
                return False
            found = origin(rest[0])
            return found is not None and self._made(choice, found)
        if kind == "row":
            same = choice[0] == "row" and choice[2] == rest[1]
            return same and self._is(choice[1], rest[0], origin)
        if kind == "stack":
            if choice[0] != "stack" or len(choice[1]) != len(rest[0]):
                return False
            pairs = zip(choice[1], rest[0], strict=True)
            return all(self._is(one, row, origin) for one, row in pairs)
        return source == choice

    def _made(self, choice: Source, found: Origin) -> bool:
        if choice[0] == "result":
            return choice == found.result
        here = ["result", self.plan, *choice[1:]]  # a stage of the same run, on any data
        return found.arguments == self._arguments and found.result[:-1] == here


def iteration(at: Sequence[int]) -> str:
    """Return the key of an iteration of the loops around a stage."""
    return ",".join(map(str, at))
