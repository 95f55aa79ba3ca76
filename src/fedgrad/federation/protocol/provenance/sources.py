"""Sources: the origin of a client's value, as programs declare it and as the server names it.

    ["data", part, i], ["rows", part, i, capacity], ["count", part], ["offset"], ["index"]
                                   exactly this
    ["constant"]                   any array that the server sends
    ["kept", stage, output, at]    value kept by a stage of the same program in iteration `at`
    ["result", plan, stage, output, at, roots]
                                   value kept by a program in an earlier call; `roots`: for each
                                   of its arguments, the data from which it was computed
    ["row", source, i]             row i; in a loop over rows, i is the iteration
    ["stack", [source, ...]]       the rows that a loop produced, stacked
    ["argument", i]                client argument i of the program

`at` lists the current iteration of each loop around the stage, -1 for a loop whose length depends
on data. A source that is named for a run identifies constants by digest and kept values by name.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from fedgrad.federation.protocol.federation_errors import FederationError

Source = list[Any]  # one of the above
DECIDED = -1  # the iteration of any loop whose length depends on data: these are not counted
Grammar = dict[str, tuple[Callable[[Any], bool], ...]]  # by kind, a check for each field


def is_number(x: Any) -> bool:
    """Return whether `x` is an int of at least 0; neither True nor 1.0 is."""
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
# Sources that a program's argument may have; sources that a stage's input may have, which come from
# the arguments or from the program itself; and sources that the server may name in a run.
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
    """Return whether `x` is a source of the kinds that the grammar allows."""
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
    """Raise FederationError unless `x` is a source of the grammar."""
    if not is_source(x, grammar):
        known = ", ".join(sorted([*grammar, "row", "stack"]))
        raise FederationError(f"{what} is {json.dumps(x)}, which is none of: {known}")


def row(source: Source, i: int) -> Source:
    """Return row i of a source."""
    if source[0] != "stack":
        return ["row", source, i]
    if i >= len(source[1]):
        raise FederationError(f"there is no row {i} in a stack of {len(source[1])}")
    found: Source = source[1][i]
    return found


def roots(source: Source) -> set[str]:
    """Return the data from which a source is computed."""
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
    """Replace the arguments in a source by the sources of these arguments."""
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
