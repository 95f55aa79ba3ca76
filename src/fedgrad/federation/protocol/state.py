"""What clients keep from one round to their next: on their nodes, each that of its own last round.

The server has handles only. A value has a name that is given once, so a node has what a round has
left there or it says that this is lost; it never has another round's instead.
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
    """The state that all clients begin with: they are sent it when they first take part."""

    def one(x: Any) -> NodeValue:
        array = jnp.asarray(x)
        return NodeValue(constant(array), array.shape, array.dtype, tuple(clients))

    return jax.tree.map(one, tree)


def gather(state: Any, cohort: Any) -> Any:
    """The state of the clients of a cohort, as an argument beside it."""
    handle = handles(cohort)[0]
    return choose(state, handle.clients, handle.wanted)


def scatter(state: Any, new: Any) -> Any:
    """The state of all clients, in which those of whom `new` is have that. What they had before,
    their nodes forget when no other state has it any more, such as one that was saved."""

    require_kept(state, new)

    def one(old: NodeValue, now: NodeValue) -> NodeValue:
        remotes = {client: old.remote.of(client) for client in old.clients}
        remotes |= {client: now.remote.of(client).alone(client) for client in now.clients}
        return replace(old, remote=Versions(remotes))

    return jax.tree.map(one, state, new)


def saved(state: Any) -> list[Any]:
    """Return what a checkpoint says of a state, as JSON: a part for each of its arrays."""
    return [part for handle in handles(state) for part in handle.saved()]


def restored(state: Any, found: list[Any]) -> Any:
    """Return a state that was saved; `state` is the one that clients began with."""
    leaves, structure = jax.tree.flatten(state)
    parts = zip(leaves, found, strict=True)
    return jax.tree.unflatten(structure, [leaf.restored([part]) for leaf, part in parts])
