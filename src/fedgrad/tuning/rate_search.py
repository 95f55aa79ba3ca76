"""An algorithm that finds its own learning rates: `fg.self_tuning(algorithm)`, nothing more said.

First it races with itself at other rates. The winner then races with itself while the server's rate
follows its hypergradient. What wins that goes on alone, monitored: it trains on more examples now,
and its rates may be too large for that. The races were chosen on digits and Synthetic(1, 1) and
then tested on other tasks, the monitor because of CIFAR-100: docs/no-tuning.md.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.metrics import Metrics
from fedgrad.algorithms.parametrization import Form, learned, log
from fedgrad.algorithms.wrapped import wrapped
from fedgrad.clients.held_out import A_FIFTH
from fedgrad.core.errors import ArgumentError
from fedgrad.core.types import Hyper, Params, State
from fedgrad.tuning.averaged import averaged
from fedgrad.tuning.divergence import Watch, eased_by, rates_of
from fedgrad.tuning.gradient_cohort import GradientCohort
from fedgrad.tuning.guards import undone
from fedgrad.tuning.horizon import Horizon
from fedgrad.tuning.hypergradient_descent import hypergradient_descent
from fedgrad.tuning.race import race
from fedgrad.tuning.race_rounds import inside
from fedgrad.tuning.race_state import RaceState

GIVEN = "as given"
# Rates of clients and server that race with those that are given, and after which part of all
# rounds how many are left, what is given being one of them to the last. Larger rates look better
# than good ones for a quarter of all rounds, so that two others have to be left until after that.
# No client rate of 1: a step that is stable alone need not be when there are two, as soon as the
# examples that judged train. The server's 0.1 is for those like Adam. What judges does not train,
# so from 0.45 on nobody is judged: good rates would lose by it.
RATES = [
    {"client": client, "server": server}
    for client, server in [
        (0.01, 1.0), (0.01, 10.0), (0.03, 1.0), (0.03, 10.0), (0.1, 0.1), (0.1, 1.0), (0.1, 10.0)
    ]
]  # fmt: skip
CUTS = {0.05: 4, 0.15: 3, 0.35: 1}
# What follows its hypergradient then, and how; against what stays as it is.
FOLLOWED, STEP, HORIZON = "server.learning_rate", 0.03, Horizon(20, through="server")
STAYS, FOLLOWS = "stays", "follows"
DUEL = {0.35: 2, 0.45: 1}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RateSearchState:
    """The states of the race, of the duel and of going on alone, as far as they are to come; the
    rates of each candidate that is left, by dotted name; and the divergence monitor."""

    parts: dict[str, Any]
    rates: dict[str, dict[str, jax.Array]]
    watch: Watch

    @property
    def now(self) -> State:
        """The state of what training is at."""
        return next(self.parts[n] for n in ("race", "duel", "alone") if n in self.parts)

    @property
    def params(self) -> Params:
        """The averaged model."""
        return self.now.params

    @property
    def last(self) -> Params:
        """The model that training goes on with."""
        return last_of(self.now)


def rate_search(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm at learning rates that it finds itself: `fg.self_tuning(algorithm)`."""
    algorithm.require_stateless_clients("self_tuning")
    algorithm.require_one_form("self_tuning")
    if algorithm.cohorts:
        raise ArgumentError.here(
            f"The algorithm already takes a {next(iter(algorithm.cohorts))!r}, so it cannot be "
            "tuned (again)."
        )
    _refuse_scaled(algorithm)
    search = RateSearch(algorithm)

    def round(state: RateSearchState, hyper: Hyper, *args: Any) -> tuple[RateSearchState, Metrics]:
        return search.round(state, hyper, *args)

    return replace(
        algorithm,
        init=search.init,
        round=wrapped(search.race.round, round, f"self_tuning({algorithm.round.name})"),
        before_round=search.before_round,
    )


