"""Federated automatic differentiation on JAX."""

from typing import Any as _Any

from fedgrad import aggregate, executors, federation, tasks
from fedgrad.ad.check_grads import GradientError, check_grads
from fedgrad.ad.directions import jvp, vjp
from fedgrad.ad.planner import CostModel
from fedgrad.ad.transforms import grad, hessian, jacobian, value_and_grad
from fedgrad.algorithms import hyper
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.fed_dyn import fed_dyn
from fedgrad.algorithms.fed_nova import fed_nova
from fedgrad.algorithms.fed_opt import fed_opt
from fedgrad.algorithms.local_training import LocalTraining, local_training
from fedgrad.algorithms.metrics import Metrics
from fedgrad.algorithms.objective import WithFixed, with_fixed
from fedgrad.algorithms.optimizer import Optimizer, optimizer
from fedgrad.algorithms.parametrization import Form, linear, log, logit
from fedgrad.algorithms.scaffold import scaffold
from fedgrad.algorithms.variants import (
    fed_adagrad,
    fed_adam,
    fed_avg,
    fed_avgm,
    fed_dog,
    fed_exp,
    fed_hyper,
    fed_hypergradient,
    fed_mechanic,
    fed_prodigy,
    fed_prox,
    fed_sgd,
    fed_yogi,
    per_fed_avg,
)
from fedgrad.clients.cohort import Cohort
from fedgrad.clients.examples import Examples
from fedgrad.clients.held_out import HeldOut
from fedgrad.clients.in_memory import cohort, population
from fedgrad.clients.on_disk import store, stored
from fedgrad.clients.population import Population
from fedgrad.core.errors import (
    ArgumentError,
    CohortError,
    FederatedError,
    PlacementError,
    PlanError,
    StoreError,
)
from fedgrad.core.graph import CLIENTS, Placement
from fedgrad.core.missing_names import refuse_name as _refuse_name
from fedgrad.core.program import Program, broadcast, client_key, mean, program, sum
from fedgrad.planning.audit import Audit
from fedgrad.planning.plan import Plan, Traffic, plan
from fedgrad.pytorch.modules import from_torch, into_torch
from fedgrad.reports.runs import compare, report
from fedgrad.show import charts
from fedgrad.show.explain import Explanation, explain
from fedgrad.show.phases import Phases
from fedgrad.training.best import Best, KeepBest, keep_best
from fedgrad.training.evaluation import Evaluation
from fedgrad.training.fit import Result, fit
from fedgrad.training.history import History
from fedgrad.training.load import load
from fedgrad.training.logger import CSV
from fedgrad.training.means import Ratio
from fedgrad.training.mlflow import MLflow
from fedgrad.training.run_folder import RunFolder, run_folder
from fedgrad.training.search import Search, Trials, grid_search, random_search
from fedgrad.training.space import Range, choice, log_uniform, uniform
from fedgrad.training.stopping import Stop, early_stop, non_finite
from fedgrad.training.tensorboard import TensorBoard
from fedgrad.training.wandb import WandB
from fedgrad.tuning.averaged import averaged
from fedgrad.tuning.fed_auto import fed_auto
from fedgrad.tuning.gradient_cohort import GradientCohort
from fedgrad.tuning.holding_out import holding_out
from fedgrad.tuning.horizon import Horizon
from fedgrad.tuning.race import race
from fedgrad.tuning.self_tuning import self_tuning
from fedgrad.tuning.side_by_side import side_by_side

__all__ = [
    "CLIENTS",
    "CSV",
    "Algorithm",
    "ArgumentError",
    "Audit",
    "Best",
    "Cohort",
    "CohortError",
    "CostModel",
    "Evaluation",
    "Examples",
    "Explanation",
    "FederatedError",
    "Form",
    "GradientCohort",
    "GradientError",
    "HeldOut",
    "History",
    "Horizon",
    "KeepBest",
    "LocalTraining",
    "MLflow",
    "Metrics",
    "Optimizer",
    "Phases",
    "Placement",
    "PlacementError",
    "Plan",
    "PlanError",
    "Population",
    "Program",
    "Range",
    "Ratio",
    "Result",
    "RunFolder",
    "Search",
    "Stop",
    "StoreError",
    "TensorBoard",
    "Traffic",
    "Trials",
    "WandB",
    "WithFixed",
    "aggregate",
    "averaged",
    "broadcast",
    "charts",
    "check_grads",
    "choice",
    "client_key",
    "cohort",
    "compare",
    "early_stop",
    "executors",
    "explain",
    "fed_adagrad",
    "fed_adam",
    "fed_auto",
    "fed_avg",
    "fed_avgm",
    "fed_dog",
    "fed_dyn",
    "fed_exp",
    "fed_hyper",
    "fed_hypergradient",
    "fed_mechanic",
    "fed_nova",
    "fed_opt",
    "fed_prodigy",
    "fed_prox",
    "fed_sgd",
    "fed_yogi",
    "federation",
    "fit",
    "from_torch",
    "grad",
    "grid_search",
    "hessian",
    "holding_out",
    "hyper",
    "into_torch",
    "jacobian",
    "jvp",
    "keep_best",
    "linear",
    "load",
    "local_training",
    "log",
    "log_uniform",
    "logit",
    "mean",
    "non_finite",
    "optimizer",
    "per_fed_avg",
    "plan",
    "population",
    "program",
    "race",
    "random_search",
    "report",
    "run_folder",
    "scaffold",
    "self_tuning",
    "side_by_side",
    "store",
    "stored",
    "sum",
    "tasks",
    "uniform",
    "value_and_grad",
    "vjp",
    "with_fixed",
]

__version__ = "0.2.0"


def __getattr__(name: str) -> _Any:
    """Refuse an unknown name; for names such as `fg.max`, explain why they do not exist."""
    _refuse_name(name, __all__)
