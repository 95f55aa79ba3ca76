"""Automatic search for learning rates: `fg.self_tuning(algorithm)` without further arguments.

The algorithm first races against copies of itself at other rates. The winner then races against
itself with the server's learning rate following its hypergradient. The winner of that duel goes on
alone under a divergence monitor, because it now trains on more examples and its rates may be too
large for them. The races were designed on digits and Synthetic(1, 1) and then tested on other
tasks; the monitor was added because of CIFAR-100: docs/no-tuning.md.
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
# Client and server rates that race against the given ones, and how many candidates remain after
# which fraction of all rounds; the given rates stay until the last cut. For the first quarter of
# training, rates that are too large look better than good ones, so two other candidates must remain
# until after that. There is no client rate of 1: it may be stable when a client takes one step per
# round but not when it takes two, as happens once the examples that judged are trained on. The
# server rate of 0.1 is for servers like Adam. Examples that judge are not trained on, which costs
# good rates some progress, so judging stops at 0.45.
RATES = [
    {"client": client, "server": server}
    for client, server in [
        (0.01, 1.0), (0.01, 10.0), (0.03, 1.0), (0.03, 10.0), (0.1, 0.1), (0.1, 1.0), (0.1, 10.0)
    ]
]  # fmt: skip
CUTS = {0.05: 4, 0.15: 3, 0.35: 1}
# The hyperparameter that then follows its hypergradient, and how; it races against a constant rate.
FOLLOWED, STEP, HORIZON = "server.learning_rate", 0.03, Horizon(20, through="server")
STAYS, FOLLOWS = "stays", "follows"
DUEL = {0.35: 2, 0.45: 1}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RateSearchState:
    """The states of those phases (race, duel, alone) that are not over, the rates of each remaining
    candidate by dotted name, and the divergence monitor."""

    parts: dict[str, Any]
    rates: dict[str, dict[str, jax.Array]]
    watch: Watch

    @property
    def now(self) -> State:
        """The state of the current phase."""
        return next(self.parts[n] for n in ("race", "duel", "alone") if n in self.parts)

    @property
    def params(self) -> Params:
        """The averaged model."""
        return self.now.params

    @property
    def last(self) -> Params:
        """The model that training continues from, before averaging."""
        return last_of(self.now)


def rate_search(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with learning rates that it finds itself; see `fg.self_tuning`."""
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
    """An algorithm that races against itself at other rates, with the steps of its rounds."""

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
        """The dotted names of the learning rates of the clients and of the server."""
        known = names_of.paths(self.algorithm.hyper)
        return {branch: rates_of(known, branch) for branch in ("client", "server")}

    @functools.cached_property
    def others(self) -> dict[str, dict[str, float]]:
        """The rates that race against the given ones, by candidate name."""
        tried = [branch for branch in self.names if self.names[branch]]
        chosen = [{branch: rates[branch] for branch in tried} for rates in RATES]
        return {", ".join(f"{b} {_word(r)}" for b, r in rates.items()): rates for rates in chosen}

    @functools.cached_property
    def base(self) -> Algorithm:
        """The averaged algorithm, which every candidate trains."""
        return averaged(self.algorithm)

    @functools.cached_property
    def race(self) -> Algorithm:
        """The race of the given rates against others."""
        return race(dict.fromkeys((GIVEN, *self.others), self.base), CUTS, incumbent=GIVEN)

    @functools.cached_property
    def duel(self) -> Algorithm | None:
        """The race of the winner against itself with a server rate that follows a hypergradient."""
        if FOLLOWED not in self.names["server"]:
            return None
        # The rate follows the loss on held-out examples: on training examples, a model that fits
        # them all would ask for ever larger rates. Hypergradients see no further than their
        # horizon, so the follower has to win the duel and not merely promise improvement.
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
        """Return the first state, of the race and of the phases after it."""
        rates = self.rates(hyper)
        given = {n: names_of.replace(hyper, r) for n, r in rates.items()}
        parts = {
            "race": self.race.init(params, given),
            "alone": self.base.init(params, hyper),
        }
        if self.duel is not None:
            begin = self.duel.init(params, dict.fromkeys((STAYS, FOLLOWS), hyper))
            parts["duel"] = replace(begin, watch=Watch.begin({}))  # RateSearch monitors the winner
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
        """Run a round of the current phase: the race, the duel, or the winner alone."""
        hypers = {n: names_of.replace(hyper, rates) for n, rates in state.rates.items()}
        play = next(p for n, p in self._plays.items() if n in state.parts)
        parts, metrics, kept = play(state, hypers, *args)
        return replace(state, parts=parts, watch=state.watch.plus(metrics.loss, kept)), metrics

    @property
    def _plays(self) -> dict[str, Callable[..., tuple[dict[str, Any], Metrics, Any]]]:
        """The step of each phase, which returns (remaining phases, metrics, whether it is kept)."""
        return {"race": self.play_race, "duel": self.play_duel, "alone": self.play_alone}

    def play_race(self, state: RateSearchState, hypers: dict[str, Hyper], *args: Any) -> Any:
        """Run a round of the race between the remaining rates."""
        new, metrics = self.race.round(state.parts["race"], hypers, *args)
        return {**state.parts, "race": new}, metrics, True

    def play_duel(self, state: RateSearchState, hypers: dict[str, Hyper], *args: Any) -> Any:
        """Run a round of the winner against itself following its hypergradient."""
        assert self.duel is not None
        ((name, rates),) = state.rates.items()
        both = dict.fromkeys((STAYS, FOLLOWS), hypers[name])
        new, metrics = self.duel.round(state.parts["duel"], both, *args)
        # The duel is a race inside the winner of the first race.
        extra = {**inside(name, metrics.extra), f"race.won.{name}": jnp.float32(1)}
        return {**state.parts, "duel": new}, replace(metrics, hyper=rates, extra=extra), True

    def play_alone(self, state: RateSearchState, hypers: dict[str, Hyper], *args: Any) -> Any:
        """Run a round of the winner."""
        ((name, rates),) = state.rates.items()
        new, metrics = self.base.round(state.parts["alone"], hypers[name], *args)
        new, kept = undone(state.parts["alone"], new)
        extra = {**metrics.extra, f"race.won.{name}": kept.astype(jnp.float32)}
        return {"alone": new}, replace(metrics, hyper=rates, extra=extra), kept

    # --- between rounds -------------------------------------------------------------------------

    def before_round(self, state: RateSearchState, done: int, planned: int) -> RateSearchState:
        """Return the state to continue with after `done` of all `planned` rounds."""
        for name, game, end in (
            ("race", self.race, self.end_race),
            ("duel", self.duel, self.end_duel),
        ):
            if name in state.parts and game is not None:
                assert game.before_round is not None
                left = game.before_round(state.parts[name], done, planned)
                if len(left.candidates) < len(state.parts[name].candidates):
                    # Losses before and after a cut are not comparable.
                    state = replace(state, watch=state.watch.moved({}))
                if left is not state.parts[name]:
                    state = replace(state, parts={**state.parts, name: left})
                if len(left.candidates) > 1:
                    return state
                state = end(state)
        return self.restore(state, done, planned)

    def end_race(self, state: RateSearchState) -> RateSearchState:
        """Start the duel of the race's winner; without a duel, let the winner go on alone."""
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
        """Let the winner of the duel go on alone, at the rate that it has reached."""
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
        """Return the state; if training got worse, roll back and halve the rates."""
        now, watch, times = state.watch.asked(state.parts, done, planned)
        if watch is state.watch:
            return state
        ((name, rates),) = state.rates.items()
        rates = {**rates, **{n: rates[n] * times for n in eased_by(rates)}}
        return RateSearchState(now, {name: rates}, watch)


def _word(rate: float) -> str:
    """Format a rate for the name of a candidate, which has no dot: 3e-2."""
    return f"{rate:g}" if rate >= 1 else f"{rate:.0e}".replace("e-0", "e-")


def _refuse_scaled(algorithm: Algorithm) -> None:
    """Refuse the factor of a schedule, which is not a rate: the grid of rates does not apply."""
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
    """Refuse to start from a schedule where the algorithm was made with a number."""
    for name in names:
        if name not in given:
            raise ArgumentError.here(
                f"{name!r} is to start as a schedule, but it races with other rates, which are "
                f"numbers. Start from a number: algorithm.starting({{{name!r}: 0.1}}). Or give the "
                "schedule to the algorithm before it is tuned: it stays as it is then, and what is "
                "a number races."
            )


def _scaled(rates: dict[str, jax.Array], rate: float) -> dict[str, jax.Array]:
    """Return the rates scaled by one factor, so that the largest equals `rate`; if all are 0, set
    each to `rate`."""
    largest = functools.reduce(jnp.maximum, map(jnp.max, rates.values()))
    still = largest == 0
    return {
        n: jnp.where(still, rate, rate * (v / jnp.where(still, 1, largest))).astype(v.dtype)
        for n, v in rates.items()
    }
