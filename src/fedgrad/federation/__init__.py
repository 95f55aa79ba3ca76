"""Real federations: what crosses the wire, what a site runs, and what its policy allows."""

from importlib import import_module
from typing import Any

from fedgrad.federation.protocol import state
from fedgrad.federation.protocol.call_report import Report
from fedgrad.federation.protocol.envelope import Envelope, Transport, install_engine
from fedgrad.federation.protocol.exported import programs
from fedgrad.federation.protocol.federation_errors import (
    CohortMismatch,
    FederationError,
    NoAnswer,
    Refused,
)
from fedgrad.federation.protocol.in_process import InProcess
from fedgrad.federation.protocol.node import Node
from fedgrad.federation.protocol.node_data import Context
from fedgrad.federation.protocol.node_population import NodePopulation
from fedgrad.federation.protocol.node_values import NodeValue
from fedgrad.federation.protocol.policy import Policy
from fedgrad.federation.protocol.signing import make_keys
from fedgrad.federation.protocol.stage_program import StageProgram

__all__ = [
    "CohortMismatch",
    "Context",
    "Envelope",
    "FederationError",
    "InProcess",
    "NoAnswer",
    "Node",
    "NodePopulation",
    "NodeValue",
    "Policy",
    "Refused",
    "Report",
    "StageProgram",
    "make_keys",
    "programs",
    "state",
]


def _connect(address: str, **how: Any) -> Transport:
    from fedgrad.federation.flower.driver import connect  # Flower is an extra, and slow to import

    return connect(address, **how)


# For existing Flower apps. Their dependencies are extras, and slow to import.
_ON_DEMAND = {
    "InProcessGrid": "in_process_grid",
    "SelfTuning": "strategy",
    "derivatives": "derivatives",
    "torch_gradient": "torch_client",
    "torch_sgd": "torch_client",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedgrad.federation.flower.{_ON_DEMAND[name]}"), name)


install_engine(_connect)
