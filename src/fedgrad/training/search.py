"""Tuning by trials, to compare self-tuning with: random search and successive halving.

Trials run side by side, as many at once as fit into memory, on the same clients in the same order.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.side_by_side import side_by_side
from fedgrad.clients.population import Population
from fedgrad.clients.sampling import read_key
from fedgrad.core.errors import ArgumentError, require_whole
from fedgrad.core.types import Hyper, Key, Params
from fedgrad.show.numbers import number, plural
from fedgrad.training.course import Course
from fedgrad.training.evaluation import Evaluate, Evaluation, Evaluations
from fedgrad.training.loop import Loop, Played
from fedgrad.training.progress import display

TOGETHER = 256 * 2**20  # bytes of state that trials may have together

# (key, number of trials) -> one value for each
Range = Callable[[jax.Array, int], jax.Array]


def uniform(low: float, high: float) -> Range:
    """Any value between two is as likely."""
    _ordered(low, high)
    return lambda key, n: jax.random.uniform(key, (n,), minval=low, maxval=high)


def log_uniform(low: float, high: float) -> Range:
    """Any order of magnitude between two is as likely."""
    _ordered(low, high)
    if low <= 0:
        raise ArgumentError.here(f"log_uniform({low}, {high}): both must be positive.")
    return lambda key, n: jnp.exp(
        jax.random.uniform(key, (n,), minval=jnp.log(low), maxval=jnp.log(high))
    )


@dataclass(frozen=True, repr=False)
class Search:
    """What a search has tried, and what it found."""

    tried: dict[str, np.ndarray]  # by dotted name, one value for each trial
    scores: np.ndarray  # of each trial, where it ended; NaN where it diverged
    rounds: np.ndarray  # for how long each trial was trained
    best: int  # the trial
    hyper: Hyper  # its hyperparameters
    params: Params  # its model

    @property
    def score(self) -> float:
        """The score of the best trial."""
        return float(self.scores[self.best])

    def __repr__(self) -> str:
        values = ", ".join(f"{n} {number(float(v[self.best]))}" for n, v in self.tried.items())
        finite = int(np.isfinite(self.scores).sum())
        return (
            f"Search of {len(self.scores)} trials, {finite} of which ended well\n"
            f"  best: trial {self.best} with {values}\n"
            f"  score: {number(self.score)} after {plural(int(self.rounds[self.best]), 'round')}"
        )


@dataclass(frozen=True)
class Trials:
    """How many trials there are, and who goes on.

    The best has the lowest `objective` (a metric of the evaluation), or with `maximize` the
    highest. With `rungs`, that is successive halving: at each rung but the last only the best
    `keep` of them go on (a third, if nothing is said), and it is 1 / `keep` times as long as the
    one before.
    """

    number: int
    objective: str = "loss"
    maximize: bool = False
    rungs: int = 1
    keep: float | None = None

    def __post_init__(self) -> None:
        require_whole("trials", self.number)
        require_whole("rungs", self.rungs)
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
        return np.argsort(np.where(np.isfinite(scores), signed, np.inf))


def random_search(
    algorithm: Algorithm,
    clients: Population,
    space: Mapping[str, Range],
    *,
    trials: int | Trials,
    params: Params,
    rounds: int,
    cohort_size: int,
    key: Key,
    evaluate: Evaluate,
    progress: Any = True,
) -> Search:
    """Train with hyperparameters drawn at random, and keep the best.

    `space`: what is drawn, by dotted name, `{"server.learning_rate": fg.log_uniform(1e-3, 10)}`.
    `trials`: how many; `fg.Trials` says what is best, and gives up on bad ones early. `rounds` is
    how long the last ones are trained. The others are as for `fg.fit`; `evaluate` is asked at the
    end, and at each rung.
    """
    require_whole("rounds", rounds)
    wanted = trials if isinstance(trials, Trials) else Trials(trials)
    tried = _drawn(algorithm, space, wanted.number, key)
    together = side_by_side(algorithm, names_of.replace(algorithm.hyper, tried))
    course = Course.of(together, clients, cohort_size, key)
    evaluations = Evaluations.of({"": evaluate}).like(course.algorithm.round, stacked=False)
    evaluation = evaluations.by_name[""]
    wanted.check(evaluation.metrics)
    ends = wanted.ends(rounds)
    alive = np.arange(wanted.number)
    scores, trained = np.full(len(alive), np.nan), np.zeros(len(alive), int)
    state = together.init(params)
    size = max(1, int(TOGETHER // max(1, _bytes(state) // len(alive))))
    shown = display(progress, 0, rounds, course.clients * len(alive))
    try:
        for begin, end in zip([0, *ends], ends, strict=False):
            hyper = names_of.replace(algorithm.hyper, {n: v[alive] for n, v in tried.items()})
            parts = []
            for some in np.array_split(np.arange(len(alive)), -(-len(alive) // size)):
                part = _take(hyper, some)
                play = functools.partial(course.play, hyper=part)
                loop = Loop(
                    play, Played(begin, _take(state, some)), end, display=shown, warned=True
                )
                loop.run()
                parts.append(loop.at.state)
            state = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
            metrics = _evaluated(evaluation, state.params, len(alive))
            wanted.check(metrics)
            found = np.asarray(metrics[wanted.objective], float)
            scores[alive], trained[alive] = found, end
            order = wanted.best(found)
            left = order[: 1 if end == ends[-1] else max(1, round(len(order) * wanted.part))]
            alive, state = alive[left], _take(state, left)
    finally:
        course.close()
        shown.close()
    best = int(alive[0])
    values = {n: float(v[best]) for n, v in tried.items()}
    return Search(
        {n: np.asarray(v) for n, v in tried.items()},
        scores,
        trained,
        best,
        names_of.replace(algorithm.hyper, values),
        jax.tree.map(lambda leaf: leaf[0], state.params),
    )


def _drawn(
    algorithm: Algorithm, space: Mapping[str, Range], trials: int, key: Key
) -> dict[str, jax.Array]:
    if not space:
        raise ArgumentError.here(
            "A search needs something to try: "
            'space={"server.learning_rate": fg.log_uniform(1e-3, 10)}.'
        )
    known = list(names_of.paths(algorithm.hyper))
    scheduled = names_of.schedules(algorithm.hyper)
    for name in space:
        names_of.require_number(name, scheduled.get(name), "drawn")
        if name not in known:
            raise ArgumentError.here(f"There is no hyperparameter {name!r}.", name, known)
        if not callable(space[name]):
            raise ArgumentError.here(
                f"space={{{name!r}: {space[name]!r}}}: give a range, such as "
                "fg.log_uniform(1e-3, 10)."
            )
    read_key(key)
    keys = jax.random.split(jax.random.fold_in(key, 1), len(space))
    return {name: space[name](k, trials) for name, k in zip(sorted(space), keys, strict=True)}


def _evaluated(evaluation: Evaluation, models: Any, trials: int) -> Mapping[str, Any]:
    if evaluation.program is not None:
        return evaluation.side_by_side()(models)
    each = [evaluation(_take(models, np.int32(i))) for i in range(trials)]
    return {name: np.array([one[name] for one in each]) for name in each[0]}


def _take(tree: Any, trials: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[trials] if jnp.ndim(leaf) else leaf, tree)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _ordered(low: float, high: float) -> None:
    if not low < high:
        raise ArgumentError.here(f"A range from {low} to {high}: give the smaller one first.")
