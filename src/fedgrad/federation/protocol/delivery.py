"""One message to some clients and their answers, each accepted or rejected with a reason."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedgrad.federation.protocol.call_report import Report
from fedgrad.federation.protocol.envelope import Envelope, Meta
from fedgrad.federation.protocol.federation import Federation
from fedgrad.federation.protocol.federation_errors import Refused
from fedgrad.federation.protocol.node_values import Place
from fedgrad.federation.protocol.signing import sign
from fedgrad.federation.protocol.stage_program import StageProgram

Arrays = Sequence[np.ndarray[Any, Any]]
Enough = Callable[[Collection[int]], bool]  # takes the clients with accepted answers


@dataclass(frozen=True)
class Terms:
    """The terms on which clients take part."""

    deadline: float  # seconds for each message
    drop: bool  # continue without clients whose answer is missing or rejected; otherwise fail
    restart: bool  # also if they are in sums of an earlier round, which reveals their terms
    allow_non_finite: bool
    at_least: int  # the fewest clients for a result
    signing_key: bytes | None


@dataclass(frozen=True, eq=False)
class Work:
    """One stage for the clients of a placement."""

    placement: str
    program: Callable[[int], StageProgram]  # by client: the sources of inputs may differ
    sums: tuple[Any, ...]  # shapes and dtypes of what each client sends
    at: tuple[int, ...]  # the current iteration of each loop around the stage
    sent: list[np.ndarray[Any, Any]]
    own: list[Place]
    keep: list[Place]
    free: list[Place]  # inputs that no later stage reads


@dataclass(eq=False)
class Delivery:
    """Send each client its part of some work and check the replies.

    `clients`: by client, its work and how many clients it is told take part in it.
    """

    federation: Federation
    nodes: dict[int, int]  # by client, for connected ones
    clients: dict[int, list[tuple[Work, int]]]
    terms: Terms
    report: Report
    good: dict[int, Arrays] = field(default_factory=dict)  # in order of arrival
    bad: dict[int, str] = field(default_factory=dict)  # the reasons
    lost: set[int] = field(default_factory=set)  # rejected clients that lost a kept value

    def run(self, enough: Enough | None) -> None:
        """Send all work and collect answers until there are enough."""
        for client in self.clients.keys() - self.nodes.keys():
            self.bad[client] = "is not connected"
        ends = time.monotonic() + self.terms.deadline
        forgetful = self._send(self._open(), ends, enough)
        if forgetful:  # a restarted node has nothing left
            for client in forgetful:
                self.federation.known_by(self.nodes[client]).clear()
            again = self._send(forgetful, ends, None)
            self.bad.update(dict.fromkeys(again, "forgets at once what it is sent"))
        if enough is None or not enough(self.good):
            self.bad.update(dict.fromkeys(self._open(), "did not answer in time"))

    def _open(self) -> set[int]:
        return {c for c in self.clients if c not in self.good and c not in self.bad}

    def _send(self, clients: set[int], ends: float, enough: Enough | None) -> set[int]:
        """Send requests to these clients; return those whose nodes lack a program or constant."""
        made: dict[Any, Envelope] = {}
        requests = {self.nodes[c]: self._request(c, made) for c in sorted(clients)}
        client = {self.nodes[c]: c for c in clients}
        judged: set[int] = set()

        def judge(replies: dict[int, Envelope]) -> bool:
            """Check new replies; return whether there are enough."""
            refusing = [client[node] for node, r in replies.items() if r.kind == "refused"]
            if refusing:
                site, reason = min(refusing), replies[self.nodes[min(refusing)]].reason
                raise Refused.here(
                    f"{self.report.program}: the site of client {site} refuses: {reason}."
                )
            for node, reply in replies.items():
                if node not in judged:
                    judged.add(node)
                    self._judge(client[node], reply)
            return enough is not None and enough(self.good)

        self.report.messages += 1
        left = max(0.0, ends - time.monotonic())
        replies = self.federation.ask(requests, left, judge if enough else None)
        judge(replies)
        return {client[node] for node, reply in replies.items() if reply.kind == "unknown"}

    def _request(self, client: int, made: dict[Any, Envelope]) -> Envelope:
        """Return a client's request. Equal requests are one object, so engines pack them once."""
        node, work = self.nodes[client], self.clients[client]
        known = self.federation.known_by(node)
        constants = {
            digest: array
            for w, _ in work
            for place in w.own
            for digest, array in place.of(client).constants.items()
            if digest not in known
        }
        wanted = [w.program(client) for w, _ in work]
        programs = {program.digest: program for program in wanted if program.digest not in known}
        items = json.dumps([_item(w, client, cohort) for w, cohort in work])
        told = '["index"]' in items and node not in self.federation.declared
        waste = self.federation.waste(node)
        key = (items, tuple(constants), tuple(programs), client if told else None, tuple(waste))
        sent = [x for w, _ in work for x in w.sent]
        if key not in made:
            meta: dict[str, Meta] = {"work": items, "constants": list(constants), "names": waste}
            secret = self.terms.signing_key
            signed = [sign(secret, digest) if secret else b"" for digest in programs]
            meta["signatures"] = [signature.hex() for signature in signed]
            meta |= {"index": client} if told else {}
            code = [np.frombuffer(program.content, np.uint8) for program in programs.values()]
            made[key] = Envelope("run", meta, (*sent, *constants.values(), *code))
        for w, _ in work:
            for remote in [place.of(client) for place in w.keep]:
                if client not in remote.kept:  # otherwise this is a second attempt
                    remote.kept[client] = self.federation.hold(remote.source[1], node)
        values = sum(array.nbytes for array in sent)
        self.report.of(client).down += values
        self.report.of(client).setup += made[key].bytes - values
        return made[key]

    def _judge(self, client: int, reply: Envelope) -> None:
        self.report.of(client).up += reply.bytes
        if reply.kind == "unknown":
            return
        if reply.kind != "ok":
            self.bad[client] = reply.reason or f"replied with {reply.kind!r}"
            if reply.meta.get("lost"):
                self.lost.add(client)
            return
        expected = [aval for w, _ in self.clients[client] for aval in w.sums]
        wrong = self._wrong(reply.arrays, expected)
        if wrong:
            self.bad[client] = wrong
            return
        self.good[client] = reply.arrays
        known = self.federation.known_by(self.nodes[client])
        for w, _ in self.clients[client]:
            constants = (place.of(client).constants for place in w.own)
            known.update([w.program(client).digest], *constants)
            for place in w.free:
                place.of(client).kept.pop(client).end.detach()

    def _wrong(self, arrays: Arrays, expected: Sequence[Any]) -> str:
        if len(arrays) != len(expected):
            return f"sent {len(arrays)} arrays instead of {len(expected)}"
        for array, aval in zip(arrays, expected, strict=True):
            if (array.shape, array.dtype) != (aval.shape, aval.dtype):
                return f"sent {array.dtype}{list(array.shape)} instead of {aval.str_short()}"
            inexact = np.issubdtype(array.dtype, np.inexact) or array.dtype.kind == "V"
            if inexact and not self.terms.allow_non_finite and not np.isfinite(array).all():
                return "sent numbers that are not finite"
        return ""


def _item(work: Work, client: int, cohort: int) -> dict[str, Any]:
    return {
        "program": work.program(client).digest,
        "at": list(work.at),
        "cohort": cohort,
        "inputs": [place.of(client).source for place in work.own],
        "keep": [place.of(client).source[1] for place in work.keep],
        "free": [place.of(client).source[1] for place in work.free],
    }