@dataclass(frozen=True, eq=False)
class RateSearch:
    """An algorithm that races with itself at other rates: `init`, `round`, `before_round` and the
    steps of these."""

    algorithm: Algorithm

    def __post_init__(self) -> None:
        if not any(self.names.values()):
            raise ArgumentError.here(
                f"self_tuning({self.algorithm.round.name}): it has no learning rate that is a "
                "number, so there is nothing to race. Make its optimizers with "
                "fg.optimizer(optax.sgd, learning_rate=...), or name what to learn: "
                "self_tuning(algorithm, learn=...)."
            )

    @functools.cached_property
    def names(self) -> dict[str, list[str]]:
        """The dotted names of the learning rates, of clients and of the server."""
        known = names_of.paths(self.algorithm.hyper)
        return {branch: rates_of(known, branch) for branch in ("client", "server")}

    @functools.cached_property
    def others(self) -> dict[str, dict[str, float]]:
        """The rates that race with the given ones, by the names of the candidates."""
        tried = [branch for branch in self.names if self.names[branch]]
        chosen = [{branch: rates[branch] for branch in tried} for rates in RATES]
        return {", ".join(f"{b} {_word(r)}" for b, r in rates.items()): rates for rates in chosen}

    @functools.cached_property
    def base(self) -> Algorithm:
        """The algorithm, averaged: what every candidate trains."""
        return averaged(self.algorithm)

    @functools.cached_property
    def race(self) -> Algorithm:
        """The race of the given rates with others."""
        return race(dict.fromkeys((GIVEN, *self.others), self.base), CUTS, incumbent=GIVEN)

    @functools.cached_property
    def duel(self) -> Algorithm | None:
        """The race of the winner with itself, its server's rate following its hypergradient."""
        if FOLLOWED not in self.names["server"]:
            return None
        # Examples that are held out say where the rate goes: those that train would say "faster"
        # without end where a model fits them all. Hypergradients see no further than their
        # horizon, so that what they lead to has to be better, not only promise to be.
        judges = GradientCohort("same", held_out=A_FIFTH)
        followed = hypergradient_descent(
            self.base, {FOLLOWED: log()}, optax.adam(STEP), gradient_from=judges, horizon=HORIZON
        )
        return race({STAYS: self.base, FOLLOWS: followed}, DUEL, incumbent=STAYS)

    @property
    def form(self) -> Form:
        """The form in which the server's rate is learned."""
        return learned(self.algorithm.hyper, {FOLLOWED: log()})[FOLLOWED]

    # --- rounds ---------------------------------------------------------------------------------

    def init(self, params: Params, hyper: Hyper | None = None) -> RateSearchState:
        """Return the first state: of the race, and of what comes after it."""
        rates = self.rates(hyper)
        given = {n: names_of.replace(hyper, r) for n, r in rates.items()}
        parts = {
            "race": self.race.init(params, given),
            "alone": self.base.init(params, hyper),
        }
        if self.duel is not None:
            begin = self.duel.init(params, dict.fromkeys((STAYS, FOLLOWS), hyper))
            parts["duel"] = replace(begin, watch=Watch.begin({}))  # its winner is monitored here
        return RateSearchState(parts, rates, Watch.begin({"alone": parts["alone"]}))

    def rates(self, hyper: Hyper) -> dict[str, dict[str, jax.Array]]:
        """Return the rates of each candidate, by dotted name."""
        known = names_of.paths(hyper)
        names = [n for some in self.names.values() for n in some]
        _require_numbers(known, names)
        given = {n: jnp.asarray(known[n]) for n in names}
        rates = {GIVEN: given}
        for name, other in self.others.items():
            rates[name] = dict(given)
            for branch, rate in other.items():
                rates[name] |= _scaled({n: given[n] for n in self.names[branch]}, rate)
        return rates

    def round(
        self, state: RateSearchState, hyper: Hyper, *args: Any
    ) -> tuple[RateSearchState, Metrics]:
        """A round of whatever training is at: the race, the duel, or the winner alone."""
        hypers = {n: names_of.replace(hyper, rates) for n, rates in state.rates.items()}
        play = next(p for n, p in self._plays.items() if n in state.parts)
        parts, metrics, kept = play(state, hypers, *args)
        return replace(state, parts=parts, watch=state.watch.plus(metrics.loss, kept)), metrics

    @property
    def _plays(self) -> dict[str, Callable[..., tuple[dict[str, Any], Metrics, Any]]]:
        """What each part does in a round: (the parts after it, its metrics, whether it is kept)."""
        return {"race": self.play_race, "duel": self.play_duel, "alone": self.play_alone}

    def play_race(self, state: RateSearchState, hypers: dict[str, Hyper], *args: Any) -> Any:
        """A round in which all rates that are left race."""
        new, metrics = self.race.round(state.parts["race"], hypers, *args)
        return {**state.parts, "race": new}, metrics, True

    def play_duel(self, state: RateSearchState, hypers: dict[str, Hyper], *args: Any) -> Any:
        """A round in which the winner races with itself following its hypergradient."""
        assert self.duel is not None
        ((name, rates),) = state.rates.items()
        both = dict.fromkeys((STAYS, FOLLOWS), hypers[name])
        new, metrics = self.duel.round(state.parts["duel"], both, *args)
        # It is a race inside of what won the first one.
        extra = {**inside(name, metrics.extra), f"race.won.{name}": jnp.float32(1)}
        return {**state.parts, "duel": new}, replace(metrics, hyper=rates, extra=extra), True

    def play_alone(self, state: RateSearchState, hypers: dict[str, Hyper], *args: Any) -> Any:
        """A round of what won."""
        ((name, rates),) = state.rates.items()
        new, metrics = self.base.round(state.parts["alone"], hypers[name], *args)
        new, kept = undone(state.parts["alone"], new)
        extra = {**metrics.extra, f"race.won.{name}": kept.astype(jnp.float32)}
        return {"alone": new}, replace(metrics, hyper=rates, extra=extra), kept

    # --- between rounds -------------------------------------------------------------------------

    def before_round(self, state: RateSearchState, done: int, planned: int) -> RateSearchState:
        """Return the state to go on with after `done` of all `planned` rounds."""
        for name, game, end in (
            ("race", self.race, self.end_race),
            ("duel", self.duel, self.end_duel),
        ):
            if name in state.parts and game is not None:
                assert game.before_round is not None
                left = game.before_round(state.parts[name], done, planned)
                if len(left.candidates) < len(state.parts[name].candidates):
                    # Losses of another number of candidates are not those of this one.
                    state = replace(state, watch=state.watch.moved({}))
                if left is not state.parts[name]:
                    state = replace(state, parts={**state.parts, name: left})
                if len(left.candidates) > 1:
                    return state
                state = end(state)
        return self.restore(state, done, planned)

    def end_race(self, state: RateSearchState) -> RateSearchState:
        """Go on with the duel of what won the race; alone, if there is none."""
        ((name, winner),) = state.parts["race"].candidates.items()
        rates = {name: state.rates[name]}
        if self.duel is None:
            return self.go_alone(state, winner, rates)
        raw = {FOLLOWED: self.form.raw(rates[name][FOLLOWED])}
        follower = state.parts["duel"].candidates[FOLLOWS].going_on(winner, raw)
        both = RaceState.begin({STAYS: winner, FOLLOWS: follower}, STAYS, Watch.begin({}))
        parts = {"alone": state.parts["alone"], "duel": both}
        return RateSearchState(parts, rates, state.watch)

    def end_duel(self, state: RateSearchState) -> RateSearchState:
        """Go on alone with what won the duel, at the rate that it has come to."""
        ((name, rates),) = state.rates.items()
        ((how, winner),) = state.parts["duel"].candidates.items()
        if how == STAYS:
            return self.go_alone(state, winner, state.rates)
        rate = self.form.value(winner.learned[FOLLOWED]).astype(rates[FOLLOWED].dtype)
        return self.go_alone(state, winner.inner, {name: {**rates, FOLLOWED: rate}})

    def go_alone(self, state: RateSearchState, winner: State, rates: Any) -> RateSearchState:
        """Drop everything but the winner, which trains on all examples from now on."""
        parts = {"alone": winner}
        return RateSearchState(parts, rates, state.watch.of_other_examples(parts))

    def restore(self, state: RateSearchState, done: int, planned: int) -> RateSearchState:
        """Return the state; where that got worse, the one before, at half the rates."""
        now, watch, times = state.watch.asked(state.parts, done, planned)
        if watch is state.watch:
            return state
        ((name, rates),) = state.rates.items()
        rates = {**rates, **{n: rates[n] * times for n in eased_by(rates)}}
        return RateSearchState(now, {name: rates}, watch)


