"""What `fedgrad tune` is asked for, and the training that follows from it."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
import optax

from fedgrad.algorithms import hyper as names_of
from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.local_training import local_training
from fedgrad.algorithms.parametrization import FORMS, Form
from fedgrad.algorithms.self_tuning import self_tuning
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.core.errors import ArgumentError, nearest
from fedgrad.plan.plan import Plan, plan
from fedgrad.report.run import FIXED, LEARNED
from fedgrad.tasks import Task, TaskError, task
from fedgrad.training.evaluation import Evaluation
from fedgrad.training.fit import fit
from fedgrad.training.run_folder import run_folder

# Learned if nothing is named, where the algorithm has them.
USUAL = ("server.learning_rate", "server.momentum")
OPTIMIZERS = {"adam": optax.adam, "sgd": optax.sgd}
EVALUATIONS = 20  # in a run, if nothing is said


@dataclass(frozen=True)
class Tuning:
    """Everything that decides what a run computes, except for how long it runs."""

    task: str
    task_option: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = "fedavgm"
    learn: list[str] = field(default_factory=list)
    set: Mapping[str, float] = field(default_factory=dict)
    cohort: int = 0  # the task's
    seed: int = 0
    batch_size: int = 0  # the task's
    epochs: int = 1
    weighting: str = "examples"
    schedule: str = "parallel"
    gradient_from: str = "fresh"
    parametrization: str | Mapping[str, str] = "linear"
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    hyper_optimizer: str = "sgd"
    hyper_learning_rate: float = 0.01
    clip: float | None = None
    normalize: bool = False
    mode: str = "auto"

    def command(self) -> list[str]:
        """The words that ask for this, with nothing that goes without saying."""
        words, usual = ["fedgrad", "tune", self.task], Tuning(self.task)
        for name in (f.name for f in fields(self)[1:]):
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            if value != getattr(usual, name):
                words += [flag] if value is True else [flag, _word(value)]
        return words


@dataclass(frozen=True)
class Prepared:
    """A task, an algorithm as it is and one that learns."""

    asked: Tuning  # with what it leaves open decided
    task: Task
    algorithms: Mapping[str, Algorithm]
    command: list[str]

    def train(
        self,
        name: str,
        rounds: int,
        out: Path,
        eval_every: int | None,
        resume: bool,
        progress: bool,
    ) -> None:
        """Run one of the algorithms; the clients it sees are those that the other one sees."""
        who = "train" if self.task.test is None else "test"
        evaluation = Evaluation(
            {"loss": self.task.loss, **self.task.metrics},
            getattr(self.task, who),
            every=eval_every or max(1, rounds // EVALUATIONS),
        )
        config = {**asdict(self.asked), "command": self.command}
        fit(
            self.algorithms[name],
            self.task.train,
            params=self._first(),
            rounds=rounds,
            cohort_size=self.asked.cohort,
            key=jax.random.key(self.asked.seed),
            evaluate={who: evaluation},
            out=run_folder(out, resume=resume, config={"tune": config}),
            progress=progress,
        )

    def plans(self) -> dict[str, Plan]:
        """What a training round does; every one does the same."""
        key = jax.random.key(self.asked.seed)
        cohort = self.task.train.sample(key, self.asked.cohort)
        return {
            name: plan(
                algorithm.round,
                algorithm.init(self._first()),
                algorithm.hyper,
                cohort,
                key,
                **dict.fromkeys(algorithm.cohorts, cohort),
            )
            for name, algorithm in self.algorithms.items()
        }

    def _first(self) -> Any:
        return self.task.init(jax.random.fold_in(jax.random.key(self.asked.seed), 0))


def prepare(asked: Tuning) -> Prepared:
    """Make what is asked for, or say what is wrong with it."""
    try:
        made = task(asked.task, **asked.task_option)
    except (TaskError, TypeError, ValueError) as error:
        raise ArgumentError(str(error)) from error
    command = asked.command()
    asked = replace(
        asked,
        batch_size=asked.batch_size or made.defaults.batch_size,
        cohort=asked.cohort or made.defaults.cohort_size,
    )
    make = ALGORITHMS[asked.algorithm]
    rate, size = made.defaults.client_learning_rate, asked.batch_size
    if "client" in inspect.signature(make).parameters:
        work: dict[str, Any] = {
            "client": local_training(rate, batch_size=size, epochs=asked.epochs)
        }
    elif asked.epochs == 1:
        work = {"batch_size": size}
    else:
        raise ArgumentError(f"--epochs has no effect: {asked.algorithm} has no local training.")
    fixed = make(made.loss, **work, weighting=asked.weighting)
    known = list(names_of.paths(fixed.hyper))
    learn = asked.learn or [name for name in USUAL if name in known]
    if not learn:
        raise ArgumentError(
            f"{asked.algorithm} has neither {' nor '.join(USUAL)}. Name what to learn with "
            f"--learn: {', '.join(known)}."
        )
    learned = self_tuning(
        fixed,
        _forms(asked, names_of.select(fixed.hyper, learn)),
        _optimizer(asked),
        schedule=asked.schedule,  # type: ignore[arg-type]
        gradient_from=_judges(asked, made),
        mode=asked.mode,  # type: ignore[arg-type]
    )
    algorithms = {LEARNED: learned.starting(asked.set), FIXED: fixed.starting(asked.set)}
    asked = replace(asked, learn=names_of.select(algorithms[FIXED].hyper, learn))
    return Prepared(asked, made, algorithms, command)


def _judges(asked: Tuning, made: Task) -> Any:
    """Whose loss says how good hyperparameters are."""
    if asked.gradient_from != "validation":
        return asked.gradient_from
    if made.validation is None:
        raise ArgumentError(
            f"--gradient-from validation: {asked.task} has no validation clients. Give it some, "
            "such as --task-option validation=0.1."
        )
    return made.validation


def _optimizer(asked: Tuning) -> optax.GradientTransformation:
    """Of the hyperparameters, each of which is one number."""
    steps = [OPTIMIZERS[asked.hyper_optimizer](asked.hyper_learning_rate)]
    if asked.clip is not None:
        steps.insert(0, optax.clip_by_global_norm(asked.clip))
    if asked.normalize:
        steps.insert(0, optax.scale_by_sign())
    return optax.chain(*steps)


def _forms(asked: Tuning, learn: list[str]) -> dict[str, Form]:
    """How each hyperparameter is learned."""
    kinds, bounds = asked.parametrization, asked.bounds
    kinds = dict.fromkeys(learn, kinds) if isinstance(kinds, str) else kinds
    for flag, given in (("--parametrization", kinds), ("--bounds", bounds)):
        for name in set(given) - set(learn):
            raise ArgumentError(f"{flag}: {name!r} is not learned.{nearest(name, learn)}")
    for kind in set(kinds.values()) - set(FORMS):
        raise ArgumentError(f"There is no parametrization {kind!r}.{nearest(kind, list(FORMS))}")
    return {n: FORMS[kinds.get(n, "linear")](*bounds.get(n, ())) for n in learn}


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_word(v)}" for name, v in value.items())
    if isinstance(value, tuple):
        return ":".join(map(_word, value))
    return ",".join(value) if isinstance(value, list) else str(value)
