"""A race inside one training: candidates are trained in the same rounds by the same clients, judged
by examples that they do not train on, and dropped when they lose.

A round of several candidates is one message: their models go down together and their updates come
up together. When one is left, a round is a round of that one and nothing else; and it is watched.
"""

import builtins
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.metrics import Metrics, require_metrics
from fedgrad.algorithms.objective import Loss, client_loss, sent
from fedgrad.algorithms.safeguards import finite, undone
from fedgrad.algorithms.settings import settings_of_race
from fedgrad.algorithms.stages import Stages, When, after, both, require_part
from fedgrad.algorithms.watch import Watch, eased_by
from fedgrad.clients.examples import Examples
from fedgrad.clients.held_out import A_FIFTH, HeldOut, require_rule
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
    scores: dict[str, jax.Array]  # their mean ranks, summed over rounds that count
    # Where there is an incumbent: the squares of what each was ahead of it by, summed likewise.
    squares: dict[str, jax.Array]
    leader: jax.Array  # who has the best score, in the order of their names
    votes: jax.Array  # how many clients have judged, once for each of these rounds
    changed: jax.Array  # how many changes of hyperparameters have come
    watch: Watch  # of who is left alone
    pace: jax.Array  # what its rates are multiplied with

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

    Who goes on alone is watched: rates that were good while they raced may be too large when more
    examples train. If the loss that clients tell rises for a twentieth of all rounds, by more than
    chance explains and by a tenth of all that was gained, training goes back to where it was before
    these (its schedules, too), with half the rates of its server (of its clients, if that has
    none). If it is as bad then, the rates were not the reason, and are restored. What learns its
    rates has a guard of its own, and a race in the race watches its own winner; neither is watched.
    The final, incomplete twentieth is not checked.

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
    call `state = race.between(state, rounds_done, rounds)` before every round.
    """
    candidates = _checked(candidates)
    changes = _changes(changes or {}, candidates)
    if incumbent is not None:
        _require_known(incumbent, candidates)
    stages = Stages({0.25: 1} if cuts is None else cuts, [*candidates], incumbent)
    eased = {
        n: eased_by([*names_of.paths(one.hyper), *names_of.schedules(one.hyper)])
        for n, one in candidates.items()
        if one.between is None and "learns" not in one.settings
    }
    if held_out is not None:
        require_rule("fg.race", held_out)
    require_whole("batch_size", batch_size)
    loss = next(iter(candidates.values())).loss
    cohorts = _cohorts(candidates.values())

    def init(params: Params, hyper: Hyper | None = None) -> RaceState:
        assert hyper is not None  # `Algorithm` sees to it
        states = {name: one.init(params, hyper[name]) for name, one in candidates.items()}
        for change in changes.values():  # refused now, and not in the middle of training
            for name, values in change.items():
                candidates[name].init(params, names_of.replace(hyper[name], values))
        return stage(states, incumbent, Watch.begin(watched(states)))

    def watched(states: dict[str, State]) -> dict[str, State]:
        """Those of which it can be said how they would do better."""
        return {name: one for name, one in states.items() if eased.get(name)}

    def step(
        name: str, state: State, hyper: Hyper, cohort: Any, key: Key, further: dict[str, Any]
    ) -> tuple[State, Metrics]:
        one = candidates[name]
        more = {argument: further[argument] for argument in one.cohorts}
        state, metrics = one.round(state, hyper, cohort, key, **more)
        return state, require_metrics(metrics)

    def now(state: RaceState, hyper: Hyper) -> Hyper:
        """The hyperparameters of this round."""
        for i, change in enumerate(changes.values()):
            for name, values in change.items():
                old = names_of.paths(hyper[name])
                new = {n: jnp.where(state.changed > i, v, old[n]) for n, v in values.items()}
                hyper = {**hyper, name: names_of.replace(hyper[name], new)}
        for name in watched(state.candidates):
            its = names_of.multiplied(hyper[name], eased[name], state.pace)
            hyper = {**hyper, name: its}
        return hyper

    def round(
        state: RaceState, hyper: Hyper, cohort: Any, key: Key, **further: Any
    ) -> tuple[RaceState, Metrics]:
        live, hyper = sorted(state.candidates), now(state, hyper)
        if len(live) == 1:
            (name,) = live
            old = state.candidates[name]
            new, metrics = step(name, old, hyper[name], cohort, key, further)
            # Nobody is left to go on with instead: a round that ends so is undone, and told as 0.
            new, kept = undone(old, new)
            metrics = _named(name, metrics)
            extra = {**metrics.extra, f"race.won.{name}": kept.astype(jnp.float32)}
            if eased.get(name):
                extra[f"race.pace.{name}"] = state.pace
            known = state.watch.plus(metrics.loss, kept)
            alone = replace(state, candidates={name: new}, watch=known)
            return alone, replace(metrics, extra=extra)
        train, judges, others = cohort, Examples.of(cohort), further
        if held_out is not None:
            train, judges = held_out.split(judges)
            # What is learned from further clients of the same population is not learned from
            # examples that judge in another round.
            others = further | {
                name: held_out.split(Examples.of(further[name]))[0]
                for name, clients in cohorts.items()
                if clients is None
            }

        def play(name: str, one: State, its: Hyper) -> tuple[State, Metrics, jax.Array]:
            """The next state, and each client's own loss of the model before."""
            clients = (cohort, further) if name == incumbent else (train, others)
            new, metrics = step(name, one, its, clients[0], key, clients[1])
            own = client_loss(sent(judge or loss), batch_size, broadcast(one.params), judges)
            return new, metrics, own.astype(jnp.float32)

        played: dict[str, tuple[State, Metrics, jax.Array]] = {}
        apart = None if held_out is None else incumbent
        for names in _alike(live, candidates, state, hyper, apart):
            states, hypers = [state.candidates[n] for n in names], [hyper[n] for n in names]
            if len(names) == 1:
                played[names[0]] = play(names[0], states[0], hypers[0])
                continue
            first = names[0]
            each = jax.vmap(lambda s, h, first=first: play(first, s, h))
            rows = each(_stacked(states), _stacked(hypers))
            played |= {n: jax.tree.map(lambda x, i=i: x[i], rows) for i, n in enumerate(names)}
        own = jnp.stack([played[n][2] for n in live])
        judged = judges.count > 0
        with jax.named_scope("losses of the candidates, weighted"):
            losses = mean(own, weights=judges.count, empty=jnp.nan)
        with jax.named_scope("ranks of the candidates"):
            ranks = mean(_ranks(own), weights=judged)
        seen = [played[n][1].loss for n in live]
        trained = None
        # Where nobody has an example to spare, what they train on has to do; if that is not known
        # either, all are equal.
        voices, instead = sum(judged), jnp.zeros(len(live), jnp.float32)
        anybody = voices > 0
        if all(value is not None for value in seen):
            trained = jnp.stack([jnp.asarray(value, jnp.float32) for value in seen])
            losses, instead = jnp.where(anybody, losses, trained), trained
        ranks = jnp.where(anybody, ranks, _ranks(instead))
        # A model that has just diverged is judged in the next round, which may be after the cut.
        alive = {n: finite((played[n][0].params, last_of(played[n][0]))) for n in live}
        scores = {
            n: jnp.where(alive[n], state.scores[n] + ranks[i], jnp.inf) for i, n in enumerate(live)
        }
        place = {n: i for i, n in enumerate(live)}
        squares = {
            n: square + (ranks[place[str(incumbent)]] - ranks[place[n]]) ** 2
            for n, square in state.squares.items()
        }
        order = [n for n in candidates if n in place]  # of two that are equal, the first one leads
        best = jnp.argmin(jnp.stack([scores[n] for n in order]))
        leader = jnp.array([place[n] for n in order], jnp.int32)[best]
        shown = {f"race.loss.{n}": losses[i] for i, n in enumerate(live)}
        shown |= {f"race.rank.{n}": ranks[i] for i, n in enumerate(live)}
        for n in live:  # of races in the race
            own_races = inside(n, played[n][1].extra)
            shown |= {key: value for key, value in own_races.items() if key.startswith("race.")}
        trained_ones = {n: played[n][0] for n in live}
        # Of this training, what the leader's clients saw is the loss.
        seen_loss = None if trained is None else trained[leader]
        known = state.watch.plus(seen_loss)
        new = replace(
            state,
            candidates=trained_ones,
            scores=scores,
            squares=squares,
            votes=state.votes + voices.astype(jnp.float32),
            leader=leader,
            watch=known,
        )
        return new, Metrics(loss=seen_loss, extra=shown)

    def between(state: RaceState, done: int, planned: int) -> RaceState:
        inner = {
            name: one if (its := candidates[name].between) is None else its(one, done, planned)
            for name, one in state.candidates.items()
        }
        if any(inner[n] is not state.candidates[n] for n in inner):
            state = replace(state, candidates=inner)
        changed = [after(part, planned) for part in changes]
        if done in changed:
            state = replace(state, changed=jnp.int32(builtins.sum(c <= done for c in changed)))
        return alone(state, done, planned) if len(inner) == 1 else cut(state, done, planned)

    def cut(state: RaceState, done: int, planned: int) -> RaceState:
        """The state without those who lose, if this is a cut; judged anew, if that begins now."""
        if state.watch.safe:  # of a race that begins: nobody is watched yet
            state = replace(state, watch=replace(state.watch, safe={}))
        for half, end, left in stages.ends(planned):
            if done == end:
                seen = float(state.votes)
                best = stages.best(state.scores, state.squares, left, end - half, seen)
                stay = {n: state.candidates[n] for n in sorted(best)}
                known = state.watch.of_other_examples(watched(stay) if len(stay) == 1 else {})
                return replace(stage(stay, incumbent, known), changed=state.changed)
            if done == half > 0:
                judged = {"scores": state.scores, "squares": state.squares, "votes": state.votes}
                return replace(state, **jax.tree.map(jnp.zeros_like, judged))
        return state

    def alone(state: RaceState, done: int, planned: int) -> RaceState:
        """Who is left, back where it was if it got worse."""
        if not state.watch.safe:
            return state
        now, known, times = state.watch.asked(state.candidates, done, planned)
        if known is state.watch:
            return state
        return replace(state, candidates=now, watch=known, pace=state.pace * times)

    round.__name__ = "race"
    round.__signature__ = _signature(cohorts)  # type: ignore[attr-defined]
    places = {n: one.round.placements[n] for one in candidates.values() for n in one.cohorts}
    made = Program(round, {"cohort": CLIENTS, **places})
    executors = {one.round.executor for one in candidates.values()}
    if len(executors) > 1:
        raise ArgumentError.here(
            "fg.race: its candidates run on different executors, but they are one round. Put the "
            "race on one: fg.race(...).on(executor)."
        )
    return Algorithm(
        init,
        made.on(executors.pop()),
        {name: one.hyper for name, one in candidates.items()},
        loss,
        cohorts,
        between=between,
        settings=settings_of_race(candidates),
    )


