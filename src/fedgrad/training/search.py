"""Tuning by trials, to compare self-tuning with: random search, grids and successive halving.

Trials run side by side, as many at once as fit into memory, on the same clients in the same order.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.side_by_side import side_by_side
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError, known_arguments, known_fields, require_whole
from fedgrad.core.types import Hyper, Key, Params
from fedgrad.show.numbers import number, plural
from fedgrad.training.config import judged_by
from fedgrad.training.course import Course, usual_key
from fedgrad.training.evaluation import Evaluate, Evaluation, Evaluations
from fedgrad.training.first import (
    BELONGS_ELSEWHERE,
    require_algorithm,
    require_evaluations,
    require_model,
)
from fedgrad.training.interrupt import Interrupts
from fedgrad.training.progress import display
from fedgrad.training.run_folder import RunFolder
from fedgrad.training.rungs import Climb
from fedgrad.training.search_folder import SearchFolder, Standing
from fedgrad.training.space import Draws, combined, drawn, with_trial


@dataclass(frozen=True, repr=False)
class Search:
    """What a search has tried, and what it found."""

    tried: dict[str, np.ndarray]  # by dotted name, one value for each trial
    scores: np.ndarray  # of each trial, where it ended; NaN where it diverged
    rounds: np.ndarray  # for how long each trial was trained
    best: int  # the trial with the best score
    hyper: Hyper  # its hyperparameters
    params: Params  # its model
    standing: Standing = field(repr=False)  # the same for a report, with what was asked for

    @property
    def score(self) -> float:
        """The score of the best trial."""
        return float(self.scores[self.best])

    def __repr__(self) -> str:
        values = ", ".join(f"{n} {number(float(v[self.best]))}" for n, v in self.tried.items())
        finite = int(np.isfinite(self.scores).sum())
        after = plural(int(self.rounds[self.best]), "round")
        heading = f"Search of {plural(len(self.scores), 'trial')}, {finite} of which ended well"
        if not finite:  # which is best is by chance
            return f"{heading}\n  {self.standing.objective} was not finite; try other ranges"
        return (
            f"{heading}\n"
            f"  best: trial {self.best} with {values}\n"
            f"  score: {self.standing.objective} {number(self.score)} after {after}"
        )


@known_fields
@dataclass(frozen=True)
class Trials:
    """How many trials there are, and who goes on.

    The best has the lowest `objective` (a metric of the evaluation), or with `maximize` the
    highest. With `rungs`, that is successive halving: at each rung but the last only the best
    `keep` of them go on (a third, if nothing is said), and it is 1 / `keep` times as long as the
    one before. A grid has as many as there are combinations: `fg.Trials(objective="accuracy")`.
    """

    number: int | None = None
    objective: str = "loss"
    maximize: bool = False
    rungs: int = 1
    keep: float | None = None

    def __post_init__(self) -> None:
        if self.number is not None:
            require_whole("trials", self.number)
        require_whole("rungs", self.rungs)
        if not isinstance(self.objective, str):
            raise ArgumentError.here(
                f"fg.Trials(objective={self.objective!r}): name a metric of the evaluation, such "
                'as "loss".'
            )
        if self.keep is not None and (self.rungs == 1 or not 0 < self.keep < 1):
            raise ArgumentError.here(
                f"fg.Trials(rungs={self.rungs!r}, keep={self.keep!r}): keep a part between 0 and 1 "
                "of the trials, at each of several rungs."
            )

    def check(self, metrics: Iterable[str] | None) -> None:
        """Refuse an evaluation that does not give the objective, as far as it is known."""
        if metrics is not None and self.objective not in metrics:
            message = f"evaluate= gives no metric {self.objective!r}."
            raise ArgumentError.here(message, self.objective, metrics)

    def ends(self, rounds: int) -> list[int]:
        """For how long the trials are trained that reach each of the rungs."""
        return [
            max(1, round(rounds * self.part ** (self.rungs - 1 - i))) for i in range(self.rungs)
        ]

    @property
    def part(self) -> float:
        """Of the trials at a rung, those that go on."""
        return 1 / 3 if self.keep is None else self.keep

    def best(self, scores: np.ndarray) -> np.ndarray:
        """The trials from the best to the worst; what diverged comes last, whatever is wanted."""
        signed = -scores if self.maximize else scores
        return np.argsort(np.where(np.isfinite(scores), signed, np.inf), kind="stable")


class Training(TypedDict, total=False):
    """How trials are trained, as for `fg.fit`."""

    params: Required[Params]
    rounds: Required[int]
    cohort_size: int | None
    key: Key | None
    progress: Any


@known_arguments(BELONGS_ELSEWHERE, further=Training)
def random_search(
    algorithm: Algorithm,
    clients: Population,
    space: Mapping[str, Draws],
    *,
    trials: int | Trials,
    evaluate: Evaluate,
    out: str | os.PathLike[str] | RunFolder | None = None,
    **training: Unpack[Training],
) -> Search:
    """Train with hyperparameters drawn at random, and keep the best.

    `space`: what is drawn, by dotted name, `{"server.learning_rate": fg.log_uniform(1e-3, 10)}`.
    `trials`: how many; `fg.Trials` says what is best, and gives up on bad ones early. `params`,
    `rounds` (how long the last ones are trained), `cohort_size`, `key` and `progress` are those of
    `fg.fit`; `evaluate` is asked at the end, and at each rung. `out` is a folder, or a
    `fg.run_folder`, from which a search that was interrupted goes on.
    """
    require_algorithm(algorithm)
    wanted = trials if isinstance(trials, Trials) else Trials(trials)
    if wanted.number is None:
        raise ArgumentError.here("How many trials are drawn? Write trials=fg.Trials(8, ...).")
    tried = drawn(algorithm, space, wanted.number, usual_key(training.get("key")))
    return _search(algorithm, clients, space, tried, wanted, evaluate, out, training)


@known_arguments(BELONGS_ELSEWHERE, further=Training)
def grid_search(
    algorithm: Algorithm,
    clients: Population,
    space: Mapping[str, Any],
    *,
    trials: Trials = Trials(),
    evaluate: Evaluate,
    out: str | os.PathLike[str] | RunFolder | None = None,
    **training: Unpack[Training],
) -> Search:
    """Train with all combinations of hyperparameters, and keep the best.

    `space`: the values of each, by dotted name, `{"client.learning_rate": [0.01, 0.1]}`, or as
    `fg.choice([...])`. `trials` says what is best, and gives up on bad ones early:
    `fg.Trials(objective="accuracy", maximize=True)`. All others are as for `fg.random_search`.
    """
    require_algorithm(algorithm)
    tried = combined(algorithm, space)
    number = len(next(iter(tried.values())))
    if not isinstance(trials, Trials) or trials.number not in (None, number):
        got = trials.number if isinstance(trials, Trials) else trials
        raise ArgumentError.here(
            f"trials={got!r}, but this grid has {number}. Leave the number out: "
            'trials=fg.Trials(objective="loss").'
        )
    wanted = replace(trials, number=number)
    return _search(algorithm, clients, space, tried, wanted, evaluate, out, training)


def _search(
    algorithm: Algorithm,
    clients: Population,
    space: Mapping[str, Any],
    tried: dict[str, jax.Array],
    wanted: Trials,
    evaluate: Evaluate,
    out: Any,
    training: Training,
) -> Search:
    params, rounds, trials = training["params"], training["rounds"], wanted.number or 0
    require_whole("rounds", rounds)
    require_model(params)
    together = side_by_side(algorithm, with_trial(algorithm.hyper, tried, slice(None)))
    with ExitStack() as stack:
        asked = (training.get("cohort_size"), training.get("key"))
        course = Course.of(together, clients, *asked)
        stack.enter_context(closing(course))
        evaluations = Evaluations.of({"": evaluate}).like(course.algorithm.round, stacked=False)
        _require_scores(evaluations, params, wanted)
        _require_starts(algorithm, tried, params)
        settings: dict[str, Any] = {"cohort_size": course.cohort_size}
        if out is not None:
            settings["evaluations"] = judged_by(evaluations)
        kept = SearchFolder.of(out, settings)
        shown = display(training.get("progress", True), 0, rounds, course.clients * trials)
        stack.callback(shown.close)
        climb = Climb(course, tried, wanted.best, kept, shown, stack.enter_context(Interrupts()))
        climb.begin(params)
        ends = wanted.ends(rounds)
        scales = {n: getattr(one, "logarithmic", None) for n, one in space.items()}
        logarithmic = {name: found for name, found in scales.items() if found is not None}
        told = (wanted.objective, wanted.maximize, ends, logarithmic)
        stack.enter_context(kept.lock())
        kept.begin(climb.standing(*told))
        for begin, end in zip([0, *ends], ends, strict=False):
            climb.train(begin, end)
            climb.judge(lambda models: _scores(evaluations.by_name[""], models, wanted))
            left = 0 if climb.rung == len(ends) else max(1, round(len(climb.alive) * wanted.part))
            climb.drop(left)
            kept.write(climb.standing(*told))
    best, model = climb.best
    values = {name: np.asarray(v) for name, v in tried.items()}
    hyper = with_trial(algorithm.hyper, {n: v.tolist() for n, v in values.items()}, best)
    standing = climb.standing(*told)
    return Search(values, climb.scores, climb.rounds, best, hyper, model, standing)


def _require_scores(evaluations: Evaluations, params: Params, wanted: Trials) -> None:
    """Refuse an evaluation that fails or does not give the objective, before anything is trained:
    one that is any function of the model is asked for the first one."""
    (evaluation,) = evaluations.by_name.values()
    wanted.check(evaluation.metrics)
    require_evaluations(evaluations, params)
    if evaluation.program is None:
        wanted.check(evaluations(params))


def _require_starts(algorithm: Algorithm, tried: Mapping[str, jax.Array], params: Params) -> None:
    """Refuse what an algorithm cannot start from, such as a value outside of its bounds, which are
    intervals: so two starts are tried."""
    for extreme in (jnp.min, jnp.max):
        ends = {name: extreme(values) for name, values in tried.items()}
        algorithm.init(params, names_of.replace(algorithm.hyper, ends))


def _scores(evaluation: Evaluation, models: Any, wanted: Trials) -> np.ndarray:
    """The objective of models that are stacked along a leading axis."""
    if evaluation.program is not None:
        return np.asarray(evaluation.side_by_side()(models)[wanted.objective], float)
    number = len(jax.tree.leaves(models)[0])
    each = (evaluation(jax.tree.map(lambda leaf, i=i: leaf[i], models)) for i in range(number))
    return np.array([float(one[wanted.objective]) for one in each])
