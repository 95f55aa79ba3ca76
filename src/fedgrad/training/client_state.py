"""What clients keep between rounds: kept for all of them, of whom each round has a few.

Those of a federation keep it on their nodes, and here are handles to it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.clients.cohort import Population
from fedgrad.clients.sampling import Clients, Draw
from fedgrad.core.errors import ArgumentError
from fedgrad.federation.protocol import state as on_nodes
from fedgrad.federation.protocol.population import NodePopulation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateWithClients:
    """The server's state, and that of every client."""

    server: Any
    clients: Any  # stacked: a row for each client of the population

    @property
    def params(self) -> Any:
        """The model."""
        return self.server.params


def first_state(algorithm: Algorithm, params: Any, clients: Clients) -> Any:
    """What a run starts from: the algorithm's first state, with that of its clients if any."""
    server = algorithm.init(params)
    if algorithm.client_init is None:
        return server
    one = algorithm.client_init(server.params, len(clients))
    if isinstance(clients, NodePopulation):
        every = on_nodes.begin(one, np.asarray(clients.everyone.index).tolist())
    elif isinstance(clients, Population):
        n = len(clients)
        every = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *jnp.shape(leaf))), one)
    else:
        raise ArgumentError.here(
            f"{algorithm.round.name}: its clients keep a state between rounds, and nobody knows "
            f"how to keep that of {clients!r}. Give a population, or that of a federation."
        )
    return StateWithClients(server, every)


def arguments(
    algorithm: Algorithm, state: Any, hyper: Any, drawn: Draw
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a round is called with, by position and by name."""
    cohort, more = drawn.cohorts["cohort"], drawn.further
    if algorithm.client_init is None:
        return (state, hyper, cohort, drawn.key), more
    there = on_nodes.handles(state.clients)
    own = on_nodes.gather(state.clients, cohort) if there else _rows(state.clients, cohort.index)
    return (state.server, hyper, cohort, drawn.key), {**more, "client_state": own}


def play(algorithm: Algorithm, state: Any, hyper: Any, drawn: Draw) -> tuple[Any, Any]:
    """A round: (the state after it, metrics)."""
    args, more = arguments(algorithm, state, hyper, drawn)
    found = algorithm.round(*args, **more)
    if algorithm.client_init is None:
        return found
    if not isinstance(found, tuple) or len(found) != 3:
        raise ArgumentError.here(
            f"{algorithm.round.name}: with a client_init, a round gives (state, metrics, "
            "client_state)."
        )
    server, metrics, own = found
    if on_nodes.handles(own):
        return StateWithClients(server, on_nodes.scatter(state.clients, own)), metrics
    index = drawn.cohorts["cohort"].index
    return StateWithClients(server, _with_rows(state.clients, index, own)), metrics


@jax.jit
def _rows(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


@jax.jit
def _with_rows(tree: Any, index: Any, rows: Any) -> Any:
    return jax.tree.map(lambda leaf, new: leaf.at[index].set(new.astype(leaf.dtype)), tree, rows)
