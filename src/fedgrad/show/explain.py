"""Compares the costs of all modes of differentiating a program, before anything runs."""

from dataclasses import dataclass
from typing import Any, overload

import jax

from fedgrad.ad.planner import CostModel
from fedgrad.ad.rules import MODES, Mode
from fedgrad.ad.transforms import Argnums, grad, jacobian
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.core.errors import ArgumentError, PlanError, public
from fedgrad.core.program import Program
from fedgrad.planning.plan import Plan, plan
from fedgrad.show.numbers import count, memory, price
from fedgrad.show.pen import in_a_page
from fedgrad.show.phases import Phases, phases
from fedgrad.show.terminal import notebook, plain

SHOWN: tuple[Mode, ...] = (*MODES, "auto")


@dataclass(frozen=True)
class Row:
    """One mode: its plan and price, or the reason why it is not available."""

    mode: str
    plan: Plan | None
    price: float | None
    allowed: bool
    problem: str = ""


@public
@dataclass(frozen=True, repr=False)
class Explanation:
    """A program's plan and a table of differentiation modes. Print it, or show it in a notebook."""

    program: Plan
    rows: tuple[Row, ...]
    cost: CostModel

    def __getitem__(self, mode: str) -> Row:
        rows = {row.mode: row for row in self.rows}
        if mode not in rows:
            raise ArgumentError.here(f"There is no mode {mode!r}.", mode, rows)
        return rows[mode]

    @property
    def reason(self) -> str:
        """The reason for the planner's choice, as text."""
        auto = self["auto"]
        if auto.plan is None or auto.price is None:
            return f"auto: {auto.problem}"
        rules = ", ".join(auto.plan.rules)
        parts = [
            f"auto takes {rules} for {price(auto.price)}."
            if rules
            else "No round is active, so a derivative sends nothing more."
        ]
        for row in self.rows[:3]:
            if row.plan is None or row.price is None:
                parts.append(f"{row.mode} is not possible: {row.problem}.")
            elif not row.allowed:
                parts.append(f"{row.mode} is not allowed: {row.problem}.")
            elif row.price > auto.price:
                parts.append(f"{row.mode} costs {price(row.price)}{_times(row, auto)}.")
            else:
                parts.append(f"{row.mode} costs the same.")
        return " ".join(parts)

    @property
    def server(self) -> str:
        """The server's memory and work in the mode that the planner chooses, estimated from the
        shapes."""
        plan = self["auto"].plan or self.program
        held, work = memory(plan.server_memory), count(plan.server_work)
        return f"The server holds {held} at once and does {work} operations."

    def __rich__(self) -> Any:
        from rich import box, table, text  # imported here because it is slow to import
        from rich.console import Group

        rows = table.Table(box=box.SIMPLE_HEAVY, title=f"differentiating {self.program.name}")
        for name in ("mode", "rules", "rounds", "down", "up", "again", "memory", "server", "price"):
            side: Any = "left" if name in ("mode", "rules", "again") else "right"
            rows.add_column(name, justify=side, no_wrap=name in ("mode", "price"))
        rows.add_row(*_cells("no grad", self.program, None), style="dim")
        for row in self.rows:
            style = "bold green" if row.mode == "auto" else "" if row.allowed else "dim red"
            rows.add_row(*_cells(row.mode, row.plan, row), style=style)
        note = (
            "scalars (bytes) per client; again: who is addressed in more than one round; memory: "
            "of a client between rounds; server: what it holds at once (estimated)"
        )
        return Group(
            rows, text.Text(self.reason), text.Text(self.server), text.Text(note, style="dim")
        )

    def __str__(self) -> str:
        return plain(str(self.program), self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<div>{in_a_page(self.program.draw())}{notebook(self)}</div>"


@overload
def explain(program: Algorithm, *args: Any, **kwargs: Any) -> Phases: ...
@overload
def explain(program: Program, *args: Any, **kwargs: Any) -> Explanation: ...
@public
def explain(
    program: Any,
    *args: Any,
    argnums: Argnums = 0,
    cost: CostModel | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Explanation | Phases:
    """Show the graph of a program and the cost of its derivative in each mode. Nothing is run.

    For an algorithm, show instead what its training sends and how much work a client does, phase by
    phase: `fg.explain(algorithm, params, cohort, rounds=200)`.

    Args:
        program: A program or an algorithm.
        *args: The arguments of the program; for an algorithm `params` and `cohort`.
        argnums: The arguments with respect to which the program is differentiated.
        cost: Prices and limits for the planner. Default: `fg.CostModel()`.
        has_aux: Whether the program returns a pair of the result and auxiliary data.
        **kwargs: Keyword arguments of the program; for an algorithm `rounds`.

    Returns:
        An `fg.Explanation` of a program, or the `fg.Phases` of an algorithm.
    """
    if isinstance(program, Algorithm):
        if (argnums, cost, has_aux) != (0, None, False):
            raise ArgumentError.here(
                "fg.explain of an algorithm is of its training, which is not differentiated: leave "
                "out argnums, cost and has_aux. For a derivative, explain algorithm.round."
            )
        return phases(program, *args, **kwargs)
    cost = cost or CostModel()
    primal = plan(program, *args, **kwargs)
    scalar = _is_scalar(primal, has_aux)
    derive = grad if scalar else jacobian
    rows = []
    for mode in SHOWN:
        try:
            derived = derive(program, argnums, cost if mode == "auto" else mode, has_aux)
            row = plan(derived, *args, **kwargs)
        except PlanError as error:
            rows.append(Row(mode, None, None, False, str(error)))
            continue
        allowed = cost.allows(row, primal)
        again = cost.asked_more(row, primal)
        problem = ""
        if not allowed:
            problem = (
                f"it asks {', '.join(again)} again"
                if again and not cost.readdress
                else "clients would have to remember too much"
            )
        rows.append(Row(mode, row, cost.price(row), allowed, problem))
    return Explanation(primal, tuple(rows), cost)


def _is_scalar(primal: Plan, has_aux: bool) -> bool:
    shapes = [v.aval.shape for v in primal.graph.outputs]
    if has_aux:
        tree = jax.tree.unflatten(primal.outputs, shapes)
        shapes = jax.tree.leaves(tree[0], is_leaf=lambda x: isinstance(x, tuple))
    return len(shapes) == 1 and shapes[0] == ()


def _cells(name: str, row: Plan | None, source: Row | None) -> list[str]:
    if row is None:
        return [name, *["-"] * 8]
    full = source or Row(name, row, None, True)
    (down, up), (down_bytes, up_bytes) = row.scalars, row.bytes
    return [
        name,
        ", ".join(row.rules) or "-",
        str(row.rounds),
        f"{down:,} ({memory(down_bytes)})",
        f"{up:,} ({memory(up_bytes)})",
        ", ".join(row.readdressed) or "nobody",
        memory(max(row.client_memory.values(), default=0)),
        memory(row.server_memory),
        "" if full.price is None else price(full.price) + ("" if full.allowed else " ✗"),
    ]


def _times(row: Row, auto: Row) -> str:
    assert row.price is not None and auto.price is not None
    return f" ({row.price / auto.price:.1f}x)" if auto.price > 0 else ""
