"""What a race costs: a round of K candidates against K rounds of one, and a round of the winner
against a round without a race.

The workload is `ragged`, as for self-tuning, on one device; and the EMNIST CNN of 1.2 million
parameters, where candidates follow one another on a client. Candidates are judged by a held-out
fifth of the examples: they train on the others, so that K rounds of one that does the same
(`fg.holding_out`), each with a pass for the loss of those examples, are what we compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import report as results
from timing import isolated, take_turns
from workloads import BATCH, LR, cohort, first_weights, population, unflatten

import fedgrad as fg
from sections.tuning import per_example

K = 4


def run(quick: bool) -> dict[str, Any]:
    """Each model in a process of its own."""
    repetitions = 4 if quick else 15
    return {
        "ragged": isolated("sections.race", "ragged", repetitions=repetitions),
        "emnist": isolated("sections.race", "emnist", repetitions=2 if quick else 5),
    }


def ragged(repetitions: int) -> dict[str, Any]:
    """Softmax regression, vectorized over candidates."""
    data = population("ragged")
    clients = fg.population([dict(zip("xy", data.client(c), strict=True)) for c in range(1000)])
    base = fg.fed_avgm(per_example, fg.local_training(LR["ragged"], batch_size=BATCH["ragged"]))
    params = jax.tree.map(jnp.asarray, unflatten("ragged", first_weights("ragged")))
    cohorts = [clients.select(cohort("ragged", i)) for i in range(8)]
    return measured(base, params, cohorts, repetitions)


def emnist(repetitions: int) -> dict[str, Any]:
    """The paper's CNN, one candidate after another."""
    task = fg.tasks.task("emnist", size="paper")
    base = fg.fed_avgm(task.loss, fg.local_training(0.03, batch_size=20))
    cohorts = [task.train.sample(jax.random.key(i), 4) for i in range(4)]
    return measured(base, task.init(jax.random.key(0)), cohorts, repetitions)


def measured(
    base: fg.Algorithm, params: Any, cohorts: list[Any], repetitions: int
) -> dict[str, Any]:
    """Medians, and ratios of neighbors in time."""
    names = [f"rate {i}" for i in range(K)]
    rates = [base.hyper["client"]["learning_rate"] * (1 + 0.1 * i) for i in range(K)]
    candidates = {
        n: base.starting({"client.learning_rate": r}) for n, r in zip(names, rates, strict=True)
    }
    race, key = fg.race(candidates, {1.0: 1}), jax.random.key(0)
    one = race.before_round(race.init(params), 2, 2)  # the winner alone, as it is watched
    assert len(one.candidates) == 1
    held_out = fg.HeldOut()
    alone = fg.holding_out(base, held_out)
    judge = fg.GradientCohort("same", held_out=held_out).program(base.loss)
    now = {"i": 0}

    def turn() -> None:
        """The next cohort, for all: some have more examples."""
        now["i"] += 1

    # As fg.fit passes them: made arrays once, not in every round.
    given = {n: jax.tree.map(jnp.asarray, one.hyper) for n, one in candidates.items()}
    plain_hyper = jax.tree.map(jnp.asarray, base.hyper)

    def together() -> Any:
        cohort = cohorts[now["i"] % len(cohorts)]
        return jax.block_until_ready(race.round(start, given, cohort, key))

    def in_turn() -> Any:
        cohort = cohorts[now["i"] % len(cohorts)]
        for name in names:
            jax.block_until_ready(alone.round(single, given[name], cohort, key))
            jax.block_until_ready(judge(single.params, None, cohort))

    def winner() -> Any:
        cohort = cohorts[now["i"] % len(cohorts)]
        return jax.block_until_ready(race.round(one, given, cohort, key))

    def plain() -> Any:
        cohort = cohorts[now["i"] % len(cohorts)]
        return jax.block_until_ready(base.round(single, plain_hyper, cohort, key))

    start, single = race.before_round(race.init(params), 0, 2), base.init(params)
    calls: dict[str, Callable[[], Any]] = {
        "race": together,
        "in turn": in_turn,
        "winner": winner,
        "plain": plain,
    }
    times = take_turns(calls, repetitions, turn=turn)
    return {
        "times": {name: found.summary() for name, found in times.items()},
        "race": times["race"].ratio(times["in turn"]),
        "winner": times["winner"].ratio(times["plain"]),
    }


TITLES = {"ragged": "ragged, softmax regression", "emnist": "EMNIST CNN, 1.2 million parameters"}


def report(data: dict[str, Any]) -> str:
    """A table with a row for each model."""
    rows = [
        [
            TITLES[name],
            f"{data[name]['times']['race']['ms']:,.1f}",
            f"{data[name]['times']['in turn']['ms']:,.1f}",
            f"{data[name]['race']['wall']:.2f} ({data[name]['race']['cpu']:.2f})",
            f"{data[name]['winner']['wall']:.2f} ({data[name]['winner']['cpu']:.2f})",
        ]
        for name in TITLES
        if name in data
    ]
    header = [
        "",
        f"a round of {K} candidates, ms",
        f"{K} rounds of one, ms",
        "ratio (of processor time)",
        "the winner's round, of one without a race",
    ]
    return "\n\n".join([(__doc__ or "").split("\n\n", 1)[1], results.table(header, rows)])
