"""Quorum: checks which clients are present and that their data match.

A sum over fewer clients than the user expects is silently wrong. Connected clients that cannot take
part are therefore named in an error, unless the user chose to leave such clients out.
"""

import json
import logging
import operator
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.clients.cohort import Cohort
from fedgrad.core.errors import ArgumentError, CohortError
from fedgrad.federation.protocol.envelope import Envelope
from fedgrad.federation.protocol.federation import Federation
from fedgrad.federation.protocol.federation_errors import NoAnswer
from fedgrad.federation.protocol.node_data import decoded
from fedgrad.federation.protocol.node_values import NodeValue, Remote

log = logging.getLogger("fedgrad.federation")
_PAUSE = 0.2  # seconds between two polls of the connected nodes


@dataclass(frozen=True)
class Attendance:
    """The terms on which a part of the clients' data is requested."""

    drop: bool  # leave out connected clients that do not answer; otherwise they are an error
    only: tuple[int, ...] = ()  # these clients only; () for all
    expect: int | tuple[int, ...] = 1  # at least this many clients, or at least these
    wait: float = 0.0  # seconds to wait for the expected clients
    said: bool = False  # the user named the clients; otherwise all connected ones

    @classmethod
    def read(cls, drop: bool, which: Any, expect: Any, wait: Any) -> Self:
        """Build the terms from the user's arguments."""
        only = () if which is None else _indices(which)
        if only is None:
            raise ArgumentError.here(
                f"which={which!r} are the clients to take: list their indices, as in which=[0, 2]."
            )
        if which is not None and (not only or len(set(only)) != len(only)):
            raise CohortError.here(f"Choose different clients among those there, got {list(only)}.")
        said = which is not None or expect is not None
        number = isinstance(wait, (int, float, np.number)) and not isinstance(wait, bool)
        if not number or not wait >= 0 or (wait and not said):  # NaN is not >= 0
            raise ArgumentError.here(
                f"wait={wait!r} is the seconds to wait for clients, 0 or more: say for whom with "
                "expect= (their number, or a list of their indices)."
            )
        count = _whole(expect)
        if expect is None:
            expected: int | tuple[int, ...] | None = only or 1
        else:
            expected = count or _indices(expect)
        if not expected or (count is not None and count < 1):
            raise ArgumentError.here(
                f"expect={expect!r}: say how many clients are expected, one or more, or list their "
                "indices."
            )
        return cls(drop, only, expected, float(wait), said)

    def short_of(self, there: Collection[int]) -> str:
        """Return a message about expected clients that are missing, or "" if none are."""
        after = f" after {self.wait:g} s" if self.wait else ""
        if isinstance(self.expect, int):
            if len(there) >= self.expect:
                return ""
            return f"{len(there)} clients are there{after}, {self.expect} are expected."
        missing = ", ".join(str(name) for name in sorted(set(self.expect) - set(there)))
        return missing and f"Clients {missing} are expected and not there{after}, only {there}."


def _whole(x: Any) -> int | None:
    """Return `x` as an int if it is an integer, including numpy's; neither True nor 1.0 is."""
    try:
        return None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        return None


def _indices(given: Any) -> tuple[int, ...] | None:
    """Return client indices as a tuple of ints, or None if that is not what they are."""
    if isinstance(given, (str, bytes, Mapping)) or not hasattr(given, "__iter__"):
        return None
    try:
        found = [_whole(x) for x in given]
    except TypeError:  # a numpy array without dimensions
        return None
    good = tuple(x for x in found if x is not None)
    return good if len(good) == len(found) else None


def values(federation: Federation, part: str, attendance: Attendance) -> Any:
    """Return the clients' data as a tree of handles; all clients must have the same shapes."""
    shapes = _described(federation, part, False, attendance)
    structure, rows, dtypes, _ = _same(shapes, "use population(...) for different numbers")
    leaves = [
        NodeValue(Remote(["data", part, i]), shape, dtype, tuple(shapes))
        for i, (shape, dtype) in enumerate(zip(rows, dtypes, strict=True))
    ]
    return decoded(structure, leaves)


def examples(federation: Federation, part: str, attendance: Attendance) -> Cohort:
    """Return all clients, which may have different numbers of examples, as a cohort of handles."""
    shapes = _described(federation, part, True, attendance)
    most = max(int(shape[3]) for shape in shapes.values())
    shapes = {client: (*shape[:3], most) for client, shape in shapes.items()}
    structure, rows, dtypes, _ = _same(shapes, "only the number of examples may differ")
    clients, int32 = tuple(shapes), np.dtype("int32")
    store = [
        NodeValue(Remote(["rows", part, i, most]), (2 * most, *shape), dtype, clients, shared=True)
        for i, (shape, dtype) in enumerate(zip(rows, dtypes, strict=True))
    ]
    return Cohort(
        store=decoded(structure, store),
        offset=NodeValue(Remote(["offset"]), (), int32, clients),
        count=NodeValue(Remote(["count", part]), (), int32, clients),
        index=np.asarray(clients, np.int32),
        capacity=most,
    )


