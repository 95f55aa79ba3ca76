"""A race between algorithms inside one training run.

The candidates train in the same rounds on the same clients, are judged by examples that they do not
train on, and are dropped when they lose (race_rounds.py).
"""

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
    """An algorithm that finds the best of several algorithms while it trains.

    All candidates train in the same rounds, on the same clients, with the same keys. Each client
    ranks the candidates' models by their loss on its own held-out examples. At each cut, the
    candidates with the best mean rank since halfway between the previous cut and this one remain.
    Meanwhile they train without the held-out examples; the last candidate goes on alone and trains
    on all of them. Ranks are used because the same clients judge all candidates, so that
    differences count rather than how hard the clients of a round are, and because a client with an
    enormous loss has one vote only.

    The last candidate is monitored: rates that were good during the race may be too large once more
    examples train. If the clients' training loss rises for a twentieth of all rounds, significantly
    (t-test, 1e-3) and by more than 10 % of the progress so far, training rolls back to the state
    before these rounds (schedules included) and halves the rates of the server (or of the clients,
    if the server has none). If the loss is as high at half the rates, the rates were not the cause
    and are restored. An algorithm that learns its rates has a guard of its own, and a race inside a
    race monitors its own winner; neither is monitored here. The final, incomplete twentieth is not
    checked.

    The history has `race.loss.NAME` and `race.rank.NAME` of the candidates that race, then
    `race.won.NAME`: 1, or 0 for a round of the winner that would have ended non-finite and was
    undone; and `race.pace.NAME`, the factor on its rates: 1, and half as much after each rollback.

    `fg.fit` tells the race the number of rounds; an extended run goes on with the winner. By hand,
    call `state = race.before_round(state, rounds_done, rounds)` before every round.

    Args:
        candidates: Algorithms by name: anything with `init` and `round`, also another race. A
            candidate is judged by its `state.params`, which for `fg.averaged(...)` is the average.
            Candidates that differ only in numbers (`algorithm.starting(...)`) are computed
            together.
        cuts: How many candidates remain after which fraction of all rounds, `{0.1: 3, 0.25: 1}`; by
            default one after a quarter. No cut happens before two rounds are done, because the
            first round judges the initial model that all share. For each family of names with a
            common prefix: `{0.1: {"adam": 2, "avgm": 1}, 0.25: 1}`.
        held_out: The rule that selects the examples that judge; None judges on the training
            examples.
        batch_size: How many examples a client judges at a time.
        changes: Hyperparameters that change after a fraction of all rounds, by candidate: `{0.5:
            {"adam": {"server.learning_rate": 0.01}}}`.
        incumbent: A candidate that stays until the last cut and then loses only to one that is
            significantly better (at level 1e-3, from the differences between rounds). It trains on
            all examples, even while they judge, so that if nothing is better, training is as if
            there had been no race.
        judge: What clients rank by instead of the loss that is minimized: a function `(params,
            batch)` with one number per example, lower is better, such as minus an accuracy.

    Returns:
        An algorithm.

    Raises:
        ArgumentError: If the candidates, cuts or changes do not fit together.

    Example:

        algorithm = fg.race({"avg": fg.fed_avg(loss), "adam": fg.fed_adam(loss)}, {0.25: 1})
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
