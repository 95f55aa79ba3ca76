"""Training a model: `fg.fit`."""

import functools
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.metrics import Metrics
from fedgrad.clients.population import Population
from fedgrad.core.errors import FederatedError, known_arguments, public
from fedgrad.core.types import Hyper, Key, Params, State
from fedgrad.show.numbers import plural
from fedgrad.show.terminal import monospace
from fedgrad.training.best import Best
from fedgrad.training.cohort_schedule import Course
from fedgrad.training.config import brief, describe, judged_by
from fedgrad.training.evaluation import Evaluate, Evaluations
from fedgrad.training.history import History
from fedgrad.training.interrupt import Interrupts
from fedgrad.training.loop import Loop, Played
from fedgrad.training.preflight import BELONGS_ELSEWHERE, require_evaluations, require_rounds
from fedgrad.training.progress import display, round_up
from fedgrad.training.result_curves import changes, curves, span
from fedgrad.training.run_folder import Keeping, RunFolder, run_folder
from fedgrad.training.stopping import Callback, check_callbacks, require_stops

LINES = 10  # at most, when a result is printed


@public
@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of training: the final state and the history. It prints as a few lines and shows
    curves in a notebook."""

    state: State
    # The hyperparameters of the last round. Learned ones have the values used in it, those of a
    # race leave out `race.pace`, and schedules are kept as they are, so `algorithm.starting`
    # accepts all.
    hyper: Hyper
    history: History
    rounds: int
    stopped: str | None  # the reason, if training ended before the last round
    name: str = "training"  # the name of the algorithm
    best: Best | None = None  # the best model, with callbacks=[fg.keep_best(...)]

    @property
    def params(self) -> Params:
        """The model; with an averaging algorithm (`fg.averaged`, `fg.fed_auto`), the average."""
        return self.state.params

    @property
    def last(self) -> Params:
        """The model that training would continue from."""
        return last_of(self.state)

    def __repr__(self) -> str:
        seconds = self.history["seconds"].sum() if "seconds" in self.history else 0
        heading = f"{self.name}: {plural(self.rounds, 'round')} in {round_up(seconds)}"
        ended = [f"  stopped: {self.stopped}"] if self.stopped else []
        if self.best is not None:
            best = f"{self.best.metric} {span(self.best.value)}, of round {span(self.best.round)}"
            ended.append(f"  best: {best}")
        told = changes(self.history.columns(), LINES - 2 - len(ended))
        return "\n".join([heading, *ended, *(f"  {line}" for line in told), f"  {self._model()}"])

    def _repr_html_(self) -> str:
        return f"<div>{monospace(repr(self))}{curves(self.history.columns())}</div>"

    def _model(self) -> str:
        try:
            params = self.params
        except FederatedError:  # a loaded run, whose model is made of custom classes
            return "model: fg.load(folder, like=params) knows what it is made of"
        leaves = [leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")]
        kinds = ", ".join(dict.fromkeys(str(leaf.dtype) for leaf in leaves))
        size = sum(leaf.size for leaf in leaves)
        return f"model: {plural(size, 'number')} in {plural(len(leaves), 'array')} of {kinds}"


@known_arguments(BELONGS_ELSEWHERE)
def fit(
    algorithm: Algorithm,
    clients: Population,
    *,
    params: Params,
    rounds: int,
    cohort_size: int | None = None,
    key: Key | None = None,
    evaluate: Evaluate | Mapping[str, Evaluate] | None = None,
    callbacks: Sequence[Callback] = (),
    out: str | os.PathLike[str] | RunFolder | None = None,
    progress: Any = True,
) -> Result:
    """Train a model by running rounds of an algorithm on cohorts of clients.

        result = fg.fit(fg.fed_auto(loss), clients, params=params, rounds=200)

    The clients and the key of a round depend only on `key`, the number of the round, the number of
    clients and the cohort size: runs of different algorithms with one key see the same clients in
    the same order. The executor and the initial hyperparameters belong to the algorithm:
    `algorithm.on(executor)`, `algorithm.starting(hyper)`.

    Args:
        algorithm: The algorithm, such as `fg.fed_auto(loss)`.
        clients: The population from which cohorts are sampled.
        params: The model to start from, a pytree of arrays.
        rounds: The number of rounds.
        cohort_size: How many clients take part in a round. Defaults to a tenth of them, but at
            least 10 (or all, if there are fewer) and at most 50.
        key: The random key. Defaults to `jax.random.key(0)`.
        evaluate: A `fg.Evaluation`, which has its own interval; or a function of the model that
            returns metrics by name, called every 10 rounds; or several of these by name. All are
            evaluated before the first round (as round 0) and after the last one, and run on the
            algorithm's executor unless they have their own.
        callbacks: Functions called with (round, state, metrics) after every round. A callback stops
            training by returning True or a reason. If it has these methods, `begin(history, about)`
            is called before the first round with the rounds of a resumed run, `failed(error)` with
            an exception raised during training, and `close()` last. See `fg.early_stop`,
            `fg.non_finite` and `fg.keep_best`; for logging, `fg.TensorBoard`, `fg.WandB`,
            `fg.MLflow` and `fg.CSV`.
        out: A folder, or a `fg.run_folder`, from which an interrupted run resumes. `fg.load` reads
            it.
        progress: Whether to show progress; or a rich `Console` to show it on.

    Returns:
        A `Result` with the model as `result.params`, the `history`, the final state and
        hyperparameters.

    Raises:
        ArgumentError: If the arguments do not fit together.
        RunFolderError: If `out` cannot be written or holds another run.
    """
    evaluations = Evaluations.of(evaluate)
    require_rounds(rounds, of_use=bool(evaluations.by_name) or out is not None)
    check_callbacks(callbacks, evaluations.names())
    with ExitStack() as stack:
        course = stack.enter_context(closing(Course.of(algorithm, clients, cohort_size, key)))
        hyper, first = course.placed(algorithm.hyper), course.first(params)
        require_evaluations(evaluations, params)
        require_stops(callbacks, functools.partial(course.told, first))
        kept = Keeping()
        if out is not None:
            folder = out if isinstance(out, RunFolder) else run_folder(out)
            settings = {
                "cohort_size": course.cohort_size,
                "rounds": rounds,
                "planned": rounds,
                "config": folder.config,
                "evaluations": judged_by(evaluations),
            }
            kept = Keeping(folder, describe(course, first, settings))
        interrupts = stack.enter_context(Interrupts())
        stack.callback(kept.close)
        found = kept.begin(first, rounds)
        about = brief(course, rounds)
        for callback in callbacks:
            getattr(callback, "begin", lambda *_: None)(found.history, about)
            stack.push(functools.partial(_end, callback))
        shown = display(progress, found.round, rounds, course.clients)
        stack.callback(shown.close)
        # A run that is extended keeps the number of rounds that it was first planned for.
        planned = found.config.get("planned", rounds)
        loop = Loop(
            lambda round, state: course.play(
                round, course.before_round(state, round, planned), hyper
            ),
            Played(found.round, course.placed(found.state)),
            rounds,
            found.history,
            evaluations.like(course.algorithm.round, _is_stacked(first.params, params)),
            callbacks,
            kept,
            shown,
            interrupts,
            found.best,
            kept.shown(rounds, params, found.history),
        )
        del first, found  # a state can be large, so the initial one is freed while rounds run
        loop.run()
        kept.end(loop.stopped)
    known, learned = names_of.paths(algorithm.hyper), Metrics.of(loop.history).hyper
    used = {n: v[-1] for n, v in learned.items() if n in known}
    last = names_of.replace(
        algorithm.hyper, {n: v.item() if v.ndim == 0 else v for n, v in used.items()}
    )
    ended = (loop.at.state, last, loop.history, loop.at.round, loop.stopped)
    return Result(*ended, name=algorithm.name, best=loop.best)


def _end(callback: Callback, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Tell a callback that training is over: `failed(error)` if it raised, then `close()`."""
    if error is not None:
        getattr(callback, "failed", lambda error: None)(error)
    getattr(callback, "close", lambda: None)()


def _is_stacked(trained: Any, given: Any) -> bool:
    """Return whether the state holds a model for each of several side-by-side trials."""
    models, one = jax.tree.leaves(trained), jax.tree.leaves(given)
    return len(models) == len(one) and all(
        jnp.ndim(a) == jnp.ndim(b) + 1 for a, b in zip(models, one, strict=True)
    )