def _word(rate: float) -> str:
    """A rate in the name of a candidate, which has no dot: 3e-2."""
    return f"{rate:g}" if rate >= 1 else f"{rate:.0e}".replace("e-0", "e-")


def _refuse_scaled(algorithm: Algorithm) -> None:
    """The factor of a schedule is not a rate: a grid of rates says nothing about it."""
    scheduled = names_of.schedules(algorithm.hyper)
    for name in names_of.paths(algorithm.hyper):
        rate = name.removesuffix(".factor")
        if name != rate and rate in scheduled and "learning_rate" in rate.split("."):
            raise ArgumentError.here(
                f"self_tuning({algorithm.round.name}) races rates that are numbers, and {rate!r} "
                "is a schedule with a factor. Make the algorithm with the schedule alone, which "
                "then stays as it is, or with a number; or learn the factor: "
                f"self_tuning(algorithm, learn={rate!r})."
            )


def _require_numbers(given: Mapping[str, Any], names: list[str]) -> None:
    """Refuse to begin with a schedule where a number was when the algorithm was made."""
    for name in names:
        if name not in given:
            raise ArgumentError.here(
                f"{name!r} is to start as a schedule, but it races with other rates, which are "
                f"numbers. Start from a number: algorithm.starting({{{name!r}: 0.1}}). Or give the "
                "schedule to the algorithm before it is tuned: it stays as it is then, and what is "
                "a number races."
            )


def _scaled(rates: dict[str, jax.Array], rate: float) -> dict[str, jax.Array]:
    """Another rate; of several, all by one factor, so that the largest one has it. If all are 0,
    each has it."""
    largest = functools.reduce(jnp.maximum, map(jnp.max, rates.values()))
    still = largest == 0
    return {
        n: jnp.where(still, rate, rate * (v / jnp.where(still, 1, largest))).astype(v.dtype)
        for n, v in rates.items()
    }
