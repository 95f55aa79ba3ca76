"""Tuning by trials, to compare self-tuning with: random search and successive halving.

Trials run side by side, as many at once as fit into memory, on the same clients in the same order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.side_by_side import side_by_side
from fedgrad.clients.sampling import Clients, Draw, cohort_sizes, draws
from fedgrad.core.errors import ArgumentError, nearest
from fedgrad.core.program import Executor
from fedgrad.training.evaluation import Evaluation
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


@dataclass(frozen=True)
class Search:
    """What a search has tried, and what it found."""

    tried: dict[str, np.ndarray]  # by dotted name, one value for each trial
    scores: np.ndarray  # of each trial, where it ended; NaN where it diverged
    rounds: np.ndarray  # for how long each trial was trained
    best: int  # the trial
    hyper: Any  # its hyperparameters
    params: Any  # its model

    @property
    def score(self) -> float:
        """The score of the best trial."""
        return float(self.scores[self.best])


def random_search(
    algorithm: Algorithm,
    population: Clients,
    space: Mapping[str, Range],
    *,
    trials: int,
    rounds: int,
    eval: Evaluation | Callable[[Any], Mapping[str, Any]],
    objective: str = "loss",
    maximise: bool = False,
    **options: Any,
) -> Search:
    """Train with hyperparameters drawn at random, and keep the best.

    `space`: what is drawn, by dotted name, `{"server.learning_rate": fg.log_uniform(1e-3, 10)}`.
    `objective`: the metric of `eval` that is minimised, or maximised. `options`: `params`,
    `cohort_size`, `key`, `executor` and `progress`, as for `fg.fit`.
    """
    return _search(
        algorithm, population, space, trials, [rounds], 1.0, eval, objective, maximise, **options
    )


def successive_halving(
    algorithm: Algorithm,
    population: Clients,
    space: Mapping[str, Range],
    *,
    trials: int,
    rounds: int,
    rungs: int = 3,
    keep: float = 1 / 3,
    eval: Evaluation | Callable[[Any], Mapping[str, Any]],
    objective: str = "loss",
    maximise: bool = False,
    **options: Any,
) -> Search:
    """Random search that gives up on bad trials: at each rung only the best `keep` of them go on.

    `rounds` is how long the last ones are trained; each rung is 1 / `keep` times as long as the one
    before.
    """
    if not 0 < keep < 1 or not isinstance(rungs, int) or rungs < 1:
        raise ArgumentError.here(
            f"successive_halving(rungs={rungs!r}, keep={keep!r}): give at least one rung, and keep "
            "a part between 0 and 1 of the trials."
        )
    ends = [max(1, round(rounds * keep ** (rungs - 1 - i))) for i in range(rungs)]
    return _search(
        algorithm, population, space, trials, ends, keep, eval, objective, maximise, **options
    )


def _search(
    algorithm: Algorithm,
    population: Clients,
    space: Mapping[str, Range],
    trials: int,
    ends: list[int],
    keep: float,
    eval: Any,
    objective: str,
    maximise: bool,
    *,
    params: Any,
    cohort_size: int,
    key: jax.Array,
    executor: Executor | None = None,
    progress: Any = True,
) -> Search:
    tried = _drawn(algorithm, space, trials, key)
    populations = {"cohort": population} | {
        name: population if other is None else other for name, other in algorithm.cohorts.items()
    }
    sizes = cohort_sizes(populations, cohort_size)
    draw = draws(populations, sizes, key)
    together = side_by_side(algorithm, names_of.replace(algorithm.hyper, tried))
    play = together.round if executor is None else together.round.on(executor)
    if isinstance(eval, Evaluation) and executor is not None:
        eval = eval.on(executor)

    alive = np.arange(trials)
    scores, trained = np.full(trials, np.nan), np.zeros(trials, int)
    state = together.init(params)
    size = max(1, int(TOGETHER // max(1, _bytes(state) // trials)))
    shown = display(progress, 0, ends[-1], sum(sizes.values()) * trials)
    try:
        for begin, end in zip([0, *ends], ends, strict=False):
            hyper = names_of.replace(algorithm.hyper, {n: v[alive] for n, v in tried.items()})
            parts = []
            for some in np.array_split(np.arange(len(alive)), -(-len(alive) // size)):
                part = _take(state, some), _take(hyper, some)
                parts.append(_train(play, *part, draw, begin, end, shown.show))
            state = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
            found = _scores(eval, state.params, objective, len(alive))
            scores[alive], trained[alive] = found, end
            # What diverged comes last, whatever is wanted.
            order = np.argsort(np.where(np.isfinite(found), -found if maximise else found, np.inf))
            left = order[: 1 if end == ends[-1] else max(1, round(len(order) * keep))]
            alive, state = alive[left], _take(state, left)
    finally:
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
    algorithm: Algorithm, space: Mapping[str, Range], trials: int, key: jax.Array
) -> dict[str, jax.Array]:
    if not isinstance(trials, int) or trials < 1 or not space:
        raise ArgumentError.here(
            f"A search needs trials, got {trials!r}, and something to try, got {list(space)!r}: "
            'space={"server.learning_rate": fg.log_uniform(1e-3, 10)}.'
        )
    known = list(names_of.paths(algorithm.hyper))
    scheduled = names_of.schedules(algorithm.hyper)
    for name in space:
        names_of.require_number(name, scheduled.get(name), "drawn")
        if name not in known:
            raise ArgumentError.here(f"There is no hyperparameter {name!r}." + nearest(name, known))
    keys = jax.random.split(jax.random.fold_in(key, 1), len(space))
    return {name: space[name](k, trials) for name, k in zip(sorted(space), keys, strict=True)}


def _train(
    play: Callable[..., Any],
    state: Any,
    hyper: Any,
    draw: Callable[[int], Draw],
    begin: int,
    end: int,
    show: Callable[[int, Mapping[str, Any]], None],
) -> Any:
    for round in range(begin + 1, end + 1):
        drawn = draw(round)
        state, metrics = play(state, hyper, drawn.cohorts["cohort"], drawn.key, **drawn.further)
        show(round, {"loss": np.nanmin(np.asarray(metrics["loss"]))} if "loss" in metrics else {})
    return state


def _scores(eval: Any, models: Any, objective: str, trials: int) -> np.ndarray:
    if isinstance(eval, Evaluation):
        found: Mapping[str, Any] = eval.side_by_side()(models)
    else:
        each = [eval(_take(models, np.int32(i))) for i in range(trials)]
        found = {name: np.array([one[name] for one in each]) for name in each[0]}
    if objective not in found:
        raise ArgumentError.here(
            f"eval= gives no metric {objective!r}." + nearest(objective, list(found))
        )
    return np.asarray(found[objective], float)


def _take(tree: Any, trials: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[trials] if jnp.ndim(leaf) else leaf, tree)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _ordered(low: float, high: float) -> None:
    if not low < high:
        raise ArgumentError.here(f"A range from {low} to {high}: give the smaller one first.")
