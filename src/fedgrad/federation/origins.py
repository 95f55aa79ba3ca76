"""Which sources the own inputs of clients' stages have in a run: a walk without values."""

import functools
from collections.abc import Sequence
from typing import Any, TypeGuard

from fedgrad.core.control import Scan, While
from fedgrad.core.placement import is_client
from fedgrad.executors.walk import Env, Walk
from fedgrad.federation.declared import DECIDED, Source, iteration, row, union
from fedgrad.plan.stages import Exchange, Loop, Step, Steps

# What a value may be: a list of sources, if it is at clients; None, if it is at the server.
Known = list[Source] | None
_CONSTANT: list[Source] = [["constant"]]


class Origins(Walk):
    """For each exchange, the loops around it and what each of its own inputs may be, by iteration.

    Scans are walked through iteration by iteration, so it is exact that row 3 is read in iteration
    3 and what came out of iteration 2. Where the data decide, it is all that may happen.
    """

    def __init__(self, numbers: dict[Exchange, int]) -> None:
        self.numbers = numbers
        self.at: tuple[int, ...] = ()
        self.around: tuple[int | None, ...] = ()
        self.loops: dict[Exchange, tuple[int | None, ...]] = {}
        self.found: dict[Exchange, list[dict[str, list[Source]]]] = {}

    def inputs(self, exchange: Exchange) -> tuple[dict[str, list[Source]], ...]:
        """What each own input may be; if that is the same in all iterations, under ""."""
        found = self.found.get(exchange, [{} for _ in exchange.own])  # a loop over nothing
        return tuple({"": next(iter(by.values()))} if by and _all_same(by) else by for by in found)

    def server(self, step: Step, env: Env) -> None:
        """What the server computes is at the server."""
        env.update((v, None) for equation in step.server for v in equation.outputs)

    def index(self, placement: str) -> Known:
        return [["index"]]

    def at_clients(self, x: Any, placement: str) -> Known:
        return _CONSTANT

    def exchange(self, exchange: Exchange, env: Env) -> None:
        number = self.numbers[exchange]
        self.loops[exchange] = self.around
        found = self.found.setdefault(exchange, [{} for _ in exchange.own])
        key = iteration(self.at)
        for by, v in zip(found, exchange.own, strict=True):
            by[key] = union(by.get(key, []), env[v] if is_client(v.at) else _CONSTANT)
        for j, v in enumerate(exchange.kept):
            env[v] = [["kept", number, j, list(self.at)]]
        env.update((total, None) for _, total in exchange.up)

    def inside(self, length: int | None, i: int, body: Steps, inputs: list[Known], at: Any) -> Any:
        """One iteration of a loop."""
        before = self.at, self.around
        self.at, self.around = (*self.at, i), (*self.around, length)
        try:
            return self.run(body, inputs, at)
        finally:
            self.at, self.around = before

    def scan(self, loop: Loop, inputs: list[Known]) -> list[Known]:
        scan, body = loop.control, loop.bodies[0]
        assert isinstance(scan, Scan)
        consts, carry, xs = scan.split(inputs)
        places = [v.at for v in loop.equation.outputs]
        rows: list[list[Known]] = [[] for _ in range(scan.length)]
        for i in scan.order:
            now = [_rows(x, i) for x in xs]
            out = self.inside(scan.length, i, body, [*consts, *carry, *now], places)
            carry, rows[i] = scan.split_outputs(out)
        if not rows:
            empty = loop.equation.outputs[scan.carry :]
            return [*carry, *[_CONSTANT if is_client(v.at) else None for v in empty]]
        return [*carry, *[_stacked(column) for column in zip(*rows, strict=True)]]

    def while_(self, loop: Loop, inputs: list[Known]) -> list[Known]:
        assert isinstance(loop.control, While)
        cond_consts, body_consts, carry = loop.control.split(inputs)
        places = [v.at for v in loop.equation.outputs]
        cond, body = loop.bodies
        while True:  # until nothing new can happen
            self.inside(None, DECIDED, cond, [*cond_consts, *carry], None)
            out = self.inside(None, DECIDED, body, [*body_consts, *carry], places)
            before, carry = carry, _either(carry, out)
            if carry == _either(before, before):
                return carry

    def cond(self, loop: Loop, inputs: list[Known]) -> list[Known]:
        places = [v.at for v in loop.equation.outputs]
        results = [self.run(branch, inputs[1:], places) for branch in loop.bodies]
        return functools.reduce(_either, results)


def _either(a: list[Known], b: list[Known]) -> list[Known]:
    pairs = zip(a, b, strict=True)
    return [union(x, y) if _at_clients(x) and _at_clients(y) else None for x, y in pairs]


def _rows(x: Known, i: int) -> Known:
    return union(*(row(source, i) for source in x)) if _at_clients(x) else None


def _stacked(column: Sequence[Known]) -> Known:
    """Iterations as one array."""
    rows = list(filter(_at_clients, column))
    return [["stack", rows]] if rows else None


def _at_clients(x: Any) -> TypeGuard[list[Source]]:
    return isinstance(x, list)  # of the server there are constants, too


def _all_same(by: dict[str, list[Source]]) -> bool:
    first = next(iter(by.values()))
    return all(choices == first for choices in by.values())
