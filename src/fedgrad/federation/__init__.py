"""Real federations: what crosses the wire, what a site runs, and what it allows."""

from fedgrad.federation.data import Context
from fedgrad.federation.envelope import Envelope
from fedgrad.federation.errors import CohortMismatch, FederationError, NoAnswer, Refused
from fedgrad.federation.exported import programs
from fedgrad.federation.in_process import InProcess
from fedgrad.federation.node import Node
from fedgrad.federation.policy import Policy
from fedgrad.federation.population import NodePopulation
from fedgrad.federation.report import Report
from fedgrad.federation.signing import make_keys
from fedgrad.federation.stage_program import StageProgram
from fedgrad.federation.values import NodeValue

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
]
