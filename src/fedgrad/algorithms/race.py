"""A race inside one training: candidates are trained in the same rounds by the same clients, judged
by examples that none of them trains on, and dropped when they lose.

A round of several candidates is one message: their models go down together and their updates come
up together. When one is left, a round is a round of that one and nothing else.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.metrics import Metrics, require_metrics
from fedgrad.algorithms.objective import client_loss
from fedgrad.clients.examples import Examples
from fedgrad.clients.held_out import A_FIFTH, HeldOut
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError, known_arguments, require_whole
from fedgrad.core.graph import CLIENTS
from fedgrad.core.program import Program, broadcast, mean, sum
from fedgrad.core.types import Hyper, Key, Params, State

# Candidates that differ only in numbers are computed together, vectorised, where the model has at
# most so many bytes. Larger ones follow one another on a client, which then needs the memory of one
# candidate at a time, and loses no speed.
TOGETHER = 2**20


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaceState:
    """The states of the candidates that are left, and how they stand."""

    candidates: dict[str, Any]
    scores: dict[str, jax.Array]  # judged losses of this stage, summed
    leader: jax.Array  # who has the best score, in the order of their names

    @property
    def params(self) -> Params:
        """The model of the candidate that leads."""
        return self._of_the_leader([s.params for s in self._states])

    @property
    def last(self) -> Params:
        """The model that its training goes on with."""
        return self._of_the_leader([last_of(s) for s in self._states])

    @property
    def _states(self) -> list[State]:
        return [self.candidates[n] for n in sorted(self.candidates)]

    def _of_the_leader(self, models: list[Params]) -> Params:
        found = models[0]
        for i, model in enumerate(models[1:], 1):
            found = jax.tree.map(lambda a, b, i=i: jnp.where(self.leader == i, b, a), found, model)
        return found


@known_arguments()
def race(
    candidates: Mapping[str, Algorithm],
    cuts: Mapping[float, int] | None = None,
    held_out: HeldOut | None = A_FIFTH,
    batch_size: int = 50,
) -> Algorithm:
    """An algorithm that finds out, while it trains, which of several algorithms is the best.

    All `candidates`, by name, are trained in the same rounds, by the same clients, with the same
    keys. `cuts`: after which part of all rounds how many are left, `{0.1: 3, 0.25: 1}`; by default
    one of them after a quarter. Who is left is decided by the mean loss of the candidates' models
    on each client's `held_out` examples, in the second half of what there is between two cuts;
    meanwhile they are trained without these. The last one goes on alone, with all examples. None:
    judged on what they train on.

    A candidate is anything with `init` and `round`, also another race; the model by which it is
    judged is its `state.params`, so that of `fg.averaged(...)` is the average. Those that differ
    only in numbers (`algorithm.starting(...)`) are computed together.

    `fg.fit` tells it how many rounds there are; extended, a run goes on with the winner. By hand,
    call `state = race.between(state, rounds_done, rounds)` before every round.
    """
    candidates = dict(candidates)
    _check(candidates)
    stages = _Stages({0.25: 1} if cuts is None else dict(cuts), len(candidates))
    require_whole("batch_size", batch_size)
    loss = next(iter(candidates.values())).loss
    cohorts = _cohorts(candidates.values())

    def init(params: Params, hyper: Hyper | None = None) -> RaceState:
        assert hyper is not None  # `Algorithm` sees to it
        states = {name: one.init(params, hyper[name]) for name, one in candidates.items()}
        return _stage(states)

    def step(
        name: str, state: State, hyper: Hyper, cohort: Any, key: Key, further: dict[str, Any]
    ) -> tuple[State, Metrics]:
        one = candidates[name]
        more = {argument: further[argument] for argument in one.cohorts}
        state, metrics = one.round(state, hyper, cohort, key, **more)
        return state, require_metrics(metrics)

    def judged(params: Params, examples: Examples, instead: Any) -> jax.Array:
        own = client_loss(loss, batch_size, broadcast(params), examples)
        found = mean(own, weights=examples.count)
        if instead is not None:  # nobody has an example to spare
            found = jnp.where(sum(examples.count) > 0, found, jnp.asarray(instead, found.dtype))
        return found.astype(jnp.float32)

    def round(
        state: RaceState, hyper: Hyper, cohort: Any, key: Key, **further: Any
    ) -> tuple[RaceState, Metrics]:
        live = sorted(state.candidates)
        if len(live) == 1:
            (name,) = live
            one = state.candidates[name]
            new, metrics = step(name, one, hyper[name], cohort, key, further)
            return replace(state, candidates={name: new}), _named(name, metrics)
        train, judges = cohort, Examples.of(cohort)
        if held_out is not None:
            train, judges = held_out.split(judges)

        def play(name: str, one: State, its: Hyper) -> tuple[State, Metrics, jax.Array]:
            new, metrics = step(name, one, its, train, key, further)
            return new, metrics, judged(one.params, judges, held_out and metrics.loss)

        played: dict[str, tuple[State, Metrics, jax.Array]] = {}
        for names in _alike(live, candidates, state, hyper):
            states, hypers = [state.candidates[n] for n in names], [hyper[n] for n in names]
            if len(names) == 1:
                played[names[0]] = play(names[0], states[0], hypers[0])
                continue
            first = names[0]
            each = jax.vmap(lambda s, h, first=first: play(first, s, h))
            rows = each(_stacked(states), _stacked(hypers))
            played |= {n: jax.tree.map(lambda x, i=i: x[i], rows) for i, n in enumerate(names)}
        losses = {n: played[n][2] for n in live}
        scores = {n: state.scores[n] + _or_infinite(losses[n]) for n in live}
        leader = jnp.argmin(jnp.stack([scores[n] for n in live])).astype(jnp.int32)
        trained = [played[n][1].loss for n in live]
        shown = {f"race.{n}": losses[n] for n in live} | {
            f"race.{n}.{rest.removeprefix('race.')}": value
            for n in live
            for rest, value in played[n][1].extra.items()
        }
        # What the leader's clients saw: the loss of this training, as of any other.
        known = all(one is not None for one in trained)
        value = jnp.stack(trained)[leader] if known else None
        new = RaceState({n: played[n][0] for n in live}, scores, leader)
        return new, Metrics(loss=value, extra=shown)

    def between(state: RaceState, done: int, planned: int) -> RaceState:
        inner = {
            name: one if (its := candidates[name].between) is None else its(one, done, planned)
            for name, one in state.candidates.items()
        }
        if any(inner[n] is not state.candidates[n] for n in inner):
            state = replace(state, candidates=inner)
        return stages.between(state, done, planned, list(candidates))

    round.__name__ = "race"
    places = {n: one.round.placements[n] for one in candidates.values() for n in one.cohorts}
    made = Program(round, {"cohort": CLIENTS, **places}, signature=_signature(cohorts))
    executors = {one.round.executor for one in candidates.values()}
    return Algorithm(
        init,
        replace(made, executor=executors.pop() if len(executors) == 1 else None),
        {name: one.hyper for name, one in candidates.items()},
        loss,
        cohorts,
        between=between,
    )


@dataclass(frozen=True)
class _Stages:
    """When candidates are judged, and how many are left."""

    cuts: dict[float, int]
    candidates: int

    def __post_init__(self) -> None:
        for part, left in self.cuts.items():
            require_whole("cuts", left)
            if not 0 < part <= 1:
                raise ArgumentError.here(
                    f"cuts={self.cuts}: after a part of all rounds between 0 and 1 so many "
                    f"candidates are left, such as {{0.1: 3, 0.25: 1}}; got {part!r}."
                )
        counts = [self.cuts[part] for part in sorted(self.cuts)]
        if not counts or counts[-1] != 1 or counts != sorted(counts, reverse=True):
            raise ArgumentError.here(
                f"cuts={self.cuts}: fewer and fewer candidates are left, at last 1: "
                "{0.1: 3, 0.25: 1}."
            )

    def ends(self, planned: int) -> dict[int, int]:
        """After which round how many are left."""
        found: dict[int, int] = {}
        for part in sorted(self.cuts):
            found[max(1, round(part * planned))] = self.cuts[part]
        return found

    def between(self, state: RaceState, done: int, planned: int, order: list[str]) -> RaceState:
        """The state without those who lose, if this is a cut; judged anew, if that begins now."""
        if len(state.candidates) == 1:
            return state
        begin = 0
        for end, left in self.ends(planned).items():
            if done == end:
                names = [n for n in order if n in state.candidates]
                best = sorted(names, key=lambda n: float(np.asarray(state.scores[n])))[:left]
                return _stage({n: state.candidates[n] for n in sorted(best)})
            if done == (begin + end) // 2 and done > begin:
                return replace(state, scores=jax.tree.map(jnp.zeros_like, state.scores))
            begin = end
        return state


def _stage(states: dict[str, Any]) -> RaceState:
    """A stage begins: nobody has a score."""
    return RaceState(states, {n: jnp.float32(0) for n in states}, jnp.int32(0))


def _check(candidates: dict[str, Algorithm]) -> None:
    if not candidates:
        raise ArgumentError.here('fg.race takes algorithms by name: {"fast": ..., "slow": ...}.')
    first = next(iter(candidates.values()))
    for name, one in candidates.items():
        if not isinstance(one, Algorithm):
            raise ArgumentError.here(
                f"fg.race: the candidate {name!r} is {type(one).__name__}. Give an algorithm, such "
                "as fg.fed_avg(loss)."
            )
        if not isinstance(name, str) or not name or "." in name:
            raise ArgumentError.here(
                f"fg.race: a candidate is called {name!r}. Give names without a dot, which "
                "separates the parts of a hyperparameter's name."
            )
        if one.loss is not first.loss:
            raise ArgumentError.here(
                f"fg.race: the candidate {name!r} minimizes another loss than the first one, so "
                "that they cannot be compared. Give all the same function."
            )
        one.require_stateless_clients("a race")


def _cohorts(candidates: Iterable[Algorithm]) -> dict[str, Population | None]:
    """The further cohorts that candidates need, which they share."""
    found: dict[str, Population | None] = {}
    for one in candidates:
        for argument, clients in one.cohorts.items():
            if argument in found and found[argument] is not clients:
                raise ArgumentError.here(
                    f"fg.race: two candidates draw their {argument!r} from different populations. "
                    "Let them share it."
                )
            found[argument] = clients
    return found


def _signature(further: Iterable[str]) -> inspect.Signature:
    given, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(name, given) for name in ("state", "hyper", "cohort", "key")]
    return inspect.Signature([*own, *(inspect.Parameter(name, named) for name in further)])


def _alike(
    live: list[str], candidates: dict[str, Algorithm], state: RaceState, hyper: Hyper
) -> list[list[str]]:
    """The candidates in groups that are computed together: those that differ only in numbers."""
    groups: dict[Any, list[str]] = {}
    for name in live:
        one, params = candidates[name], state.candidates[name].params
        size = np.sum([x.size * x.dtype.itemsize for x in jax.tree.leaves(params)])
        shapes = jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), hyper[name])
        kind = (id(one.round.fun), jax.tree.structure(hyper[name]), str(shapes))
        small = size <= TOGETHER and one.between is None
        groups.setdefault(kind if small else name, []).append(name)
    return list(groups.values())


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *trees)


def _or_infinite(loss: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(loss), loss, jnp.inf)


def _named(name: str, metrics: Metrics) -> Metrics:
    """The metrics of the winner, whose hyperparameters have its name before theirs."""
    return replace(
        metrics,
        hyper={f"{name}.{n}": value for n, value in metrics.hyper.items()},
        hypergradient={f"{name}.{n}": value for n, value in metrics.hypergradient.items()},
    )
