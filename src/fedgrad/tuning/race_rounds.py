"""The rounds of a race, and the steps between them.

A round of several candidates is one message: their models are broadcast together and their updates
are sent together. Once one candidate is left, a round is a plain round of that candidate, whose
loss is monitored (divergence.py).
"""

import builtins
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.metrics import Metrics, require_metrics
from fedgrad.algorithms.objective import Loss, client_loss, sent
from fedgrad.clients.examples import Examples
from fedgrad.clients.held_out import HeldOut, require_rule
from fedgrad.clients.population import Population
from fedgrad.core.errors import require_whole
from fedgrad.core.program import broadcast, mean, sum
from fedgrad.core.types import Hyper, Key, Params, State
from fedgrad.tuning.cuts import Cuts, When, after
from fedgrad.tuning.divergence import Watch, eased_by
from fedgrad.tuning.guards import finite, undone
from fedgrad.tuning.race_arguments import require_known, shared_cohorts
from fedgrad.tuning.race_state import RaceState

# Candidates that differ only in numbers are vectorized if the model has at most this many bytes.
# Larger ones run one after another on a client, which then needs the memory of one candidate at a
# time and loses no speed.
TOGETHER = 2**20


@dataclass(frozen=True, eq=False)
class Race:
    """A race: `init`, `round` and `before_round` of an algorithm, and their steps."""

    candidates: dict[str, Algorithm]
    cuts: Cuts
    held_out: HeldOut | None
    batch_size: int
    changes: dict[When, dict[str, dict[str, Any]]]
    incumbent: str | None
    judging: Loss | None  # what clients rank by, if not the minimized loss

    def __post_init__(self) -> None:
        if self.incumbent is not None:
            require_known(self.incumbent, self.candidates)
        if self.held_out is not None:
            require_rule("fg.race", self.held_out)
        require_whole("batch_size", self.batch_size)

    @property
    def loss(self) -> Loss:
        """The loss that all candidates minimize."""
        return next(iter(self.candidates.values())).loss

    @property
    def cohorts(self) -> dict[str, Population | None]:
        """The extra cohorts of the candidates, which share them."""
        return shared_cohorts(self.candidates.values())

    def eased(self, name: str) -> list[str]:
        """Return the rates to lower if a candidate diverges when it goes on alone; none if it has a
        guard or a monitor of its own."""
        one = self.candidates[name]
        if one.before_round is not None or one.learns:
            return []
        return eased_by([*names_of.paths(one.hyper), *names_of.schedules(one.hyper)])

    def monitored(self, states: dict[str, State]) -> dict[str, State]:
        """Return the states of those candidates whose rates the divergence monitor can lower."""
        return {name: one for name, one in states.items() if self.eased(name)}

    # --- rounds ---------------------------------------------------------------------------------

    def init(self, params: Params, hyper: Hyper | None = None) -> RaceState:
        """Return the first state, with the state of every candidate."""
        assert hyper is not None  # `Algorithm` fills it in
        states = {name: one.init(params, hyper[name]) for name, one in self.candidates.items()}
        for change in self.changes.values():  # refused now, and not in the middle of training
            for name, values in change.items():
                self.candidates[name].init(params, names_of.replace(hyper[name], values))
        return RaceState.begin(states, self.incumbent, Watch.begin(self.monitored(states)))

    def round(
        self, state: RaceState, hyper: Hyper, cohort: Any, key: Key, **further: Any
    ) -> tuple[RaceState, Metrics]:
        """Train every candidate for a round, and let clients rank the models from before it."""
        hyper = self.hyper_of_round(state, hyper)
        if len(state.candidates) == 1:
            return self.round_alone(state, hyper, cohort, key, further)
        played, own, judges = self.play(state, hyper, cohort, key, further)
        verdict = self.judge({n: metrics for n, (_, metrics) in played.items()}, own, judges)
        return self.rank(state, played, verdict)

    def hyper_of_round(self, state: RaceState, hyper: Hyper) -> Hyper:
        """Return the hyperparameters after all changes so far, scaled by the pace of a winner."""
        for i, change in enumerate(self.changes.values()):
            for name, values in change.items():
                old = names_of.paths(hyper[name])
                new = {n: jnp.where(state.changed > i, v, old[n]) for n, v in values.items()}
                hyper = {**hyper, name: names_of.replace(hyper[name], new)}
        for name in self.monitored(state.candidates):
            its = names_of.multiplied(hyper[name], self.eased(name), state.pace)
            hyper = {**hyper, name: its}
        return hyper

    def round_alone(
        self, state: RaceState, hyper: Hyper, cohort: Any, key: Key, further: dict[str, Any]
    ) -> tuple[RaceState, Metrics]:
        """Run a round of the only candidate left."""
        ((name, old),) = state.candidates.items()
        new, metrics = self.round_of(name, old, hyper[name], cohort, key, further)
        # No other candidate is left: a non-finite round is undone and reported as 0.
        new, kept = undone(old, new)
        metrics = _named(name, metrics)
        extra = {**metrics.extra, f"race.won.{name}": kept.astype(jnp.float32)}
        if self.eased(name):
            extra[f"race.pace.{name}"] = state.pace
        known = state.watch.plus(metrics.loss, kept)
        alone = replace(state, candidates={name: new}, watch=known)
        return alone, replace(metrics, extra=extra)

    def round_of(
        self, name: str, state: State, hyper: Hyper, cohort: Any, key: Key, further: dict[str, Any]
    ) -> tuple[State, Metrics]:
        """Run a round of one candidate."""
        one = self.candidates[name]
        more = {argument: further[argument] for argument in one.cohorts}
        state, metrics = one.round(state, hyper, cohort, key, **more)
        return state, require_metrics(metrics)

    def play(
        self, state: RaceState, hyper: Hyper, cohort: Any, key: Key, further: dict[str, Any]
    ) -> tuple[dict[str, tuple[State, Metrics]], jax.Array, Examples]:
        """Train all candidates for a round. Return their states and metrics, each client's losses
        of the models from before the round, and the examples of these losses."""
        train, judges, others = cohort, Examples.of(cohort), further
        if self.held_out is not None:
            train, judges = self.held_out.split(judges)
            # Extra cohorts of this population must not learn from examples that judge in other
            # rounds.
            others = further | {
                name: self.held_out.split(Examples.of(further[name]))[0]
                for name, clients in self.cohorts.items()
                if clients is None
            }

        def one_round(name: str, one: State, its: Hyper) -> tuple[State, Metrics, jax.Array]:
            clients = (cohort, further) if name == self.incumbent else (train, others)
            new, metrics = self.round_of(name, one, its, clients[0], key, clients[1])
            loss = sent(self.judging or self.loss)
            own = client_loss(loss, self.batch_size, broadcast(one.params), judges)
            return new, metrics, own.astype(jnp.float32)

        played: dict[str, tuple[State, Metrics, jax.Array]] = {}
        for names in self.alike(state, hyper):
            states, hypers = [state.candidates[n] for n in names], [hyper[n] for n in names]
            if len(names) == 1:
                played[names[0]] = one_round(names[0], states[0], hypers[0])
                continue
            first = names[0]
            each = jax.vmap(lambda s, h, first=first: one_round(first, s, h))
            rows = each(_stacked(states), _stacked(hypers))
            played |= {n: jax.tree.map(lambda x, i=i: x[i], rows) for i, n in enumerate(names)}
        live = sorted(played)
        own = jnp.stack([played[n][2] for n in live])
        return {n: played[n][:2] for n in live}, own, judges

    def alike(self, state: RaceState, hyper: Hyper) -> list[list[str]]:
        """Return the candidates in groups that are computed together: those that differ only in
        numbers and train on the same examples. An incumbent trains on other examples."""
        apart = None if self.held_out is None else self.incumbent
        groups: dict[Any, list[str]] = {}
        for name in sorted(state.candidates):
            one, params = self.candidates[name], state.candidates[name].params
            size = np.sum([x.size * x.dtype.itemsize for x in jax.tree.leaves(params)])
            shapes = jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), hyper[name])
            kind = (id(one.round.fun), jax.tree.structure(hyper[name]), str(shapes))
            small = size <= TOGETHER and one.before_round is None and name != apart
            groups.setdefault(kind if small else name, []).append(name)
        return list(groups.values())

    def judge(self, metrics: dict[str, Metrics], own: jax.Array, judges: Examples) -> "Verdict":
        """Return the mean losses and ranks of the candidates, in the order of their names."""
        judged = judges.count > 0
        with jax.named_scope("losses of the candidates, weighted"):
            losses = mean(own, weights=judges.count, empty=jnp.nan)
        with jax.named_scope("ranks of the candidates"):
            ranks = mean(ranks_of(own), weights=judged)
        seen = [one.loss for one in metrics.values()]
        trained = None
        # Without any held-out example, the training losses decide; without these, all are equal.
        voices, instead = sum(judged), jnp.zeros(len(seen), jnp.float32)
        anybody = voices > 0
        if all(value is not None for value in seen):
            trained = jnp.stack([jnp.asarray(value, jnp.float32) for value in seen])
            losses, instead = jnp.where(anybody, losses, trained), trained
        ranks = jnp.where(anybody, ranks, ranks_of(instead))
        return Verdict(losses, ranks, voices, trained)

    def rank(
        self,
        state: RaceState,
        played: dict[str, tuple[State, Metrics]],
        verdict: "Verdict",
    ) -> tuple[RaceState, Metrics]:
        """Add the ranks of this round to the scores; return the next state and the metrics."""
        live, ranks = sorted(played), verdict.ranks
        place = {n: i for i, n in enumerate(live)}
        # A model that has just diverged is judged in the next round, which may come after the cut.
        alive = {n: finite((played[n][0].params, last_of(played[n][0]))) for n in live}
        scores = {
            n: jnp.where(alive[n], state.scores[n] + ranks[i], jnp.inf) for n, i in place.items()
        }
        squares = {
            n: square + (ranks[place[str(self.incumbent)]] - ranks[place[n]]) ** 2
            for n, square in state.squares.items()
        }
        order = [n for n in self.candidates if n in place]  # the first leads in a tie
        best = jnp.argmin(jnp.stack([scores[n] for n in order]))
        leader = jnp.array([place[n] for n in order], jnp.int32)[best]
        shown = {f"race.loss.{n}": verdict.losses[i] for n, i in place.items()}
        shown |= {f"race.rank.{n}": ranks[i] for n, i in place.items()}
        for n in live:  # races inside the race
            own_races = inside(n, played[n][1].extra)
            shown |= {key: value for key, value in own_races.items() if key.startswith("race.")}
        # The loss of the race is the training loss of the leader.
        loss = None if verdict.trained is None else verdict.trained[leader]
        new = replace(
            state,
            candidates={n: played[n][0] for n in live},
            scores=scores,
            squares=squares,
            leader=leader,
            watch=state.watch.plus(loss),
            votes=state.votes + verdict.voices.astype(jnp.float32),
        )
        return new, Metrics(loss=loss, extra=shown)

    # --- between rounds -------------------------------------------------------------------------

    def before_round(self, state: RaceState, done: int, planned: int) -> RaceState:
        """Return the state to continue with after `done` of all `planned` rounds."""
        inner = {
            name: one if (its := self.candidates[name].before_round) is None
            else its(one, done, planned)
            for name, one in state.candidates.items()
        }  # fmt: skip
        if any(inner[n] is not state.candidates[n] for n in inner):
            state = replace(state, candidates=inner)
        changed = [after(part, planned) for part in self.changes]
        if done in changed:
            state = replace(state, changed=jnp.int32(builtins.sum(c <= done for c in changed)))
        return restore(state, done, planned) if len(inner) == 1 else self.cut(state, done, planned)

    def cut(self, state: RaceState, done: int, planned: int) -> RaceState:
        """Drop the losers if a cut is due; reset the scores if judging for one starts now."""
        if state.watch.safe:  # the race starts: no sole candidate yet
            state = replace(state, watch=replace(state.watch, safe={}))
        for half, end, left in self.cuts.ends(planned):
            if done == end:
                votes = float(state.votes)
                best = self.cuts.best(state.scores, state.squares, left, end - half, votes)
                stay = {n: state.candidates[n] for n in sorted(best)}
                safe = self.monitored(stay) if len(stay) == 1 else {}
                watch = state.watch.of_other_examples(safe)
                new = RaceState.begin(stay, self.incumbent, watch)
                return replace(new, changed=state.changed)
            if done == half > 0:
                judged = {"scores": state.scores, "squares": state.squares, "votes": state.votes}
                return replace(state, **jax.tree.map(jnp.zeros_like, judged))
        return state