def stage(states: dict[str, Any], incumbent: str | None, watch: Watch) -> RaceState:
    """A race, or a stage of it, begins with these states: nobody has a score."""

    def nothing(names: Iterable[str]) -> dict[str, jax.Array]:
        return {n: jnp.float32(0) for n in names}

    others = [] if incumbent is None else [n for n in states if n != incumbent]
    return RaceState(
        states,
        nothing(states),
        nothing(others),
        leader=jnp.int32(0),
        votes=jnp.float32(0),
        changed=jnp.int32(0),
        watch=watch,
        pace=jnp.asarray(1.0),  # of no dtype of its own, as rates are
    )


def _require_known(name: str, candidates: Mapping[str, Any]) -> None:
    if name not in candidates:
        message = f"fg.race: there is no candidate {name!r}."
        raise ArgumentError.here(message, name, candidates)


def _changes(
    given: Mapping[Any, Mapping[str, Mapping[str, Any]]], candidates: Mapping[str, Algorithm]
) -> dict[When, dict[str, dict[str, Any]]]:
    """Changes of hyperparameters by dotted name, the first one first; checked."""
    found: dict[When, dict[str, dict[str, Any]]] = {}
    for part, change in given.items():
        require_part("changes", part)
        found[part] = {}
        for name, values in change.items():
            _require_known(name, candidates)
            hyper = candidates[name].hyper
            names_of.replace(hyper, values)  # an error, if there is no such hyperparameter
            found[part][name] = new = names_of.paths(values)
            scheduled = [n for n in new if callable(new[n]) or n in names_of.schedules(hyper)]
            if scheduled:
                raise ArgumentError.here(
                    f"fg.race(changes=): {scheduled[0]!r} of {name!r} is a schedule. Let the "
                    "schedule change it, or give numbers."
                )
    return dict(sorted(found.items(), key=lambda change: both(change[0])))


