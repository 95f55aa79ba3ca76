"""Sources: where a client's value comes from, as programs declare it and as the server names it.

    ["data", part, i], ["rows", part, i, capacity], ["count", part], ["offset"], ["index"]
                                   exactly this
    ["constant"]                   an array that the server sends, whatever it is
    ["kept", stage, output, at]    what a stage of the same program has kept in iteration `at`
    ["result", plan, stage, output, at, roots]
                                   what a program of an earlier call has kept; `roots`: for each
                                   of its arguments, the data that this was made of
    ["row", source, i]             row i: inside of a loop over rows, where i is the iteration
    ["stack", [source, ...]]       rows that a loop has left, one after another
    ["argument", i]                what this client argument of the program is

`at` are the iterations of the loops around the stage, -1 for one whose length the data decide.
Who names a source for a run says which constant, and which value that was kept, by name.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from fedgrad.federation.protocol.federation_errors import FederationError

Source = list[Any]  # of the above
DECIDED = -1  # the iteration of a loop whose length the data decide: nobody counts them
Grammar = dict[str, tuple[Callable[[Any], bool], ...]]  # by kind, what its fields are


def is_number(x: Any) -> bool:
    """Zero or more, and neither true nor 1.0."""
    return type(x) is int and x >= 0


def _is_name(x: Any) -> bool:
    return type(x) is str


def _is_at(x: Any) -> bool:
    return isinstance(x, list) and all(is_number(i) or (type(i) is int and i == DECIDED) for i in x)


def _is_roots(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(of, list) and all(map(_is_name, of)) for of in x)


_OWN: Grammar = {
    "data": (_is_name, is_number),
    "rows": (_is_name, is_number, is_number),
    "count": (_is_name,),
    "offset": (),
    "index": (),
}
# What an argument of a program can be; what an input of its stages can be, which is of its
# arguments or made by it, and nothing else; and what the server can name in a run.
ARGUMENT: Grammar = {
    **_OWN,
    "constant": (),
    "result": (_is_name, is_number, is_number, _is_at, _is_roots),
}
INPUT: Grammar = {
    "argument": (is_number,),
    "index": (),
    "constant": (),
    "kept": (is_number, is_number, _is_at),
}
NAMED: Grammar = {**_OWN, "constant": (_is_name,), "kept": (_is_name,)}


def is_source(x: Any, grammar: Grammar) -> bool:
    """Is that a source, and of the kinds that may stand there?"""
    if not isinstance(x, list) or not x or not isinstance(x[0], str):
        return False
    kind, *fields = x
    if kind == "row":
        return len(fields) == 2 and is_number(fields[1]) and is_source(fields[0], grammar)
    if kind == "stack":
        rows = fields[0] if len(fields) == 1 and isinstance(fields[0], list) else []
        return bool(rows) and all(is_source(row, grammar) for row in rows)
    wanted = grammar.get(kind)
    if wanted is None or len(wanted) != len(fields):
        return False
    return all(fits(field) for fits, field in zip(wanted, fields, strict=True))


def check_source(x: Any, grammar: Grammar, what: str) -> None:
    """Raise if it is not."""
    if not is_source(x, grammar):
        known = ", ".join(sorted([*grammar, "row", "stack"]))
        raise FederationError(f"{what} is {json.dumps(x)}, which is none of: {known}")


def row(source: Source, i: int) -> Source:
    """Row i of a source."""
    if source[0] != "stack":
        return ["row", source, i]
    if i >= len(source[1]):
        raise FederationError(f"there is no row {i} in a stack of {len(source[1])}")
    found: Source = source[1][i]
    return found


def roots(source: Source) -> set[str]:
    """The data that a source is made of."""
    kind, *rest = source
    if kind in ("data", "rows", "count"):
        return {json.dumps(source)}
    if kind == "result":
        return {root for of in rest[4] for root in of}
    if kind == "row":
        return roots(rest[0])
    if kind == "stack":
        return {root for one in rest[0] for root in roots(one)}
    return set()


def resolved(source: Source, arguments: Sequence[Source]) -> Source:
    """What a source is when the arguments of its program are these."""
    kind, *rest = source
    if kind == "argument":
        if rest[0] >= len(arguments):
            raise FederationError(f"there is no argument {rest[0]} among {len(arguments)}")
        return arguments[rest[0]]
    if kind == "row":
        return row(resolved(rest[0], arguments), rest[1])
    if kind == "stack":
        return ["stack", [resolved(one, arguments) for one in rest[0]]]
    return source
