"""The audit of a plan: lists everything that leaves clients, which can only be sums."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from fedgrad.core.errors import public
from fedgrad.core.graph import Graph, Value, everywhere, exchanges, is_client
from fedgrad.core.primitives import NOWHERE, scope, where
from fedgrad.planning.exposure import can_dominate, traits


@dataclass(frozen=True)
class Release:
    """One value that clients add into a sum.

    `raw`: the value is one of the client's own arguments, at most moved, picked, added or scaled.
    `picked`: it depends on the client's index, so that the sum can consist of one client's value.
    `dominated`: no bound was found, so that one client can give the sum any value.
    """

    round: int
    placement: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    source: str  # its name (`jax.named_scope`), and the user's line that made it
    clients: int  # number of clients in the sum
    raw: bool = False
    picked: bool = False
    dominated: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that deserve a reader's attention."""
        said = {
            "a raw argument of the client": self.raw,
            "depends on which client it is": self.picked,
            "one client can dominate it": self.dominated,
        }
        return tuple(words for words, true in said.items() if true)

    def __str__(self) -> str:
        marks = f" ({'; '.join(self.marks)})" if self.marks else ""
        return (
            f"round {self.round}: sum over {self.placement} ×{self.clients} of "
            f"{self.dtype}{list(self.shape)}, {self.source}{marks}"
        )


@dataclass(frozen=True)
class Kept:
    """A result that stays at clients. A simulation returns it, stacked over clients; with nodes it
    stays there, and the server has a handle."""

    placement: str
    shape: tuple[int, ...]
    dtype: str
    result: str  # its path in the result

    def __str__(self) -> str:
        return f"stays at {self.placement}: {self.dtype}{list(self.shape)}, {self.result}"


@public
@dataclass(frozen=True, repr=False)
class Audit:
    """Everything that leaves clients. How much a sum reveals about one client cannot be read off a
    program: `releases` are marked where it is evident that it may be much. `kept` are the results
    that stay at clients."""

    releases: tuple[Release, ...]
    findings: tuple[str, ...]
    kept: tuple[Kept, ...] = ()

    @property
    def only_sums(self) -> bool:
        """Whether everything leaves in a sum with the values of at least one other client."""
        return not self.findings

    def __str__(self) -> str:
        lines = [str(release) for release in self.releases] or ["nothing leaves any client"]
        kept = map(str, self.kept)
        return "\n".join([*lines, *kept, *(f"! {finding}" for finding in self.findings)])

    __repr__ = __str__


def audit(graph: Graph, clients: Mapping[str, int], outputs: Any) -> Audit:
    releases = []
    for number, x, _ in exchanges(graph):
        known = traits(x, graph.indices.values())
        for sent, total in x.up:
            trait = known[sent]
            releases.append(
                Release(
                    number,
                    x.placement,
                    tuple(sent.aval.shape),
                    str(sent.aval.dtype),
                    sent.size,
                    _what(sent, total),
                    clients[x.placement],
                    trait.raw,
                    trait.indexed,
                    can_dominate(sent, trait),
                )
            )
    alone = [
        f"{placement} is one client, so its sum is that client's own value"
        for placement in dict.fromkeys(r.placement for r in releases)
        if clients[placement] == 1
    ]
    return Audit(tuple(releases), tuple([*_leaks(graph), *alone]), _kept(graph, outputs))


def _what(sent: Value, total: Value) -> str:
    """Describe what a client adds, by the scope of the value or of its sum, and by the user's
    line."""
    name = scope(total.origin.source) or scope(sent.origin.source)
    if not sent.origin.primitive:
        return f"{name}, {sent.origin}" if name and sent.origin.name else str(sent.origin)
    line = where(sent.origin.source, total.origin.source)
    return line if not name else name if line == NOWHERE else f"{name}, {line}"


def _kept(graph: Graph, outputs: Any) -> tuple[Kept, ...]:
    """Return the results that stay at clients, each by its path in the result."""
    numbered = jax.tree.unflatten(outputs, range(len(graph.outputs)))
    named, _ = jax.tree_util.tree_flatten_with_path(numbered)
    found = [(path, graph.outputs[number]) for path, number in named]
    return tuple(
        Kept(v.at, tuple(v.aval.shape), str(v.aval.dtype), f"result{jax.tree_util.keystr(path)}")
        for path, v in found
        if is_client(v.at)
    )


def _leaks(graph: Graph) -> list[str]:
    """Return server work that reads a client's value other than through a sum. There must be none:
    the check refuses such programs, and this looks at what is actually executed."""
    return [
        f"the server reads {v.origin} of {v.at} ({where(equation.source)})"
        for part in everywhere(graph)
        for equation in part.local
        for v in equation.inputs
        if is_client(v.at)
    ]