def _present(federation: Federation, part: str, attendance: Attendance) -> dict[int, int]:
    """Wait for the required clients; return those that have the part, each with its node."""
    ends = time.monotonic() + attendance.wait
    deadline = federation.deadline
    while True:
        present, absent = federation.roll_call(deadline)
        having = {c: n for c, n in present.items() if not part or part in federation.parts[n]}
        short, left = attendance.short_of(list(having)), ends - time.monotonic()
        complete = not short and (attendance.drop or attendance.only or not absent)
        if complete or left <= 0:
            break
        time.sleep(min(_PAUSE, left))
        deadline = min(federation.deadline, max(left, _PAUSE))
    why = _reasons("Node", absent)
    unknown = sorted(set(attendance.only) - having.keys())
    if unknown and having:
        raise CohortError.here(
            f"Choose different clients among {list(having)}, got {list(attendance.only)}. {why}"
        )
    if absent and not attendance.drop and not attendance.only:
        raise NoAnswer.here(f"Not all nodes can say who they are. {why} {_LEFT_OUT} {short}")
    if not present:
        raise NoAnswer.here(
            f"No node of the federation is connected, or none can say who it is. {why}"
        )
    if not having:
        known = {name for node in present.values() for name in federation.parts[node]}
        raise ArgumentError.here(f"No client has data {part!r}.", part, known)
    if short:
        raise NoAnswer.here(f"{short} {why}")
    lacking = {
        c: f"node {n} has no {part!r}, only {', '.join(federation.parts[n]) or 'nothing'}"
        for c, n in present.items()
        if c not in having
    }
    if lacking and not attendance.drop and not attendance.said:
        raise NoAnswer.here(
            f"Not all clients have data {part!r}. {_reasons('Client', lacking)} {_LEFT_OUT} So "
            "they are if expect= or which= says who is meant."
        )
    return having


_LEFT_OUT = (
    "A sum would be over fewer clients than are connected; with missing='drop' these are left out."
)


def _described(
    federation: Federation, part: str, as_examples: bool, attendance: Attendance
) -> dict[int, Any]:
    """Return (structure, shapes, dtypes, capacity) of a part, by client."""
    having = _present(federation, part, attendance)
    asked = {c: having[c] for c in attendance.only or having}
    request = Envelope("describe", {"part": part, "examples": as_examples})
    replies = federation.ask(dict.fromkeys(asked.values(), request), federation.deadline)
    found: dict[int, Any] = {}
    silent: dict[int, str] = {}
    for client, node in asked.items():
        described = _description(replies.get(node), as_examples)
        if isinstance(described, str):
            silent[client] = described
        else:
            found[client] = described
    if silent and (attendance.only or not attendance.drop):
        fix = "They are asked for by which=." if attendance.only else _LEFT_OUT
        raise NoAnswer.here(
            f"Not all clients can say what their data are like. {_reasons('Client', silent)} {fix}"
        )
    for client, why in silent.items():
        log.warning("client %s takes no part: %s", client, why)
    if not found:
        raise NoAnswer.here(
            f"No client can say what its data are like. {_reasons('Client', silent)}"
        )
    short = attendance.short_of([c for c in having if c not in silent])
    if short:
        raise NoAnswer.here(f"{short} {_reasons('Client', silent)}")
    return found


def _description(
    reply: Envelope | None, as_examples: bool
) -> tuple[Any, list[Any], list[Any], int] | str:
    """Return a client's description of its data, or the reason why there is none."""
    if reply is None:
        return "it does not answer"
    if reply.kind != "ok":
        return reply.reason or f"it replies with {reply.kind!r}"
    try:
        structure, shapes, names, capacity = (
            json.loads(str(reply.meta[name]))
            for name in ("structure", "shapes", "dtypes", "capacity")
        )
        dtypes = [jax.dtypes.canonicalize_dtype(jnp.dtype(name)) for name in names]
        rows = [tuple(map(int, shape)) for shape in shapes]
        decoded(structure, list(zip(rows, dtypes, strict=True)))  # raises unless they match
        if any(n < 0 for shape in rows for n in shape) or int(capacity or 0) < as_examples:
            raise ValueError
        return structure, rows, dtypes, int(capacity or 0)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return "what it says of its data makes no sense"


def _same(shapes: dict[int, Any], hint: str) -> Any:
    """Return the common description of all clients' data; raise if they differ."""
    first, described = next(iter(shapes.items()))
    for client, other in shapes.items():
        if other != described:
            raise CohortError.here(
                f"Clients {first} and {client} have different data: {_shown(described)} and "
                f"{_shown(other)}; {hint}."
            )
    return described


def _shown(described: Any) -> str:
    return ", ".join(f"{d}{list(s)}" for s, d in zip(*described[1:3], strict=True))


def _reasons(who: str, absent: dict[int, str]) -> str:
    return " ".join(f"{who} {name}: {why}." for name, why in sorted(absent.items()))
