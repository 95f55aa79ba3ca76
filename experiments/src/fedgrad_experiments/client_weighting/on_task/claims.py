"""Checks the paper's claim about learned weighting on its five tasks against these results."""

from collections.abc import Mapping

from fedgrad_experiments.client_weighting.on_task.outcome import (
    JUDGED,
    SCALE,
    Pair,
    alike,
    compared,
    diverged,
)
from fedgrad_experiments.client_weighting.on_task.shown import TITLES, Unit, versus
from fedgrad_experiments.experiment import PAPER
from fedgrad_experiments.paired import LEVEL, Compared, least_p
from fedgrad_experiments.results import Claim, Results


def claims(results: Results) -> list[Claim]:
    """Return the claim that there is no significant difference, and how large one could still
    be."""
    task = results.facts["task"]
    where = f"{task}, as on all five tasks of the paper" if task in PAPER else task
    statement = f"On {where}, learned weighting makes no significant difference."
    if task not in PAPER:
        statement += " (The paper says so of other tasks.)"
    found = compared(results, "metric")
    holds, why = _verdict(results, found)
    evidence = " ".join([why, _numbers(results, found), _lost(results)]).strip()
    return [Claim(statement, holds, evidence, too_small=holds is None and not alike(results))]


def _verdict(results: Results, found: Mapping[Pair, Compared]) -> tuple[bool | None, str]:
    least = least_p(min(len(found[pair].differences) for pair in JUDGED), len(JUDGED))
    seeds = results.settings["seeds"]
    if alike(results):
        n = results.facts["examples"]["least"]
        return None, (
            f"Every client has {n} examples, so q has no effect here (nor in the paper, where "
            "that is so): what differs is rounding."
        )
    if least >= LEVEL:
        return None, (
            f"{seeds} seeds cannot show a difference, however large: the corrected p is at least "
            f"{least:.2g}."
        )
    some = [pair for pair in JUDGED if found[pair].significant]
    told = "; ".join(versus(pair) for pair in some)
    return not some, f"Significant: {told}." if some else ""


def _numbers(results: Results, found: Mapping[Pair, Compared]) -> str:
    unit = Unit.of(results)

    def one(pair: Pair, p: str) -> str:
        its = found[pair]
        low, high = its.interval
        return (
            f"{versus(pair)} {unit.signed(its.mean)} ({unit.signed(low)} to {unit.signed(high)}), "
            f"p {p}"
        )

    judged = "; ".join(one(pair, f"{found[pair].corrected:.2g}") for pair in JUDGED)
    return (
        f"Mean difference in {unit.name} over {results.settings['seeds']} seeds, its 95 % "
        f"interval, and p corrected for {len(JUDGED)} comparisons: {judged}. For scale, "
        f"{one(SCALE, f'{found[SCALE].p:.2g}')}."
    )


def _lost(results: Results) -> str:
    counts = {curve: int(diverged(results, curve).sum()) for curve in results.facts["curves"]}
    told = ", ".join(f"{n} of {TITLES[curve]}" for curve, n in counts.items() if n)
    return f"Diverged: {told}." if told else ""
