"""The definition of an algorithm: pure functions, and hyperparameters passed as arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import jax.numpy as jnp

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm_checks import checked, checked_init, require_algorithm
from fedgrad.algorithms.hyper import replace as replaced
from fedgrad.algorithms.hyper import with_schedules
from fedgrad.clients.population import Population
from fedgrad.core.errors import ArgumentError, known_fields
from fedgrad.core.program import Executor, Program
from fedgrad.core.types import Hyper, Params, State

SHOWN = 8  # the most hyperparameters in a repr
DOES = ("learns", "finds")  # settings that the repr mentions


class Init(Protocol):
    """Returns the first state for a model; `hyper=None` means the algorithm's own hyperparameters.

    An `Algorithm` fills them in, so the function that it was made with always receives some.
    """

    def __call__(self, params: Params, hyper: Hyper | None = None) -> State: ...


@dataclass(frozen=True)
class _WithDefault:
    init: Init
    hyper: Hyper

    def __call__(self, params: Params, hyper: Hyper | None = None) -> State:
        return checked_init(self.init, params, self.hyper if hyper is None else hyper)


@known_fields
@dataclass(frozen=True, repr=False)
class Algorithm:
    """A federated training algorithm.

        state = algorithm.init(params)
        state, metrics = algorithm.round(state, algorithm.hyper, cohort, key)

    `round` is a `fg.Program`, so it can be planned, drawn, differentiated and run anywhere. Every
    state has the model as `state.params`. `hyper` is a nested dict of initial numbers; a function
    of the round number in it is a schedule. `starting` returns the algorithm with other ones.

    With a `client_init`, clients keep a state between rounds, too. `round` takes the states of the
    cohort's clients as `client_state`, and returns the new ones; `fg.fit` stores them for all
    clients:

        one = algorithm.client_init(params, number_of_all_clients)
        state, metrics, client_state = algorithm.round(state, hyper, cohort, key, client_state)

    With a `before_round`, the server inspects its state before every round and may continue with
    another one, in which entries of dicts are missing. This is how a race drops its losers: the
    rest is compiled, planned and sent without them.

        state = algorithm.before_round(state, rounds_done, rounds_planned)
    """

    init: Init
    round: Program
    hyper: Hyper
    # (params, batch) -> one loss per example; the objective.
    loss: Callable[..., Any]
    # Further cohorts of `round`, by argument; None: drawn from the training population.
    cohorts: Mapping[str, Population | None] = field(
        default_factory=lambda: MappingProxyType({}), hash=False
    )
    # (params, number of all clients) -> the first state of one; None: clients are stateless.
    client_init: Callable[[Any, int], Any] | None = None
    # (state, rounds done, rounds planned) -> the state to continue with.
    before_round: Callable[[Any, int, int], Any] | None = None
    # A JSON description: {"name": "FedAvgM", "client": {"batch_size": 20}}. It is saved with a run
    # and shows how runs differ.
    settings: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({}), hash=False, compare=False
    )
    # The hyperparameters that are learned during training, by dotted name.
    learns: tuple[str, ...] = ()
    # (populations by argument of `round`): raises if no client of a population could train it.
    require: Callable[[Mapping[str, Population]], None] | None = None

    def __post_init__(self) -> None:
        init = self.init.init if isinstance(self.init, _WithDefault) else self.init
        parts = (self.loss, self.cohorts, self.client_init, self.before_round)
        require_algorithm(init, self.round, self.hyper, *parts)
        hyper = with_schedules(self.hyper)
        object.__setattr__(self, "hyper", hyper)
        object.__setattr__(self, "init", _WithDefault(init, hyper))
        object.__setattr__(self, "round", checked(self.round, self.client_init is not None))

    @property
    def name(self) -> str:
        """The name of the algorithm: FedAvgM."""
        return self.settings.get("name") or self.round.name

    @property
    def described(self) -> dict[str, Any]:
        """The settings and the learned hyperparameters, as saved with a run."""
        learns = {"learns": ", ".join(self.learns)} if self.learns else {}
        return {**self.settings, **learns}

    def __repr__(self) -> str:
        known = {**names_of.paths(self.hyper), **names_of.schedules(self.hyper)}
        shown = [f"{name}={_short(value)}" for name, value in known.items()]
        if len(known) > SHOWN:  # e.g. all candidates of a race
            shown = [f"{len(known)} hyperparameters"]
        about = self.described
        does = [f"{word} {about[word]}" for word in DOES if word in about]
        name = f"{self.name} that {' and '.join(does)}" if does else self.name
        return f"Algorithm({', '.join([name, *shown])})"

    def starting(self, hyper: Mapping[str, Any]) -> "Algorithm":
        """Return the algorithm with other initial hyperparameters: all of them or only some, nested
        or by dotted name, `algorithm.starting({"server.learning_rate": 0.5})`."""
        return replace(self, hyper=replaced(self.hyper, hyper))

    def require_stateless_clients(self, what: str) -> None:
        """Refuse client states, where `what` does not support them."""
        if self.client_init is not None:
            raise ArgumentError.here(
                f"{self.name}: its clients keep a state between rounds, which {what} cannot "
                "undo or multiply. Take an algorithm without client_init, such as fg.fed_avg."
            )

    def require_one_form(self, what: str) -> None:
        """Refuse states that change their structure, where `what` needs a fixed one."""
        if self.before_round is not None:
            raise ArgumentError.here(
                f"{self.name}: it drops candidates between rounds, which {what} cannot "
                "follow. Do it with the candidates, before they race."
            )

    def on(self, executor: Executor) -> "Algorithm":
        """Return the algorithm with its rounds run by another executor."""
        return replace(self, round=self.round.on(executor))


def _short(value: Any) -> str:
    if isinstance(value, names_of.Schedule):
        return "a schedule"
    return f"{float(value):.6g}" if jnp.ndim(value) == 0 else f"{jnp.size(value)} numbers"


def last_of(state: State) -> Params:
    """Return the model that training continues from, which differs from `params` for an average."""
    return state.last if hasattr(state, "last") else state.params
