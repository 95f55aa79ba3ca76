"""Errors about programs that mix placements: what was found, where, and the fix."""

from typing import NoReturn

from fedgrad.core.errors import PlacementError
from fedgrad.core.graph import ANYWHERE, OUTER, SERVER, Value, is_client


def refuse_broadcast(x: Value, placement: str, line: str) -> NoReturn:
    there = x.at == placement
    fix = "It is there already: use it as it is." if there else "Sum it: only sums leave clients."
    raise PlacementError(
        f"{line}: fg.broadcast takes a value of the server, but {x.origin} is at {x.at}. {fix}"
    )


def refuse_sum(x: Value, placement: str, line: str) -> NoReturn:
    if x.at == SERVER:
        raise PlacementError(
            f"{line}: fg.sum takes a value of clients, but {x.origin} is at the server. Use it "
            "as it is, or fg.broadcast it first if every client should add it."
        )
    raise PlacementError(
        f"{line}: fg.sum(..., at={placement}) of {x.origin}, which is at {x.at}. Write at={x.at}."
    )


def join_carry(before: str, after: str, place: str) -> str:
    if before in (ANYWHERE, OUTER, after):
        return after
    if after in (ANYWHERE, OUTER):
        return before
    raise PlacementError(
        f"{place}: a value carried around this loop (or returned by this cond) is at "
        f"{before} on one path and at {after} on the other. Give it one placement: fg.broadcast "
        "or fg.sum it on one of them."
    )


def refuse_client_predicate(predicate: Value, operation: str, place: str) -> None:
    if is_client(predicate.at):
        raise PlacementError(
            f"{place}: the {operation} around communication branches on "
            f"{predicate.origin}, which is at {predicate.at}: every client would decide for "
            "itself what all of them do. Decide at the server, for example on fg.mean(...) or "
            "fg.sum(...) of it; and what a client needs inside of its own loops and branches (also "
            "in Examples.fold), broadcast before them."
        )


def refuse_mix(placed: dict[str, Value], operation: str, line: str) -> NoReturn:
    if SERVER in placed:
        server = placed.pop(SERVER)
        place, client = next(iter(placed.items()))
        at = "" if place == "clients" else f", at={place}"
        name, why = server.origin.name.strip('"') or "it", ""
        if server.origin.captured:
            why = " Every client would have to download it, and nothing would show that."
            name = "it"
        raise PlacementError(
            f"{line}: {operation}: {server.origin} is at the server but is used "
            f"together with {client.origin}, which is at {place}.{why} Send it there first: "
            f"fg.broadcast({name}{at}).{_in_a_loss(server)}"
        )
    (a, x), (b, y) = list(placed.items())[:2]
    raise PlacementError(
        f"{line}: {operation}: {x.origin} is at {a} but is used together with "
        f"{y.origin}, which is at {b}. Clients cannot see each other: sum one of them to the "
        "server and broadcast it from there."
    )


def _in_a_loss(captured: Value) -> str:
    """Return a hint for a captured value: a loss cannot send, because it runs at clients."""
    if not captured.origin.captured:
        return ""
    return " In a loss or a metric, which runs at clients: fg.with_fixed(loss, it)."