@dataclass(frozen=True)
class Verdict:
    """The judgment of a round on the candidates, in the order of their names."""

    losses: jax.Array
    ranks: jax.Array
    voices: jax.Array  # how many clients judged
    trained: jax.Array | None  # the training losses


def restore(state: RaceState, done: int, planned: int) -> RaceState:
    """Return the state of a race of one; if training got worse, roll back and halve the pace."""
    if not state.watch.safe:
        return state
    now, watch, times = state.watch.asked(state.candidates, done, planned)
    if watch is state.watch:
        return state
    return replace(state, candidates=now, watch=watch, pace=state.pace * times)


def ranks_of(losses: jax.Array) -> jax.Array:
    """Return how many are better than each; a tie counts one half. Diverged models are worst."""
    known = jnp.where(jnp.isfinite(losses), losses, jnp.inf)
    better = jnp.sum(known[None, :] < known[:, None], axis=1)
    equal = jnp.sum(known[None, :] == known[:, None], axis=1) - 1
    return better.astype(jnp.float32) + equal.astype(jnp.float32) / 2


def inside(name: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a candidate's own metrics, where those of a race inside the race get its name."""
    found: dict[str, Any] = {}
    for key, value in extra.items():
        race, kind, rest = (*key.split(".", 2), "", "")[:3]
        found[f"race.{kind}.{name}.{rest}" if race == "race" and rest else key] = value
    return found


def _named(name: str, metrics: Metrics) -> Metrics:
    """Return the metrics of the winner, with its name as a prefix of its hyperparameters."""
    return replace(
        metrics,
        extra=inside(name, metrics.extra),
        hyper={f"{name}.{n}": value for n, value in metrics.hyper.items()},
        hypergradient={f"{name}.{n}": value for n, value in metrics.hypergradient.items()},
    )


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *trees)
