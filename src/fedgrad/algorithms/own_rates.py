"""An algorithm that finds its own learning rates: `fg.self_tuning(algorithm)`, nothing more said.

First it races with itself at other rates. What won then races with itself while the server's rate
follows its hypergradient. What won that goes on as any other, but is watched: it trains on more
examples now, and its rates may be too large for that. The races were chosen on digits and
Synthetic(1, 1) and then tested on other tasks, the watch because of CIFAR-100: docs/no-tuning.md.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.averaged import averaged
from fedgrad.algorithms.following import following
from fedgrad.algorithms.gradient_cohort import GradientCohort
from fedgrad.algorithms.horizon import Horizon
from fedgrad.algorithms.metrics import Metrics
from fedgrad.algorithms.parametrization import learned, log
from fedgrad.algorithms.race import inside, race, stage
from fedgrad.algorithms.safeguards import undone
from fedgrad.algorithms.watch import Watch, eased_by, rates_of
from fedgrad.algorithms.wrapped import wrapped
from fedgrad.clients.held_out import A_FIFTH
from fedgrad.core.errors import ArgumentError
from fedgrad.core.types import Hyper, Params, State

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
class OwnRatesState:
    """What is to come of the race, of the duel and of going on alone; the rates of each candidate
    that is left, by dotted name; and what is known of losses."""

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


def own_rates(algorithm: Algorithm) -> Algorithm:
    """The algorithm at rates that it finds itself."""
    algorithm.require_stateless_clients("self_tuning")
    algorithm.require_one_form("self_tuning")
    if algorithm.cohorts:
        raise ArgumentError.here(
            f"The algorithm already takes a {next(iter(algorithm.cohorts))!r}, so it cannot be "
            "tuned (again)."
        )
    _refuse_scaled(algorithm)
    known = names_of.paths(algorithm.hyper)
    names = {branch: rates_of(known, branch) for branch in ("client", "server")}
    tried = [branch for branch in names if names[branch]]
    if not tried:
        raise ArgumentError.here(
            f"self_tuning({algorithm.round.name}): it has no learning rate that is a number, so "
            "there is nothing to race. Make its optimizers with fg.optimizer(optax.sgd, "
            "learning_rate=...), or name what to learn: self_tuning(algorithm, learn=...)."
        )
    base = averaged(algorithm)
    chosen = [{branch: rates[branch] for branch in tried} for rates in RATES]
    others = {", ".join(f"{b} {_word(r)}" for b, r in rates.items()): rates for rates in chosen}
    raced = race(dict.fromkeys((GIVEN, *others), base), CUTS, incumbent=GIVEN)
    follows = FOLLOWED in names["server"]
    form = learned(algorithm.hyper, {FOLLOWED: log()})[FOLLOWED] if follows else None
    duel = None
    if follows:
        # Examples that are held out say where the rate goes: those that train would say "faster"
        # without end where a model fits them all. Hypergradients see no further than their
        # horizon, so that what they lead to has to be better, not only promise to be.
        judges = GradientCohort("same", held_out=A_FIFTH)
        followed = following(
            base, {FOLLOWED: log()}, optax.adam(STEP), gradient_from=judges, horizon=HORIZON
        )
        duel = race({STAYS: base, FOLLOWS: followed}, DUEL, incumbent=STAYS)

    def init(params: Params, hyper: Hyper | None = None) -> OwnRatesState:
        given = names_of.paths(hyper)
        _require_numbers(given, [n for some in names.values() for n in some])
        rates = {GIVEN: {n: jnp.asarray(given[n]) for some in names.values() for n in some}}
        for name, other in others.items():
            rates[name] = dict(rates[GIVEN])
            for branch, rate in other.items():
                rates[name] |= _scaled({n: rates[GIVEN][n] for n in names[branch]}, rate)
        parts = {
            "race": raced.init(params, {n: names_of.replace(hyper, r) for n, r in rates.items()}),
            "alone": base.init(params, hyper),
        }
        if duel is not None:
            begin = duel.init(params, dict.fromkeys((STAYS, FOLLOWS), hyper))
            parts["duel"] = replace(begin, watch=Watch.begin({}))  # who wins it is watched here
        return OwnRatesState(parts, rates, Watch.begin({"alone": parts["alone"]}))

    def round(state: OwnRatesState, hyper: Hyper, *args: Any) -> tuple[OwnRatesState, Metrics]:
        parts, metrics, kept = play(state, hyper, *args)
        return replace(state, parts=parts, watch=state.watch.plus(metrics.loss, kept)), metrics

    def play(state: OwnRatesState, hyper: Hyper, *args: Any) -> tuple[dict[str, Any], Metrics, Any]:
        """What is left after a round, its metrics, and whether it was kept."""
        parts = state.parts
        hypers = {n: names_of.replace(hyper, rates) for n, rates in state.rates.items()}
        if "race" in parts:
            new, metrics = raced.round(parts["race"], hypers, *args)
            return {**parts, "race": new}, metrics, True
        ((name, rates),) = state.rates.items()
        if "duel" in parts:
            assert duel is not None
            both = dict.fromkeys((STAYS, FOLLOWS), hypers[name])
            new, metrics = duel.round(parts["duel"], both, *args)
            # It is a race inside of what won the first one.
            extra = {**inside(name, metrics.extra), f"race.won.{name}": jnp.float32(1)}
            return {**parts, "duel": new}, replace(metrics, hyper=rates, extra=extra), True
        new, metrics = base.round(parts["alone"], hypers[name], *args)
        new, kept = undone(parts["alone"], new)
        extra = {**metrics.extra, f"race.won.{name}": kept.astype(jnp.float32)}
        return {"alone": new}, replace(metrics, hyper=rates, extra=extra), kept

    def between(state: OwnRatesState, done: int, planned: int) -> OwnRatesState:
        for name, game, ends in (("race", raced, won), ("duel", duel, decided)):
            if name in state.parts and game is not None:
                assert game.between is not None
                left = game.between(state.parts[name], done, planned)
                if len(left.candidates) < len(state.parts[name].candidates):
                    # Losses of another number of candidates are not those of this one.
                    state = replace(state, watch=state.watch.moved({}))
                if left is not state.parts[name]:
                    state = replace(state, parts={**state.parts, name: left})
                if len(left.candidates) > 1:
                    return state
                state = ends(state)
        now, seen, times = state.watch.asked(state.parts, done, planned)
        if seen is state.watch:
            return state
        ((name, rates),) = state.rates.items()
        rates = {**rates, **{n: rates[n] * times for n in eased_by(rates)}}
        return OwnRatesState(now, {name: rates}, seen)

    def won(state: OwnRatesState) -> OwnRatesState:
        """The race is over."""
        ((name, winner),) = state.parts["race"].candidates.items()
        rates = {name: state.rates[name]}
        if form is None:
            return alone(state, winner, rates)
        raw = {FOLLOWED: form.raw(rates[name][FOLLOWED])}
        follower = state.parts["duel"].candidates[FOLLOWS].going_on(winner, raw)
        both = stage({STAYS: winner, FOLLOWS: follower}, STAYS, Watch.begin({}))
        parts = {"alone": state.parts["alone"], "duel": both}
        return OwnRatesState(parts, rates, state.watch)

    def decided(state: OwnRatesState) -> OwnRatesState:
        """So is the duel."""
        ((name, rates),) = state.rates.items()
        ((how, winner),) = state.parts["duel"].candidates.items()
        if how == STAYS:
            return alone(state, winner, state.rates)
        assert form is not None
        rate = form.value(winner.learned[FOLLOWED]).astype(rates[FOLLOWED].dtype)
        return alone(state, winner.inner, {name: {**rates, FOLLOWED: rate}})

    def alone(state: OwnRatesState, winner: State, rates: Any) -> OwnRatesState:
        parts = {"alone": winner}
        return OwnRatesState(parts, rates, state.watch.of_other_examples(parts))

    return replace(
        algorithm,
        init=init,
        round=wrapped(raced.round, round, f"self_tuning({algorithm.round.name})"),
        between=between,
    )


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
