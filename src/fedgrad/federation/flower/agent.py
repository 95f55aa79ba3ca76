"""What a site runs: one process per node that stays, with JAX warm and the data loaded."""

import logging
import threading
import time
from pathlib import Path

from fedgrad.federation.flower.connection import Connection, EngineError
from fedgrad.federation.protocol.node import Node

log = logging.getLogger("fedgrad.node")

_PATIENCE = 60.0
"""Seconds for which a SuperLink may be out of reach, or a place taken, before the first success."""


def serve(
    node: Node,
    connection: Connection,
    key: str | Path | None,
    over: threading.Event,
    patience: float = _PATIENCE,
) -> None:
    """Answer requests until `over` is set. A SuperLink that goes away is waited for.

    `key` is the node's private key, by which it is known again, and whose public half the operator
    registered. Without one it makes one and registers it itself, which a SuperLink with node keys
    does not allow.
    """
    from fedgrad.federation.flower.fleet import Fleet
    from fedgrad.federation.flower.http import Denied
    from fedgrad.federation.flower.keys import private_key

    secret = None if key is None else private_key(key)
    first, begun, trouble = True, time.monotonic(), ""
    while not over.is_set():
        fleet = Fleet(connection, secret, node.policy.maximum_bytes)
        try:
            name = fleet.join()
            log.info("node %d is at %s", name, connection.address)
            first, trouble = False, ""
            fleet.serve(node.handle, over, node.memory.expire)
        except EngineError as failure:
            denied = isinstance(failure, Denied) and not failure.temporary
            if first and (denied or time.monotonic() - begun > patience):
                raise
            if str(failure) != trouble:
                trouble = str(failure)
                log.warning("%s Trying again.", trouble)
            over.wait(1.0)
        finally:
            fleet.leave()


def warm(node: Node) -> None:
    """Load the data and start JAX before the first request, so that mistakes show at once."""
    import jax.numpy as jnp

    parts = node.data.parts
    jnp.zeros(1).block_until_ready()
    log.info("data loaded%s, on %s", f": {', '.join(parts)}" if parts else "", node.platform)
