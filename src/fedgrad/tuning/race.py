"""A race inside one training: candidates are trained in the same rounds by the same clients, judged
by examples that they do not train on, and dropped when they lose (race_rounds.py)."""

from collections.abc import Mapping
from typing import Any

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.metrics import Metrics
from fedgrad.algorithms.objective import Loss
from fedgrad.algorithms.settings import settings_of_race
from fedgrad.clients.held_out import A_FIFTH, HeldOut
from fedgrad.core.errors import ArgumentError, known_arguments
from fedgrad.core.graph import CLIENTS
from fedgrad.core.program import Program
from fedgrad.core.types import Hyper, Key
from fedgrad.tuning.cuts import Cuts
from fedgrad.tuning.race_arguments import read_candidates, read_changes, round_signature
from fedgrad.tuning.race_rounds import Race
from fedgrad.tuning.race_state import RaceState


@known_arguments()
def race(
    candidates: Mapping[str, Algorithm],
    cuts: Mapping[Any, int | Mapping[str, int]] | None = None,
    held_out: HeldOut | None = A_FIFTH,
    batch_size: int = 50,
    changes: Mapping[Any, Mapping[str, Mapping[str, Any]]] | None = None,
    incumbent: str | None = None,
    judge: Loss | None = None,
) -> Algorithm:
    """An algorithm that finds out, while it trains, which of several algorithms is the best.

    All `candidates`, by name, are trained in the same rounds, by the same clients, with the same
    keys. `cuts`: after which part of all rounds how many are left, `{0.1: 3, 0.25: 1}`; by default
    one of them after a quarter, and never before two rounds are done: the first one judges what all
    begin with. How many of each family, whose names begin alike: `{0.1: {"adam": 2, "avgm": 1},
    0.25: 1}`. Clients judge: each ranks the candidates' models by their loss on
    its own `held_out` examples, and those with the best mean rank in the second half of what there
    is between two cuts are left; meanwhile they are trained without these examples. The last one
    goes on alone, with all of them. None: judged by what they train on.

    The loss of who goes on alone is monitored: rates that were good while they raced may be too
    large when more examples train. If the clients' training loss rises for a twentieth of all
    rounds, significantly (t-test, 1e-3) and by more than 10 % of the progress so far, training goes
    back to where it was before these (its schedules, too), with half the rates of its server (of
    its clients, if that has none). If it is as bad then, the rates were not the reason, and are
    restored. What learns its rates has a guard of its own, and a race in the race monitors its own
    winner; neither is monitored here. The final, incomplete twentieth is not checked.

    Ranks, because the same clients judge all candidates, so that differences count and not how
    hard the clients of a round are; and because one client with an enormous loss has one voice.

    A candidate is anything with `init` and `round`, also another race; the model by which it is
    judged is its `state.params`, so that of `fg.averaged(...)` is the average. Those that differ
    only in numbers (`algorithm.starting(...)`) are computed together.

    `judge`: by what clients rank instead of the loss that is minimized: a function `(params,
    batch)` with one number per example, of which less is better, such as minus an accuracy.

    `changes`: hyperparameters that change after a part of all rounds, by candidate:
    `{0.5: {"adam": {"server.learning_rate": 0.01}}}`. `incumbent`: a candidate that stays until the
    last cut, and then gives way only to one that is better by more than chance explains, once in a
    thousand times, by what they differ in from round to round. It trains on all examples, also
    while they judge, so that where nothing is better training is as if there had been no race.

    A history has `race.loss.NAME` and `race.rank.NAME` of those that race, then `race.won.NAME`: 1,
    or 0 in a round of the winner that would have ended non-finite, and was undone; and
    `race.pace.NAME`, what its rates are multiplied with: 1, and half after it went back.

    `fg.fit` tells it how many rounds there are; extended, a run goes on with the winner. By hand,
    call `state = race.before_round(state, rounds_done, rounds)` before every round.
    """
    candidates = read_candidates(candidates)
    game = Race(
        candidates,
        Cuts({0.25: 1} if cuts is None else cuts, [*candidates], incumbent),
        held_out,
        batch_size,
        read_changes(changes or {}, candidates),
        incumbent,
        judge,
    )
    executors = {one.round.executor for one in candidates.values()}
    if len(executors) > 1:
        raise ArgumentError.here(
            "fg.race: its candidates run on different executors, but they are one round. Put the "
            "race on one: fg.race(...).on(executor)."
        )

    def round(
        state: RaceState, hyper: Hyper, cohort: Any, key: Key, **further: Any
    ) -> tuple[RaceState, Metrics]:
        return game.round(state, hyper, cohort, key, **further)

    round.__name__ = "race"
    round.__signature__ = round_signature(game.cohorts)  # type: ignore[attr-defined]
    places = {n: one.round.placements[n] for one in candidates.values() for n in one.cohorts}
    return Algorithm(
        game.init,
        Program(round, {"cohort": CLIENTS, **places}, executors.pop()),
        {name: one.hyper for name, one in candidates.items()},
        game.loss,
        game.cohorts,
        before_round=game.before_round,
        settings=settings_of_race(candidates),
    )
