"""What clients keep from one round to their next: on their nodes, each that of its own last round.

The server has handles only. A value has a name that is given once, so a node has what a round has
left there or it says that this is lost; it never has another round's instead.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from fedgrad.clients.population import require_kept
from fedgrad.federation.protocol.node_values import (
    NodeValue,
    Remote,
    Versions,
    choose,
    constant,
    handles,
)

Saved = list[dict[str, list[Any]]]
"""Of each array of a state, by client: where its value is, and what is declared of it."""


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


def left(state: Any) -> None:
    """Nodes keep what this state has when its handles are gone, until it is too old for them: for
    who has saved it."""

    def leave(remote: Remote) -> None:
        for held in (*remote.holds, *remote.kept.values()):
            leave(held) if isinstance(held, Remote) else held.end.detach()

    for handle in handles(state):
        for client in handle.clients:
            leave(handle.remote.of(client))


def saved(state: Any) -> Saved:
    """What a checkpoint has to say of a state; clients that are as they began are not in it."""
    return [
        {
            str(client): [remote.source, remote.declared]
            for client in handle.clients
            if (remote := handle.remote.of(client)).source[0] != "constant"
        }
        for handle in handles(state)
    ]


def restored(state: Any, found: Saved) -> Any:
    """A state that was saved; `state` is the one that clients began with."""
    leaves, structure = jax.tree.flatten(state)
    new = []
    for leaf, of in zip(leaves, found, strict=True):
        remotes = {int(client): Remote.read(*written) for client, written in of.items()}
        known = {client: leaf.remote.of(client) for client in leaf.clients}
        new.append(replace(leaf, remote=Versions(known | remotes)) if remotes else leaf)
    return jax.tree.unflatten(structure, new)
