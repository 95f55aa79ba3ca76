"""What a site runs: one process per node that stays, with JAX warm and the data loaded."""

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedgrad.core.errors import ArgumentError, nearest
from fedgrad.federation.connection import Connection, EngineError
from fedgrad.federation.node import Node

log = logging.getLogger("fedgrad.node")

_PATIENCE = 60.0
"""Seconds for which a SuperLink may be out of reach, or a place taken, before the first success."""


def load(name: str) -> Callable[[Any], Any]:
    """The function that `module:function` names; the current folder is searched too."""
    path, _, attribute = name.partition(":")
    if not path or not attribute:
        raise ArgumentError(f"Name the data as module:function, got {name!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise ArgumentError(f"There is no module {path!r} here: {error}.") from None
    except Exception as error:
        raise ArgumentError(f"{path} fails to import: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        known = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise ArgumentError(f"{path} has no {attribute!r}." + nearest(attribute, known))
    function: Callable[[Any], Any] = getattr(module, attribute)
    return function


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
    from fedgrad.federation.certificates import private_key
    from fedgrad.federation.flower_fleet import Fleet
    from fedgrad.federation.flower_http import Denied

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
