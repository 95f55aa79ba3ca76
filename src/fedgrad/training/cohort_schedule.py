"""The cohort schedule: which clients take part in each round, and where the round runs."""

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
    """The cohorts of a round, by the name of the argument they are passed as, and its key."""

    cohorts: dict[str, Any]
    key: Key

    @property
    def further(self) -> dict[str, Any]:
        """The cohorts other than the one that trains."""
        return {name: cohort for name, cohort in self.cohorts.items() if name != "cohort"}


@dataclass(frozen=True)
class Draws:
    """The cohorts and keys of all rounds."""

    cohorts: Mapping[str, Callable[[int], Any]]
    keys: Callable[[int], Key]

    def __call__(self, round: int) -> Draw:
        """Return the cohorts and the key of a round."""
        return Draw({name: of(round) for name, of in self.cohorts.items()}, self.keys(round))

    def close(self) -> None:
        """Stop loading cohorts in the background."""
        for of in self.cohorts.values():
            getattr(of, "close", lambda: None)()


def draws(populations: Mapping[str, Population], sizes: Mapping[str, int], key: Key) -> "Draws":
    """Return a function from a round to its cohorts and key."""
    keys = round_keys(key, populations["cohort"].sharding)
    cohorts = {name: p.draws(key, sizes[name], role=name) for name, p in populations.items()}
    return Draws(cohorts, keys)


def usual_cohort(clients: int) -> int:
    """Return the default cohort size: a tenth of all clients, but at least 10 (or all, if there are
    fewer) and at most 50.

    Papers commonly use such sizes, and they are small enough to be fast.
    """
    return min(clients, max(10, min(50, clients // 10)))


def usual_key(key: Key | None) -> Key:
    """Return the given key, or a fixed default."""
    return jax.random.key(0) if key is None else key


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateWithClients:
    """The server's state and every client's state (rows, or handles to values on nodes)."""

    server: Any
    clients: Any

    @property
    def params(self) -> Params:
        """The model."""
        return self.server.params

    @property
    def last(self) -> Params:
        """The model that training continues from."""
        return last_of(self.server)


@dataclass(frozen=True)
class Course:
    """An algorithm, the clients it is trained on, and the schedule of their participation."""

    algorithm: Algorithm
    populations: Mapping[str, Population]  # by the argument of `round` that they are drawn for
    cohort_size: int
    clients: int  # per round, over all cohorts
    draw: Draws

    def close(self) -> None:
        """Release what loads cohorts in the background."""
        self.draw.close()

    @staticmethod
    def of(
        algorithm: Algorithm,
        clients: Population,
        cohort_size: int | None = None,
        key: Key | None = None,
    ) -> "Course":
        """Check the arguments, fill in the defaults, and build the course."""
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
        # A further population that is smaller than the cohort takes part as a whole.
        sizes = {name: min(cohort_size, len(there)) for name, there in populations.items()}
        if algorithm.round.executor is None and clients.executor is not None:
            algorithm = algorithm.on(clients.executor)
        drawn = draws(populations, sizes, key)
        return Course(algorithm, populations, cohort_size, sum(sizes.values()), drawn)

    def play(self, round: int, state: State, hyper: Hyper) -> tuple[Any, Any]:
        """Run a round and return the new state and the metrics."""
        drawn, algorithm, clients = self.draw(round), self.algorithm, self.populations["cohort"]
        args, more = self.arguments(state, hyper, drawn)
        found = algorithm.round(*args, **more)
        if algorithm.client_init is None:
            return found
        server, metrics, new = found
        every = clients.scatter(state.clients, drawn.cohorts["cohort"], new)
        return StateWithClients(server, every), metrics

    def told(self, state: State) -> list[str]:
        """Trace a round and return the names of its metrics; empty if the data are elsewhere."""
        if not all(clients.here for clients in self.populations.values()):
            return []
        args, more = self.arguments(state, self.algorithm.hyper, self.draw(1))
        found = jax.eval_shape(lambda a, m: self.algorithm.round(*a, **m), args, more)
        return list(require_metrics(found[1]).named())

    def before_round(self, state: State, round: int, planned: int) -> State:
        """Apply the algorithm's `before_round` to the state, if it has one."""
        if self.algorithm.before_round is None:
            return state
        server = state if self.algorithm.client_init is None else state.server
        found = self.algorithm.before_round(server, round - 1, planned)
        if found is server:
            return state
        return self.placed(found if server is state else replace(state, server=found))

    def arguments(self, state: State, hyper: Hyper, drawn: Draw) -> tuple[tuple[Any, ...], Any]:
        """Return the positional and the keyword arguments of a round."""
        cohort, more = drawn.cohorts["cohort"], drawn.further
        if self.algorithm.client_init is not None:
            own = self.populations["cohort"].gather(state.clients, cohort)
            state, more = state.server, {**more, "client_state": own}
        return (state, hyper, cohort, drawn.key), more

    def first(self, params: Params) -> Any:
        """Return the initial state, placed where the clients' data are."""
        require_model(params)
        clients, server = self.populations["cohort"], self.algorithm.init(params)
        if self.algorithm.client_init is None:
            return self.placed(server)
        one = self.algorithm.client_init(server.params, len(clients))
        return self.placed(StateWithClients(server, clients.begin(one)))

    def placed(self, tree: Any) -> Any:
        """Put states or hyperparameters where the clients' data are.

        Otherwise the first round would be compiled for other devices than all later ones.
        """

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