def _checked(candidates: Mapping[str, Algorithm]) -> dict[str, Algorithm]:
    if not candidates or not isinstance(candidates, Mapping):
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
    return dict(candidates)


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
    live: list[str],
    candidates: dict[str, Algorithm],
    state: RaceState,
    hyper: Hyper,
    apart: str | None,
) -> list[list[str]]:
    """The candidates in groups that are computed together: those that differ only in numbers, and
    train on the same examples, which is not so of one `apart`."""
    groups: dict[Any, list[str]] = {}
    for name in live:
        one, params = candidates[name], state.candidates[name].params
        size = np.sum([x.size * x.dtype.itemsize for x in jax.tree.leaves(params)])
        shapes = jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), hyper[name])
        kind = (id(one.round.fun), jax.tree.structure(hyper[name]), str(shapes))
        small = size <= TOGETHER and one.between is None and name != apart
        groups.setdefault(kind if small else name, []).append(name)
    return list(groups.values())


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *trees)


def _ranks(losses: jax.Array) -> jax.Array:
    """How many are better than each; of two that are equal, one half. What diverged is worst."""
    found = jnp.where(jnp.isfinite(losses), losses, jnp.inf)
    better = jnp.sum(found[None, :] < found[:, None], axis=1)
    equal = jnp.sum(found[None, :] == found[:, None], axis=1) - 1
    return better.astype(jnp.float32) + equal.astype(jnp.float32) / 2


def inside(name: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate's own metrics; those of a race in the race have its name before theirs."""
    found: dict[str, Any] = {}
    for key, value in extra.items():
        race, kind, rest = (*key.split(".", 2), "", "")[:3]
        found[f"race.{kind}.{name}.{rest}" if race == "race" and rest else key] = value
    return found


def _named(name: str, metrics: Metrics) -> Metrics:
    """The metrics of the winner, whose hyperparameters have its name before theirs."""
    return replace(
        metrics,
        extra=inside(name, metrics.extra),
        hyper={f"{name}.{n}": value for n, value in metrics.hyper.items()},
        hypergradient={f"{name}.{n}": value for n, value in metrics.hypergradient.items()},
    )
