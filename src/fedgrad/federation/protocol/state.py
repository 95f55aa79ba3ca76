"""State that clients keep between rounds: on their nodes, each from its own last round.

The server has only handles. Every value has a unique name, so a node either has what that round
left there or reports it as lost; it never substitutes the value of another round.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.clients.handles import handles
from fedgrad.clients.population import require_kept
from fedgrad.federation.protocol.node_values import (
    NodeValue,
    Versions,
    choose,
    constant,
)


def begin(tree: Any, clients: Sequence[int]) -> Any:
    """Return the initial state of all clients; clients are sent it when they first take part."""

    def one(x: Any) -> NodeValue:
        array = jnp.asarray(x)
        return NodeValue(constant(array), array.shape, array.dtype, tuple(clients))

    return jax.tree.map(one, tree)


def gather(state: Any, cohort: Any) -> Any:
    """Return the state of a cohort's clients, an argument to pass along with the cohort."""
    handle = handles(cohort)[0]
    return choose(state, handle.clients, handle.wanted)


def scatter(state: Any, new: Any) -> Any:
    """Return the state of all clients, updated with `new` for the clients that it covers. Nodes
    forget the previous values once no other state refers to them, such as a saved one."""

    require_kept(state, new)

    def one(old: NodeValue, now: NodeValue) -> NodeValue:
        remotes = {client: old.remote.of(client) for client in old.clients}
        remotes |= {client: now.remote.of(client).alone(client) for client in now.clients}
        return replace(old, remote=Versions(remotes))

    return jax.tree.map(one, state, new)


def saved(state: Any) -> list[Any]:
    """Return the JSON form of a state for a checkpoint: one entry for each of its arrays."""
    return [part for handle in handles(state) for part in handle.saved()]


def restored(state: Any, found: list[Any]) -> Any:
    """Return the state that was saved. `state` is the initial state of the clients."""
    leaves, structure = jax.tree.flatten(state)
    parts = zip(leaves, found, strict=True)
    return jax.tree.unflatten(structure, [leaf.restored([part]) for leaf, part in parts])
