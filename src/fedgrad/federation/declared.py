"""Where the inputs of a client's stage may come from: said by the program, checked by the node.

The server names a source for each input that is the client's own. If it were free to name any, an
allowed mean of one array would be a mean of another, or of one row. So a program declares them:

    ["data", part, i], ["rows", part, i, capacity], ["count", part], ["offset"], ["index"]
                                   exactly this
    ["constant"]                   an array that the server sends, whatever it is
    ["kept", stage, output, at]    what a stage of the same program has kept in iteration `at`
    ["result", plan, stage, output, at, roots]
                                   what a program of an earlier call has kept, made of these data
    ["row", source, i]             row i: inside of a loop over rows, where i is the iteration
    ["stack", [sources, ...]]      rows that a loop has left, one after another
    ["argument", i]                what this client argument of the program is, one of the above

`at` are the iterations of the loops around the stage, -1 for one whose length the data decide.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Source = list[Any]  # of the above; as the server names one, with a name of a constant or kept value
At = list[int]
DECIDED = -1  # the iteration of a loop whose length the data decide: nobody counts them

_EXACT = ("data", "rows", "count", "offset", "index")


@dataclass(frozen=True)
class Origin:
    """Which stage has made a value that a node keeps, in which iteration, out of which data."""

    plan: str
    arguments: str  # a digest
    stage: int
    output: int
    at: tuple[int, ...]
    roots: tuple[str, ...]

    @property
    def text(self) -> str:
        """To be kept beside the value."""
        return json.dumps([self.plan, self.arguments, self.stage, self.output, self.at, self.roots])

    @property
    def result(self) -> Source:
        """What a program that has the value for an argument declares it to be."""
        return ["result", self.plan, self.stage, self.output, list(self.at), list(self.roots)]

    @classmethod
    def read(cls, text: str) -> "Origin":
        """The origin that was written so."""
        plan, arguments, stage, output, at, roots = json.loads(text)
        return cls(plan, arguments, stage, output, tuple(at), tuple(roots))


@dataclass(frozen=True)
class Declared:
    """What a stage says of its own inputs. `plan` stands for the code of all stages of its program,
    `arguments` for what that is run on."""

    plan: str
    stage: int  # its number among those of the plan
    loops: tuple[int | None, ...]  # around it: how often they run; None where the data decide
    arguments: tuple[Source, ...]
    inputs: tuple[dict[str, list[Source]], ...]  # by iteration ("": all), what an input may be

    @property
    def header(self) -> dict[str, Any]:
        """For the header of a program."""
        names = ("plan", "stage", "loops", "arguments", "inputs")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def read(cls, header: dict[str, Any]) -> "Declared":
        """From the header of a program."""
        loops, arguments, inputs = (tuple(header[n]) for n in ("loops", "arguments", "inputs"))
        return cls(str(header["plan"]), int(header["stage"]), loops, arguments, inputs)

    @functools.cached_property
    def roots(self) -> tuple[str, ...]:
        """The data of which all that the program makes is made."""
        return tuple(sorted({root for source in self.arguments for root in roots(source)}))

    def origin(self, output: int, at: Sequence[int]) -> Origin:
        """Of a value that this stage keeps."""
        return Origin(self.plan, self._arguments, self.stage, output, tuple(at), self.roots)

    @functools.cached_property
    def _arguments(self) -> str:
        return hashlib.sha256(json.dumps(self.arguments).encode()).hexdigest()

    def is_iteration(self, at: Any) -> bool:
        """Is that one of the iterations in which this stage is run?"""
        if not isinstance(at, list) or len(at) != len(self.loops):
            return False
        return all(
            type(i) is int and (i == DECIDED if n is None else 0 <= i < n)
            for i, n in zip(at, self.loops, strict=True)
        )

    def choices(self, position: int, at: At) -> list[Source]:
        """What an own input may be in an iteration, arguments being what they are here."""
        by_iteration = self.inputs[position]
        found = by_iteration[""] if "" in by_iteration else by_iteration.get(iteration(at), [])
        return [choice for source in found for choice in _plain(source, self.arguments)]

    def allows(self, choice: Source, source: Any, origin: Callable[[str], Origin | None]) -> bool:
        """Does a source that the server has named fit one of the choices? `origin`: of a kept
        value, by name."""
        if not isinstance(source, list) or not source:
            return False
        kind, *rest = source
        if kind in _EXACT:
            return json.dumps(source) == json.dumps(choice)
        if kind == "constant":
            return choice == ["constant"] and len(rest) == 1 and isinstance(rest[0], str)
        if kind == "kept" and len(rest) == 1 and isinstance(rest[0], str):
            if choice[0] not in ("kept", "result"):
                return False
            found = origin(rest[0])
            return found is not None and self._made(choice, found)
        if kind == "row" and choice[0] == "row" and len(rest) == 2:
            same = type(rest[1]) is int and rest[1] == choice[2]
            return same and self.allows(choice[1], rest[0], origin)
        if kind == "stack" and choice[0] == "stack" and len(rest) == 1:
            rows, wanted = rest[0], choice[1]
            return (
                isinstance(rows, list)
                and len(rows) == len(wanted)
                and all(
                    any(self.allows(one, row, origin) for one in choices)
                    for row, choices in zip(rows, wanted, strict=True)
                )
            )
        return False

    def _made(self, choice: Source, found: Origin) -> bool:
        if choice[0] == "kept":
            _, stage, output, at = choice
            here = (self.plan, self._arguments, stage, output, tuple(at))
            return here == (found.plan, found.arguments, found.stage, found.output, found.at)
        _, plan, stage, output, at, made_of = choice
        same = (plan, stage, output, tuple(at)) == (
            found.plan,
            found.stage,
            found.output,
            found.at,
        )
        return same and set(found.roots) <= set(made_of)


def iteration(at: Sequence[int]) -> str:
    """The iterations of the loops around a stage, as a key."""
    return ",".join(map(str, at))


def row(source: Source, i: int) -> list[Source]:
    """What row i of a source may be."""
    return list(source[1][i]) if source[0] == "stack" else [["row", source, i]]


def roots(source: Source) -> set[str]:
    """The data that a source is made of."""
    kind, *rest = source
    if kind in ("data", "rows", "count"):
        return {json.dumps(source)}
    if kind == "result":
        return set(rest[4])
    if kind == "row":
        return roots(rest[0])
    if kind == "stack":
        return {root for choices in rest[0] for choice in choices for root in roots(choice)}
    return set()


def union(*choices: Sequence[Source]) -> list[Source]:
    """What may be one or another. Stacks are joined row by row, so that there are never many."""
    found: dict[str, Source] = {}
    for choice in (choice for some in choices for choice in some):
        key = f"stack of {len(choice[1])}" if choice[0] == "stack" else json.dumps(choice)
        if choice[0] == "stack" and key in found:
            rows = zip(found[key][1], choice[1], strict=True)
            choice = ["stack", [union(a, b) for a, b in rows]]
        found[key] = choice
    return [found[key] for key in sorted(found)]


def _plain(source: Source, arguments: Sequence[Source]) -> list[Source]:
    """The choices that a source stands for when arguments are what they are."""
    kind, *rest = source
    if kind == "argument":
        return [arguments[rest[0]]]
    if kind == "row":
        return [one for base in _plain(rest[0], arguments) for one in row(base, rest[1])]
    if kind == "stack":
        rows = [[p for one in choices for p in _plain(one, arguments)] for choices in rest[0]]
        return [["stack", rows]]
    return [source]
