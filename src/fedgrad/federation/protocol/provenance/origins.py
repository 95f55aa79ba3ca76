"""Symbolic walk over a plan that finds the sources of client stages' own inputs in a run."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fedgrad.core.control import Cond, Scan, While
from fedgrad.core.errors import PlanError
from fedgrad.core.graph import Equation, Exchange, Graph, Round, Value, is_client
from fedgrad.federation.protocol.provenance.declarations import Alternative, iteration
from fedgrad.federation.protocol.provenance.sources import DECIDED, Source, row

# A value as the walk sees it: its source if it is at clients, None if it is at the server.
Known = Source | None
# Sources of the values at clients; for the index of a cond at the server, the branch it chose.
Env = dict[Value, Source]
_CONSTANT: Source = ["constant"]
MOST = 256  # the most alternatives of a stage

T = TypeVar("T")
Ways = Callable[..., list[list[Known]]]  # of a graph: (inputs, places) -> alternatives of outputs


class Origins:
    """For each exchange, the loops around it and the joint alternatives of its inputs by iteration.

    Scans are walked iteration by iteration, so it is exact that iteration 3 reads row 3 and the
    result of iteration 2. Where data decide, each path is walked separately, and sources of
    different paths are never mixed.
    """

    def __init__(self, name: str, numbers: dict[Exchange, int]) -> None:
        self.name, self.numbers = name, numbers
        self.at: tuple[int, ...] = ()
        self.around: tuple[int | None, ...] = ()
        self.loops: dict[Exchange, tuple[int | None, ...]] = {}
        self.found: dict[Exchange, dict[str, dict[str, Alternative]]] = {}

    def inputs(self, exchange: Exchange) -> dict[str, list[Alternative]]:
        """Return the alternatives of own inputs by iteration; under "" if all iterations agree."""
        by = {
            key: [found[text] for text in sorted(found)]
            for key, found in self.found.get(exchange, {}).items()  # empty for a loop of length 0
        }
        first = next(iter(by.values()), [])
        same = all(alternatives == first for alternatives in by.values())
        return {"": first} if by and same else by

    def walk(self, graph: Graph, inside: list[list[Ways]]) -> Ways:
        """Return a function from a graph's inputs (and places) to the alternatives of outputs."""
        return partial(self.run, graph, inside)

    def run(
        self,
        graph: Graph,
        inside: list[list[Ways]],
        inputs: Sequence[Known],
        places: Sequence[str] | None = None,
    ) -> list[list[Known]]:
        env: Env = {v: x for v, x in zip(graph.inputs, inputs, strict=True) if x is not None}
        env |= {v: ["index"] for v in graph.indices.values()}
        worlds, last = [env], last_reads(graph)
        for i, (equation, bodies) in enumerate(zip(graph.equations, inside, strict=True)):
            if isinstance(equation, Round):
                for env in worlds:
                    for exchange in equation.exchanges:
                        self.exchange(exchange, env)
            elif bodies:
                after = [(env, new) for env in worlds for new in self.loop(equation, bodies, env)]
                worlds = [
                    {v: x for v, x in (env | new).items() if last.get(v, -1) > i}
                    for env, new in after
                ]
                worlds = self.different(worlds, lambda env: list(env.values()))
        at = places or [v.at for v in graph.outputs]
        outputs = [
            [_placed(env, v, p) for v, p in zip(graph.outputs, at, strict=True)] for env in worlds
        ]
        return self.different(outputs)

    def different(self, ways: list[T], key: Callable[[T], Any] = lambda way: way) -> list[T]:
        """Remove duplicates and check that there are not too many alternatives."""
        if len(ways) > 1:
            ways = list({json.dumps(key(way)): way for way in ways}.values())
        self.few(ways)
        return ways

    def few(self, ways: Any) -> None:
        """Raise if there are too many alternatives: sites are told all of them, and no others."""
        if len(ways) > MOST:
            raise PlanError.here(
                f"{self.name}: which of their values clients use depends on the branches of "
                f"lax.cond or lax.while_loop in more than {MOST} ways, and nodes have to be told "
                "each. Choose between clients' values with jnp.where instead of with branches, or "
                "do not stack values that come from branches inside of a lax.scan; a derivative "
                "with mode='forward' stacks none."
            )

    def exchange(self, exchange: Exchange, env: Env) -> None:
        """Record the inputs of an exchange and the values that it keeps."""
        self.loops[exchange] = self.around
        found = self.found.setdefault(exchange, {}).setdefault(iteration(self.at), {})
        own = [env[v] if is_client(v.at) else _CONSTANT for v in exchange.own]
        found[json.dumps(own)] = own
        self.few(found)
        for j, v in enumerate(exchange.kept):
            env[v] = ["kept", self.numbers[exchange], j, list(self.at)]

    def loop(self, loop: Equation, bodies: list[Ways], env: Env) -> list[Env]:
        """Return the alternatives of what a loop adds to an environment."""
        pairs = zip(loop.inputs, loop.inputs_at, strict=True)
        inputs = [_placed(env, v, at) for v, at in pairs]
        if isinstance(loop.control, Cond):
            return self.cond(loop, bodies, inputs, env)
        ways = self.scan if isinstance(loop.control, Scan) else self.while_
        return [_made(loop, way) for way in ways(loop, bodies, inputs)]

    def inside(
        self, length: int | None, i: int, body: Ways, inputs: list[Known], at: Any
    ) -> list[list[Known]]:
        """Walk one iteration of a loop."""
        before = self.at, self.around
        self.at, self.around = (*self.at, i), (*self.around, length)
        try:
            return body(inputs, at)
        finally:
            self.at, self.around = before

    def scan(self, loop: Equation, bodies: list[Ways], inputs: list[Known]) -> list[list[Known]]:
        scan, body = loop.control, bodies[0]
        assert isinstance(scan, Scan)
        consts, start, xs = scan.split(inputs)
        places = _places(loop)
        ways: list[tuple[list[Known], list[list[Known]]]] = [(start, [])]  # carry, rows so far
        for i in scan.order:
            now = [None if x is None else row(x, i) for x in xs]
            after = []
            for carry, rows in ways:
                for out in self.inside(scan.length, i, body, [*consts, *carry, *now], places):
                    carried, left = scan.split_outputs(out)
                    after.append((carried, [*rows, left]))
            ways = self.different(after)
        if not scan.length:
            empty = loop.outputs[scan.carry :]
            return [[*start, *[_CONSTANT if is_client(v.at) else None for v in empty]]]
        return [
            [*carry, *map(_stacked, zip(*rows[:: -1 if scan.reverse else 1], strict=True))]
            for carry, rows in ways
        ]

    def while_(self, loop: Equation, bodies: list[Ways], inputs: list[Known]) -> list[list[Known]]:
        assert isinstance(loop.control, While)
        of_cond, of_body, start = loop.control.split(inputs)
        cond, body = bodies
        found = {json.dumps(start): start}
        new = [start]
        while new:  # until nothing new can happen
            carry = new.pop()
            self.inside(None, DECIDED, cond, [*of_cond, *carry], None)
            for out in self.inside(None, DECIDED, body, [*of_body, *carry], _places(loop)):
                if json.dumps(out) not in found:
                    found[json.dumps(out)] = out
                    new.append(out)
                    self.few(found)
        return list(found.values())

    def cond(self, loop: Equation, bodies: list[Ways], inputs: list[Known], env: Env) -> list[Env]:
        """Walk the branches. Conds with the same index take the same branch, such as a cond and its
        derivative."""
        by, n = loop.inputs[0], len(bodies)
        known = env.get(by)
        taken = [known[2]] if known is not None and known[1] == n else range(n)
        return [
            {by: ["branch", n, b], **_made(loop, way)}
            for b in taken
            for way in bodies[b](inputs[1:], _places(loop))
        ]


def _placed(env: Env, value: Value, at: str) -> Known:
    """Return a value as its place needs it: clients may need a server value as a constant."""
    if is_client(value.at):
        return env[value]
    return _CONSTANT if is_client(at) else None


def _places(loop: Equation) -> list[str]:
    return [v.at for v in loop.outputs]


def _made(loop: Equation, way: list[Known]) -> Env:
    return {v: x for v, x in zip(loop.outputs, way, strict=True) if x is not None}


def _stacked(column: Sequence[Known]) -> Known:
    """Stack the values of all iterations."""
    rows = [x for x in column if x is not None]
    return ["stack", rows] if rows else None


def last_reads(graph: Graph) -> dict[Value, int]:
    """Return, for each value, the last round or loop that reads it."""
    found = {v: i for i, e in enumerate(graph.equations) if e.bodies for v in e.inputs}
    return found | dict.fromkeys(graph.outputs, len(graph.equations))
