"""Estimates the traffic and the client work of a training run before it starts."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.core.errors import known_arguments, public, require_whole
from fedgrad.core.types import Params
from fedgrad.planning.plan import Plan, plan
from fedgrad.show.numbers import count, memory
from fedgrad.show.terminal import notebook, plain


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds that run the same program."""

    first: int
    last: int
    candidates: tuple[str, ...]  # the count is exact; training decides which ones survive
    plan: Plan

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return self.last - self.first + 1

    @property
    def bytes(self) -> int:
        """The bytes that a client receives and sends in one round."""
        return sum(self.plan.bytes)


@public
@dataclass(frozen=True, repr=False)
class Phases:
    """The phases of a training run. Print it, or show it in a notebook."""

    name: str
    phases: tuple[Phase, ...]

    @property
    def rounds(self) -> int:
        """The total number of rounds."""
        return sum(phase.rounds for phase in self.phases)

    @property
    def bytes(self) -> int:
        """The bytes received and sent by a client that takes part in every round."""
        return sum(phase.rounds * phase.bytes for phase in self.phases)

    @property
    def times(self) -> float:
        """The total bytes, as a multiple of running all rounds with the program of the last
        phase."""
        return self.bytes / (self.rounds * self.phases[-1].bytes)

    def __rich__(self) -> Any:
        from rich import box, table, text  # imported here because it is slow to import
        from rich.console import Group

        rows = table.Table(box=box.SIMPLE_HEAVY, title=f"training with {self.name}")
        for name in ("rounds", "candidates", "down", "up", "work", "server"):
            rows.add_column(name, justify="left" if name == "rounds" else "right")
        for phase in self.phases:
            down, up = phase.plan.bytes
            rows.add_row(
                f"{phase.first} to {phase.last}",
                str(len(phase.candidates) or "-"),
                memory(down),
                memory(up),
                count(phase.plan.client_work),
                memory(phase.plan.server_memory),
            )
        total = f"{memory(self.bytes)} for a client that takes part in all {self.rounds} rounds"
        if len(self.phases) > 1:
            total += f", {self.times:.2f} times a training of the last phase alone"
        note = (
            "down, up: what a client of a round receives and sends; work: operations of the client "
            "with the most examples; server: what it holds at once (both estimated)"
        )
        return Group(rows, text.Text(f"{total}."), text.Text(note, style="dim"))

    def __str__(self) -> str:
        return plain("", self).lstrip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return notebook(self)


@known_arguments()
def phases(algorithm: Algorithm, params: Params, cohort: Any, rounds: int) -> Phases:
    """Return the phases of a training run with cohorts like this one. Nothing is trained: where a
    race drops candidates, the ones named first are assumed to stay."""
    require_whole("rounds", rounds)
    state, hyper, key = algorithm.init(params), algorithm.hyper, jax.random.key(0)
    begins: list[tuple[int, Any]] = []  # the first round of each phase, and the state there
    for round in range(1, rounds + 1):
        if algorithm.before_round is not None:
            state = algorithm.before_round(state, round - 1, rounds)
        tree: Any = jax.tree.structure(state)
        if not begins or tree != jax.tree.structure(begins[-1][1]):
            begins.append((round, state))
    ends = [*(first - 1 for first, _ in begins[1:]), rounds]
    more = dict.fromkeys(algorithm.cohorts, cohort)
    if algorithm.client_init is not None:
        one = algorithm.client_init(state.params, clients := len(cohort))
        each = jax.tree.map(lambda x: jnp.broadcast_to(x, (clients, *jnp.shape(x))), one)
        more["client_state"] = each
    return Phases(
        algorithm.round.name,
        tuple(
            Phase(
                first,
                last,
                _candidates(state),
                plan(algorithm.round, state, hyper, cohort, key, **more),
            )
            for (first, state), last in zip(begins, ends, strict=True)
        ),
    )


def _candidates(state: Any) -> tuple[str, ...]:
    while not hasattr(state, "candidates"):
        inside = [getattr(state, name) for name in ("inner", "now") if hasattr(state, name)]
        if not inside:
            return ()
        state = inside[0]
    return tuple(state.candidates)
