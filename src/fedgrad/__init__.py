"""Federated automatic differentiation on JAX."""

from fedgrad import executors
from fedgrad.ad.explain import explain
from fedgrad.ad.planner import CostModel
from fedgrad.ad.transforms import grad, jacobian, jvp, value_and_grad, vjp
from fedgrad.core.cohort import Cohort, Population, cohort, population
from fedgrad.core.errors import (
    ArgumentError,
    CohortError,
    FederatedError,
    PlacementError,
    PlanError,
)
from fedgrad.core.examples import Examples
from fedgrad.core.operations import broadcast, client_key, mean, sum
from fedgrad.core.placement import CLIENTS, Placement
from fedgrad.core.program import Program, program
from fedgrad.plan.plan import Plan, plan

__version__ = "0.1.0"
