"""What a plan sends, how often, and what clients keep: read off its rounds and loops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedgrad.core.graph import Equation, Exchange, Graph, Round, Value, fold


@dataclass(frozen=True)
class Traffic:
    """What one client of a placement receives and sends in one round."""

    round: int
    placement: str
    down: int  # scalars
    up: int
    down_bytes: int
    up_bytes: int
    times: int | None = 1  # how often this round happens; None where the data decide


def exchanges(graph: Graph) -> list[tuple[int, Exchange, int | None]]:
    """Every exchange that sends something: (number of its round, the exchange, how often)."""
    return fold(graph, _numbered)


Numbered = list[tuple[int, Exchange, int | None]]


def _numbered(graph: Graph, inside: list[list[Numbered]]) -> Numbered:
    found: Numbered = []
    number = 1
    for equation, bodies in zip(graph.equations, inside, strict=True):
        if isinstance(equation, Round):
            found += [(number, x, 1) for x in equation.exchanges if x.speaks]
            number += equation.speaks
        for body in bodies:
            found += [(number - 1 + n, x, _product(t, equation.times)) for n, x, t in body]
            number = max([number, *(n + 1 for n, _, _ in found)])
    return found


def _product(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b


def total(
    graph: Graph, measure: Callable[[Exchange], float], unknown: float = 1, together: bool = False
) -> float:
    """A measure of exchanges, added up over the whole run (`repeated`). `together`: the exchanges
    of one round count as one."""

    def of(graph: Graph, inside: list[list[float]]) -> float:
        result: float = 0
        for equation, bodies in zip(graph.equations, inside, strict=True):
            if isinstance(equation, Round):
                found = [float(measure(x)) for x in equation.exchanges]
                result += max(found, default=0) if together else sum(found)
            elif bodies:
                result += repeated(equation, bodies, unknown)
        return result

    return fold(graph, of)


def repeated(loop: Equation, bodies: Sequence[float], unknown: float = 1) -> float:
    """What is measured in the bodies of a loop, over all iterations: as often as it runs (`unknown`
    where the data decide), of a cond the branch with the most."""
    if loop.kind == "cond":
        return max(bodies)
    once = sum(bodies)
    return once * (unknown if loop.times is None else loop.times) if once else 0


def client_memory(graph: Graph, placement: str) -> int:
    """Bytes that a client keeps from one round for a later one, at most."""

    def of(graph: Graph, inside: list[list[int]]) -> int:
        made: dict[Value, int] = {}
        last_read: dict[Value, int] = {}
        in_loops: list[int] = []
        pairs = [(e, b) for e, b in zip(graph.equations, inside, strict=True) if e.bodies]
        for i, (equation, bodies) in enumerate(pairs):
            mine = [v for v in equation.outputs if v.at == placement]
            last_read.update((v, i) for v in equation.inputs)
            made.update((v, i) for v in mine)
            # What a client carries from one iteration to the next, and keeps within one.
            carried = 0 if equation.kind == "cond" or not bodies else sum(v.bytes for v in mine)
            in_loops.append(max(bodies, default=0) + carried)
        kept = [
            sum(v.bytes for v, start in made.items() if start <= i < last_read.get(v, -1))
            for i in range(len(pairs))
        ]
        return max((a + b for a, b in zip(kept, in_loops, strict=True)), default=0)

    return fold(graph, of)
