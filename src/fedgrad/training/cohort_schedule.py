"""The course of training: whom each round asks, and where it computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.algorithms.algorithm import Algorithm, last_of
from fedgrad.algorithms.metrics import require_metrics
from fedgrad.clients.handles import Handle
from fedgrad.clients.population import Population
from fedgrad.clients.sampling import round_keys
from fedgrad.core.errors import ArgumentError, require_whole
from fedgrad.core.lossless import require_lossless
from fedgrad.core.types import Hyper, Key, Params, State
from fedgrad.training.preflight import require_algorithm, require_model


@dataclass(frozen=True)
class Draw:
    """The cohorts of a round by the name of the argument they go to, and its key."""

    cohorts: dict[str, Any]
    key: Key

    @property
    def further(self) -> dict[str, Any]:
        """The cohorts beside the one that trains."""
        return {name: cohort for name, cohort in self.cohorts.items() if name != "cohort"}


@dataclass(frozen=True)
class Draws:
    """The cohorts and the keys of all rounds."""

    cohorts: Mapping[str, Callable[[int], Any]]
    keys: Callable[[int], Key]

    def __call__(self, round: int) -> Draw:
        """Those of a round."""
        return Draw({name: of(round) for name, of in self.cohorts.items()}, self.keys(round))

    def close(self) -> None:
        """No round comes after the last one: end what loads them in the background."""
        for of in self.cohorts.values():
            getattr(of, "close", lambda: None)()


def draws(populations: Mapping[str, Population], sizes: Mapping[str, int], key: Key) -> "Draws":
    """A function that gives the cohorts and the key of a round."""
    keys = round_keys(key, populations["cohort"].sharding)
    cohorts = {name: p.draws(key, sizes[name], role=name) for name, p in populations.items()}
    return Draws(cohorts, keys)


def usual_cohort(clients: int) -> int:
    """A tenth of all clients, but not fewer than 10 (or all, if these are not so many) and not more
    than 50: what papers take, and few enough to be quick."""
    return min(clients, max(10, min(50, clients // 10)))


def usual_key(key: Key | None) -> Key:
    """The key that is given; where none is, always the same."""
    return jax.random.key(0) if key is None else key


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateWithClients:
    """The server's state, and what every client keeps: rows, or handles to what is on nodes."""

    server: Any
    clients: Any

    @property
    def params(self) -> Params:
        """The model."""
        return self.server.params

    @property
    def last(self) -> Params:
        """The model that training goes on with."""
        return last_of(self.server)


@dataclass(frozen=True)
class Course:
    """An algorithm with the clients that it is trained on, and who of them takes part when."""

    algorithm: Algorithm
    populations: Mapping[str, Population]  # by the argument of a round that they are drawn for
    cohort_size: int
    clients: int  # in a round, in all cohorts
    draw: Draws

    def close(self) -> None:
        """After the last round."""
        self.draw.close()

    @staticmethod
    def of(
        algorithm: Algorithm,
        clients: Population,
        cohort_size: int | None = None,
        key: Key | None = None,
    ) -> "Course":
        """The course, or what is wrong with what is asked of it. What is not said is the usual."""
        require_algorithm(algorithm)
        populations = {"cohort": clients} | {
            name: clients if other is None else other for name, other in algorithm.cohorts.items()
        }
        for population in populations.values():
            if not isinstance(population, Population):
                raise ArgumentError.here(
                    f"Training takes a population, from which cohorts are sampled, got "
                    f"{type(population).__name__}. Write fg.population([client_0, client_1, ...])."
                )
        if algorithm.require is not None:
            algorithm.require(populations)
        cohort_size = usual_cohort(len(clients)) if cohort_size is None else cohort_size
        key = usual_key(key)
        require_whole("cohort_size", cohort_size, least=0)
        if not 1 <= cohort_size <= len(clients):
            raise ArgumentError.here(
                f"cohort_size={cohort_size!r}: there are {len(clients)} clients. Ask for 1 to "
                f"{len(clients)}."
            )
        # Of clients that are fewer, and do not train, all take part.
        sizes = {name: min(cohort_size, len(there)) for name, there in populations.items()}
        if algorithm.round.executor is None and clients.executor is not None:
            algorithm = algorithm.on(clients.executor)
        drawn = draws(populations, sizes, key)
        return Course(algorithm, populations, cohort_size, sum(sizes.values()), drawn)

    def play(self, round: int, state: State, hyper: Hyper) -> tuple[Any, Any]:
        """The state after a round, and its metrics."""
        drawn, algorithm, clients = self.draw(round), self.algorithm, self.populations["cohort"]
        args, more = self.arguments(state, hyper, drawn)
        found = algorithm.round(*args, **more)
        if algorithm.client_init is None:
            return found
        server, metrics, new = found
        every = clients.scatter(state.clients, drawn.cohorts["cohort"], new)
        return StateWithClients(server, every), metrics

    def told(self, state: State) -> list[str]:
        """The names of the metrics that a round gives; it is traced, where that can be done."""
        if not all(clients.here for clients in self.populations.values()):
            return []
        args, more = self.arguments(state, self.algorithm.hyper, self.draw(1))
        found = jax.eval_shape(lambda a, m: self.algorithm.round(*a, **m), args, more)
        return list(require_metrics(found[1]).named())

    def before_round(self, state: State, round: int, planned: int) -> State:
        """The state that this round begins with."""
        if self.algorithm.before_round is None:
            return state
        server = state if self.algorithm.client_init is None else state.server
        found = self.algorithm.before_round(server, round - 1, planned)
        if found is server:
            return state
        return self.placed(found if server is state else replace(state, server=found))

    def arguments(self, state: State, hyper: Hyper, drawn: Draw) -> tuple[tuple[Any, ...], Any]:
        """What a round is called with, by position and by name."""
        cohort, more = drawn.cohorts["cohort"], drawn.further
        if self.algorithm.client_init is not None:
            own = self.populations["cohort"].gather(state.clients, cohort)
            state, more = state.server, {**more, "client_state": own}
        return (state, hyper, cohort, drawn.key), more

    def first(self, params: Params) -> Any:
        """The state before the first round, where the clients' data are."""
        require_model(params)
        clients, server = self.populations["cohort"], self.algorithm.init(params)
        if self.algorithm.client_init is None:
            return self.placed(server)
        one = self.algorithm.client_init(server.params, len(clients))
        return self.placed(StateWithClients(server, clients.begin(one)))

    def placed(self, tree: Any) -> Any:
        """States or hyperparameters where the clients' data are. Otherwise the first round would be
        compiled for another place than all later ones."""

        require_lossless(tree, "States and hyperparameters")

        def array(leaf: Any) -> Any:
            try:
                return leaf if isinstance(leaf, jax.Array | Handle) else jnp.asarray(leaf)
            except TypeError:
                raise ArgumentError.here(
                    f"States and hyperparameters are made of arrays, found {type(leaf).__name__}."
                ) from None

        sharding = self.populations["cohort"].sharding
        tree = jax.tree.map(array, tree)
        return tree if sharding is None else jax.device_put(tree, sharding)
