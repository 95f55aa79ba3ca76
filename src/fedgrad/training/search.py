"""Hyperparameter search, as a baseline for self-tuning: random search, grids, successive halving.

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
from fedgrad.clients.population import Population
from fedgrad.core.errors import (
    ArgumentError,
    known_arguments,
    known_fields,
    public,
    require_whole,
)
from fedgrad.core.types import Hyper, Key, Params
from fedgrad.show.numbers import number, plural
from fedgrad.training.cohort_schedule import Course, usual_key
from fedgrad.training.config import judged_by
from fedgrad.training.evaluation import Evaluate, Evaluation, Evaluations
from fedgrad.training.interrupt import Interrupts
from fedgrad.training.preflight import (
    BELONGS_ELSEWHERE,
    require_algorithm,
    require_evaluations,
    require_model,
)
from fedgrad.training.progress import display
from fedgrad.training.run_folder import RunFolder
from fedgrad.training.search_folder import SearchFolder, Standing
from fedgrad.training.space import Draws, combined, drawn, with_trial
from fedgrad.training.successive_halving import Climb
from fedgrad.tuning.side_by_side import side_by_side


@public
@dataclass(frozen=True, repr=False)
class Search:
    """The trials of a search and the best of them."""

    tried: dict[str, np.ndarray]  # by dotted name, one value per trial
    scores: np.ndarray  # the last score of each trial; NaN if it diverged
    rounds: np.ndarray  # how long each trial was trained
    best: int  # the index of the trial with the best score
    hyper: Hyper  # those of the best trial
    params: Params  # the model of the best trial
    standing: Standing = field(repr=False)  # the same for a report, with the settings of the search

    @property
    def score(self) -> float:
        """The score of the best trial."""
        return float(self.scores[self.best])

    def __repr__(self) -> str:
        values = ", ".join(f"{n} {number(float(v[self.best]))}" for n, v in self.tried.items())
        finite = int(np.isfinite(self.scores).sum())
        after = plural(int(self.rounds[self.best]), "round")
        heading = f"Search of {plural(len(self.scores), 'trial')}, {finite} of which ended well"
        if not finite:  # no trial is the best
            return f"{heading}\n  {self.standing.objective} was not finite; try other ranges"
        return (
            f"{heading}\n"
            f"  best: trial {self.best} with {values}\n"
            f"  score: {self.standing.objective} {number(self.score)} after {after}"
        )


@known_fields
@dataclass(frozen=True)
class Trials:
    """The number of trials, and which of them continue.

    With several `rungs`, this is successive halving: at each rung but the last only the best
    fraction `keep` of the trials continues, and each rung is 1 / `keep` times as long as the one
    before.

    Args:
        number: How many trials. Leave it out for a grid, which has one for each combination:
            `fg.Trials(objective="accuracy")`.
        objective: The metric of the evaluation that ranks trials; the lowest value is the best.
        maximize: Rank the highest value as the best.
        rungs: The number of rungs; 1 trains all trials to the end.
        keep: The fraction of trials that continues after a rung. Defaults to a third.

    Raises:
        ArgumentError: If an argument is out of range.
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
        """Refuse metrics without the objective; None means that they are not known yet."""
        if metrics is not None and self.objective not in metrics:
            message = f"evaluate= gives no metric {self.objective!r}."
            raise ArgumentError.here(message, self.objective, metrics)

    def ends(self, rounds: int) -> list[int]:
        """Return the round at which each rung ends."""
        return [
            max(1, round(rounds * self.part ** (self.rungs - 1 - i))) for i in range(self.rungs)
        ]

    @property
    def part(self) -> float:
        """The fraction of trials that continues after a rung."""
        return 1 / 3 if self.keep is None else self.keep

    def best(self, scores: np.ndarray) -> np.ndarray:
        """Rank the trials from best to worst; diverged ones come last, also with `maximize`."""
        signed = -scores if self.maximize else scores
        return np.argsort(np.where(np.isfinite(scores), signed, np.inf), kind="stable")


class Training(TypedDict, total=False):
    """Arguments for training the trials, as for `fg.fit`."""

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
    """Train with hyperparameters drawn at random, and return the best.

        fg.random_search(algorithm, clients, {"server.learning_rate": fg.log_uniform(1e-3, 10)},
                         trials=8, evaluate=evaluation, params=params, rounds=100)

    Args:
        algorithm: The algorithm to tune.
        clients: The population from which cohorts are sampled.
        space: The ranges to draw from, by dotted name of the hyperparameter.
        trials: How many; or a `fg.Trials`, which sets the objective and can stop bad trials early.
        evaluate: The evaluation that scores trials, at the end and at each rung.
        out: A folder, or a `fg.run_folder`, from which an interrupted search resumes.
        **training: `params`, `rounds` (of the trials that are trained longest), `cohort_size`,
            `key` and `progress`, as for `fg.fit`.

    Returns:
        A `Search` with all trials and the model of the best one.

    Raises:
        ArgumentError: If a hyperparameter is unknown, or the evaluation lacks the objective.
        RunFolderError: If `out` cannot be written or holds something else.
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
    """Train with all combinations of hyperparameters, and return the best.

        fg.grid_search(algorithm, clients, {"client.learning_rate": [0.01, 0.1]},
                       evaluate=evaluation, params=params, rounds=100)

    Args:
        algorithm: The algorithm to tune.
        clients: The population from which cohorts are sampled.
        space: The values of each hyperparameter, by dotted name, as a list or as
            `fg.choice([...])`.
        trials: The objective, and whether to stop bad trials early, without a number:
            `fg.Trials(objective="accuracy", maximize=True)`.
        evaluate: The evaluation that scores trials, at the end and at each rung.
        out: A folder, or a `fg.run_folder`, from which an interrupted search resumes.
        **training: As for `fg.random_search`.

    Returns:
        A `Search` with all trials and the model of the best one.

    Raises:
        ArgumentError: As for `fg.random_search`, or if `trials` has another number than the grid.
        RunFolderError: If `out` cannot be written or holds something else.
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
    """Refuse an evaluation that fails or lacks the objective, before anything is trained. An
    arbitrary function of the model is called with the initial model."""
    (evaluation,) = evaluations.by_name.values()
    wanted.check(evaluation.metrics)
    require_evaluations(evaluations, params)
    if evaluation.program is None:
        wanted.check(evaluations(params))


def _require_starts(algorithm: Algorithm, tried: Mapping[str, jax.Array], params: Params) -> None:
    """Refuse hyperparameters that the algorithm cannot start from, such as values out of bounds.
    Bounds are intervals, so only the minima and the maxima are tried."""
    for extreme in (jnp.min, jnp.max):
        ends = {name: extreme(values) for name, values in tried.items()}
        algorithm.init(params, names_of.replace(algorithm.hyper, ends))


def _scores(evaluation: Evaluation, models: Any, wanted: Trials) -> np.ndarray:
    """Return the objective of models that are stacked along a leading axis."""
    if evaluation.program is not None:
        return np.asarray(evaluation.side_by_side()(models)[wanted.objective], float)
    number = len(jax.tree.leaves(models)[0])
    each = (evaluation(jax.tree.map(lambda leaf, i=i: leaf[i], models)) for i in range(number))
    return np.array([float(one[wanted.objective]) for one in each])
