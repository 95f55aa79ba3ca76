"""Training: `fg.fit`."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.clients.sampling import Clients, cohort_sizes, draws, sharding_of
from fedgrad.core.errors import ArgumentError
from fedgrad.core.program import Executor
from fedgrad.training.config import describe
from fedgrad.training.evaluation import Evaluation
from fedgrad.training.files import RunFolderError
from fedgrad.training.history import History
from fedgrad.training.interrupt import Interrupts
from fedgrad.training.loop import Callback, Loop, Point
from fedgrad.training.progress import display
from fedgrad.training.run_folder import RunFolder
from fedgrad.training.stopping import Stop, check_stops

Evaluate = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Result:
    """What training gave: the last state, and everything that happened on the way."""

    state: Any
    hyper: Any  # the hyperparameters of the last round: learned ones as they were used in it
    history: History
    rounds: int
    stopped: str | None  # why it ended before the last round, if it did

    @property
    def params(self) -> Any:
        """The model."""
        return self.state.params


def fit(
    algorithm: Algorithm,
    population: Clients,
    *,
    params: Any,
    rounds: int,
    cohort_size: int,
    key: jax.Array,
    hyper: Any = None,
    executor: Executor | None = None,
    eval: Evaluate | Mapping[str, Evaluate] | None = None,
    eval_every: int = 10,
    out: str | os.PathLike[str] | None = None,
    progress: Any = True,
    callbacks: Sequence[Callback] = (),
    stop: Stop | Sequence[Stop] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = True,
    config: Mapping[str, Any] = {},
) -> Result:
    """Train a model: rounds of an algorithm on cohorts of a population.

    The clients of a round, and its key, depend on `key` and on the number of the round only, so
    runs of different algorithms with one key see the same clients in the same order.

    `hyper`: instead of the algorithm's own. `eval`: a function of the model that gives metrics by
    name, see `fg.evaluation`, or several by name; every `eval_every` rounds and after the last.
    `callbacks` are called with (round, state, metrics) after every round and stop training by
    returning True; those with a method `close` are closed at the end. `stop`: see `fg.early_stop`
    and `fg.non_finite`.

    `out` is a folder for config.json, history.jsonl and the checkpoint, which is written every
    `checkpoint_every` rounds (by default about twice a minute), at the end, and when training is
    interrupted. With `resume`, a run that finds its own checkpoint there goes on from it, and ends
    exactly as if it had never been interrupted. `config` is written into config.json too.
    """
    _check(rounds, 0, "rounds")
    _check(eval_every, 1, "eval_every")
    if checkpoint_every is not None:
        _check(checkpoint_every, 1, "checkpoint_every")
    stops = [] if stop is None else list(stop) if isinstance(stop, Sequence) else [stop]
    check_stops(stops, eval is not None)
    populations = {"cohort": population} | {
        name: population if other is None else other for name, other in algorithm.cohorts.items()
    }
    sizes = cohort_sizes(populations, cohort_size)
    draw = draws(populations, sizes, key)
    hyper = algorithm.hyper if hyper is None else hyper
    at, history = Point(0, _placed(algorithm.init(params, hyper), population)), History()
    evaluate = _evaluate(eval, executor, _is_stacked(at.state.params, params))
    round_of = algorithm.round if executor is None else algorithm.round.on(executor)
    on_devices = _placed(hyper, population)

    with ExitStack() as closing:
        interrupts = closing.enter_context(Interrupts())

        def step(round: int, state: Any) -> Any:
            drawn = draw(round)
            cohort, further = drawn.cohorts["cohort"], drawn.further
            return round_of(state, on_devices, cohort, drawn.key, **further)

        folder = None
        if out is not None:
            settings = {"cohort_size": cohort_size, "rounds": rounds, "config": dict(config)}
            described = describe(algorithm, populations, at.state, hyper, draw(1), settings)
            folder = RunFolder(out, described, checkpoint_every)
            found = folder.load(at.state) if resume else None
            if found is not None:
                at, history = Point(found.round, _placed(found.state, population)), found.history
            if at.round > rounds:
                raise RunFolderError.here(
                    f"{folder.path} has {at.round} rounds already, which is more than rounds="
                    f"{rounds}. Ask for more, or choose another out=, or give resume=False."
                )
            folder.begin(at, history)
            closing.callback(folder.close)
        for callback in callbacks:
            closing.callback(getattr(callback, "close", lambda: None))
        shown = display(progress, at.round, rounds, sum(sizes.values()))
        closing.callback(shown.close)

        loop = Loop(
            at,
            rounds,
            history,
            step,
            evaluate,
            eval_every,
            callbacks,
            stops,
            folder,
            shown,
            interrupts,
        )
        try:
            loop.run()
        except BaseException as error:
            if folder is not None:
                folder.rescue(loop, error)
            raise
        if folder is not None:
            folder.save(loop)
    history = loop.history
    return Result(loop.at.state, _last(hyper, history), history, loop.at.round, loop.stopped)


def _check(value: Any, least: int, name: str) -> None:
    if not isinstance(value, int) or value < least:
        raise ArgumentError.here(f"{name}={value!r}: give a whole number of at least {least}.")


def _placed(tree: Any, population: Clients) -> Any:
    """Where the clients' data are. Otherwise the first round would be compiled for another place
    than all later ones."""

    def array(leaf: Any) -> jax.Array:
        try:
            return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
        except TypeError:
            raise ArgumentError.here(
                f"States and hyperparameters are made of arrays, found {type(leaf).__name__}."
            ) from None

    sharding = sharding_of(population)
    tree = jax.tree.map(array, tree)
    return tree if sharding is None else jax.device_put(tree, sharding)


def _is_stacked(trained: Any, given: Any) -> bool:
    """Whether the state holds a model for each of several trials side by side."""
    models, one = jax.tree.leaves(trained), jax.tree.leaves(given)
    return len(models) == len(one) and all(
        jnp.ndim(a) == jnp.ndim(b) + 1 for a, b in zip(models, one, strict=True)
    )


def _evaluate(
    eval: Any, executor: Executor | None, stacked: bool
) -> Callable[[Any], dict[str, Any]] | None:
    """All evaluations as one function of the model."""
    if eval is None:
        return None

    def prepared(one: Any) -> Any:
        if not callable(one):
            raise ArgumentError.here(
                f"eval= takes a function of the model, or several by name, got {one!r}. See "
                "fg.evaluation."
            )
        if isinstance(one, Evaluation):
            one = one if executor is None else one.on(executor)
            one = one.side_by_side() if stacked else one
        return one

    several = isinstance(eval, Mapping)
    functions = {name: prepared(f) for name, f in (eval if several else {"": eval}).items()}

    def evaluate(params: Any) -> dict[str, Any]:
        found = {name: function(params) for name, function in functions.items()}
        for name, metrics in found.items():
            if not isinstance(metrics, Mapping):
                raise ArgumentError.here(
                    f"eval={name or ''} gave {type(metrics).__name__}. Give metrics by name, such "
                    'as {"loss": ...}.'
                )
        return found if several else dict(found[""])

    return evaluate


def _last(hyper: Any, history: History) -> Any:
    known = names_of.paths(hyper)
    used = {name: values[-1] for name, values in history.under("hyper").items() if name in known}
    return names_of.replace(hyper, {n: v.item() if v.ndim == 0 else v for n, v in used.items()})
