"""The options of `fedgrad tune`, and the two trainings they describe."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import optax

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.parametrization import FORMS, Form, linear, usual
from fedgrad.cli.training_options import Asked, Trained, decided
from fedgrad.core.errors import ArgumentError, nearest
from fedgrad.planning.plan import Plan, plan
from fedgrad.reports import plans_section
from fedgrad.reports.run_source import FIXED, LEARNED
from fedgrad.tasks import Task
from fedgrad.tuning.self_tuning import self_tuning

# Learned by default, if the algorithm has them.
USUAL = ("server.learning_rate", "server.momentum")
OPTIMIZERS = {"adam": optax.adam, "sgd": optax.sgd}


@dataclass(frozen=True)
class Tuning(Asked):
    """The options of `fedgrad tune`."""

    word: ClassVar[str] = "tune"

    algorithm: str = "fedavgm"
    learn: list[str] = field(default_factory=list)
    schedule: str = "parallel"
    gradient_from: str = "fresh"
    parametrization: str | Mapping[str, str] | None = None
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    hyper_optimizer: str | None = None
    hyper_learning_rate: float = 0.01
    clip: float | None = None
    normalize: bool = False
    mode: str = "auto"


@dataclass(frozen=True)
class Prepared:
    """The learned and the fixed training of a task."""

    runs: Mapping[str, Trained]  # "learned" and "fixed"

    @property
    def asked(self) -> Tuning:
        """The options, with defaults filled in."""
        found = self.runs[LEARNED].asked
        assert isinstance(found, Tuning)
        return found

    @property
    def task(self) -> Task:
        """The task of both trainings."""
        return self.runs[LEARNED].task

    def plans(self) -> dict[str, Plan]:
        """Return the plan of a training round for each run; all of its rounds share one."""
        key, cohort = jax.random.key(self.asked.seed), self.runs[LEARNED].cohort()
        return {
            name: plan(
                one.algorithm.round,
                one.algorithm.init(one.first()),
                one.algorithm.hyper,
                cohort,
                key,
                **dict.fromkeys(one.algorithm.cohorts, cohort),
            )
            for name, one in self.runs.items()
        }

    def keep_plans(self, folder: Path) -> None:
        """Write the plans to a folder, for its report."""
        plans_section.keep(folder, self.plans())


def prepare(tuning: Tuning) -> Prepared:
    """Build both trainings from the options; raise `ArgumentError` if they do not fit."""
    asked, made, fixed = decided(tuning)
    fixed.require_stateless_clients("self_tuning")
    known = list(names_of.paths(fixed.hyper))
    learn = asked.learn or [name for name in USUAL if name in known]
    if not learn:
        raise ArgumentError(
            f"{asked.algorithm} has neither {' nor '.join(USUAL)}. Name what to learn with "
            f"--learn: {', '.join(known)}. Or train it as it is: fedgrad train {asked.task} "
            f"--algorithm {asked.algorithm}."
        )
    asked = replace(asked, learn=names_of.select(fixed.hyper, learn))
    learned = self_tuning(
        fixed,
        _forms(asked, asked.learn),
        _optimizer(asked),
        schedule=asked.schedule,  # type: ignore[arg-type]
        gradient_from=_judges(asked, made),
        mode=asked.mode,  # type: ignore[arg-type]
    )
    algorithms = {LEARNED: learned, FIXED: fixed}
    return Prepared(
        {name: Trained(asked, made, one, tuning.command()) for name, one in algorithms.items()}
    )


def _judges(asked: Tuning, made: Task) -> Any:
    """Return the clients whose loss judges the hyperparameters."""
    if asked.gradient_from != "validation":
        return asked.gradient_from
    if made.validation is None:
        raise ArgumentError(
            f"--gradient-from validation: {asked.task} has no validation clients. Give it some, "
            "such as --task-option validation=0.1."
        )
    return made.validation


def _optimizer(asked: Tuning) -> optax.GradientTransformation:
    """Return the optimizer of the hyperparameters, each of which is a scalar."""
    steps = [OPTIMIZERS[asked.hyper_optimizer or "adam"](asked.hyper_learning_rate)]
    if asked.clip is not None:
        steps.insert(0, optax.clip_by_global_norm(asked.clip))
    if asked.normalize:
        steps.insert(0, optax.scale_by_sign())
    return optax.chain(*steps)


def _forms(asked: Tuning, learn: list[str]) -> dict[str, Form]:
    """Return the parametrization of each learned hyperparameter."""
    kinds, bounds = asked.parametrization or {}, asked.bounds
    kinds = dict.fromkeys(learn, kinds) if isinstance(kinds, str) else kinds
    otherwise = usual if asked.hyper_optimizer is None else linear  # as in fg.self_tuning
    for flag, given in (("--parametrization", kinds), ("--bounds", bounds)):
        for name in set(given) - set(learn):
            raise ArgumentError(f"{flag}: {name!r} is not learned.{nearest(name, learn)}")
    for kind in set(kinds.values()) - set(FORMS):
        raise ArgumentError(f"There is no parametrization {kind!r}.{nearest(kind, list(FORMS))}")
    forms = {n: FORMS[kinds[n]] if n in kinds else otherwise for n in learn}
    return {n: form(*bounds.get(n, ())) for n, form in forms.items()}
