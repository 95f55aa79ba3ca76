"""The options shared by `fedgrad train` and `fedgrad tune`, and the training they describe."""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import jax

from fedgrad.algorithms.algorithm import Algorithm
from fedgrad.algorithms.fed_opt import WEIGHTINGS
from fedgrad.algorithms.local_training import local_training
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.cli import options as read
from fedgrad.core.errors import ArgumentError, FederatedError
from fedgrad.reports.write import write_run_report
from fedgrad.tasks import TASKS, Task, TaskError, task
from fedgrad.training.evaluation import Evaluation
from fedgrad.training.files import RunFolderError
from fedgrad.training.fit import fit
from fedgrad.training.run_folder import run_folder
from fedgrad.tuning.fed_auto import fed_auto

EVALUATIONS = 20  # per run, by default
AUTO = "fedauto"  # chooses its own learning rates
TRAINED: Mapping[str, Callable[..., Algorithm]] = {AUTO: fed_auto, **ALGORITHMS}


@dataclass(frozen=True)
class Asked:
    """Everything that determines what a run computes, except for its length; the base class of the
    options of `fedgrad train` and `fedgrad tune`."""

    word: ClassVar[str]  # the name of the command

    task: str
    task_option: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = AUTO
    set: Mapping[str, float] = field(default_factory=dict)
    cohort: int = 0  # 0: the task's
    seed: int = 0
    batch_size: int = 0  # 0: the task's
    epochs: int = 1
    weighting: str = ""  # "": the algorithm's

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Read the options that were given; the others keep their defaults."""
        given = {f.name: getattr(options, f.name) for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def command(self) -> list[str]:
        """Return the command line for these options, without defaults."""
        words, usual = ["fedgrad", self.word, self.task], type(self)(self.task)
        for name in (f.name for f in fields(self)[1:]):
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            if value != getattr(usual, name):
                words += [flag] if value is True else [flag, _word(value)]
        return words

    @property
    def folder(self) -> Path:
        """The default run folder."""
        return Path("out") / f"{self.task.replace(':', '.')}-{self.algorithm}"


A = TypeVar("A", bound=Asked)


def add_asked(command: argparse.ArgumentParser, known: Mapping[str, Any], usual: str) -> None:
    """Add the options that say what is trained: `known` algorithms, with `usual` as the default."""
    add = command.add_argument
    # fmt: off
    add("task", metavar="TASK", type=read.task, help="what to learn: a name, or module:name")
    add("--algorithm", metavar="NAME", type=read.algorithm(known), help=f"default: {usual}")
    add("--set", metavar="NAME=VALUE", type=read.numbers, action=read.Merge,
        help="where hyperparameters start, like server.learning_rate=0.5")
    add("--rounds", type=read.whole, help="training rounds (default: the task's)")
    add("--cohort", type=read.whole, metavar="CLIENTS", help="in a round (default: the task's)")
    add("--seed", type=int, help="of clients, shuffling and the first model (default: 0)")
    add("--out", type=Path, metavar="DIR", help="run folder (default: out/TASK-ALGORITHM)")

    add = command.add_argument_group("local training").add_argument
    add("--batch-size", type=read.whole, metavar="EXAMPLES", help="default: the task's")
    add("--epochs", type=read.whole, help="of a client in a round (default: 1)")
    add("--weighting", metavar="NAME", type=read.one_of("weighting", WEIGHTINGS),
        help="of clients: by their examples, uniform, or power: examples to a learnable "
        "weight_exponent (default: the algorithm's)")
    add("--task-option", metavar="NAME=VALUE", type=read.pairs, action=read.Merge,
        help="of the task, like clients=50 or seed=1; of your own, what its function takes")
    # fmt: on


def add_run(command: argparse.ArgumentParser) -> Any:
    """Add the options that say how training is run."""
    group = command.add_argument_group("the run")
    add = group.add_argument
    add("--eval-every", type=read.whole, metavar="ROUNDS", help="default: 20 times in a run")
    again = group.add_mutually_exclusive_group().add_argument
    again("--restart", action="store_true", help="do not go on with what is in --out")
    again("--other-data", action="store_true", help="go on with it on other examples")
    add("--open", action="store_true", help="show the report in a browser while it trains")
    read.add_output(command)
    return group


def listed_names(known: Mapping[str, Any]) -> str:
    """Return the list of tasks and algorithms for a help text."""
    names = sorted(known)
    half = -(-len(names) // 2)
    return f"""\
tasks:       {", ".join(sorted(TASKS)[:5])},
             {", ".join(sorted(TASKS)[5:])},
             or one of your own: module:name of a fg.tasks.Task, or of a function that makes
             one; the current folder is searched. It needs train, init and loss only:
               task = fg.tasks.Task(train=fg.population(clients), init=init, loss=loss)
algorithms:  {", ".join(names[:half])},
             {", ".join(names[half:])}"""


def decided(asked: A) -> tuple[A, Task, Algorithm]:
    """Fill in the defaults of the options; return these, the task and the algorithm. Raises
    `ArgumentError` if the options do not fit together."""
    try:
        made = task(asked.task, **asked.task_option)
    except (TaskError, TypeError, ValueError) as error:
        raise ArgumentError(str(error)) from error
    make = TRAINED[asked.algorithm]
    takes = {name: one.default for name, one in inspect.signature(make).parameters.items()}
    if asked.weighting and "weighting" not in takes:
        raise ArgumentError(f"--weighting has no effect: {asked.algorithm} has its own.")
    asked = replace(
        asked,
        batch_size=asked.batch_size or made.defaults.batch_size,
        cohort=asked.cohort or made.defaults.cohort_size,
        weighting=asked.weighting or takes.get("weighting", ""),
    )
    if asked.cohort > (there := len(made.train)):
        raise ArgumentError(
            f"--cohort {asked.cohort}: there are {there} clients. Ask for 1 to {there}."
        )
    rate = made.defaults.client_learning_rate
    work: dict[str, Any] = {"batch_size": asked.batch_size}
    if "client" in takes or "epochs" in takes:
        work["epochs"] = asked.epochs
    elif asked.epochs != 1:
        raise ArgumentError(f"--epochs has no effect: {asked.algorithm} has no local training.")
    if "client" in takes:
        work = {"client": local_training(rate, **work)}
    if asked.weighting:
        work["weighting"] = asked.weighting
    return asked, made, make(made.loss, **work).starting(asked.set)


@dataclass(frozen=True)
class Trained:
    """A training of a task; its folder and length are given when it is called."""

    asked: Asked  # with defaults filled in
    task: Task
    algorithm: Algorithm
    command: list[str]

    def first(self) -> Any:
        """Return the initial model."""
        return self.task.init(jax.random.fold_in(jax.random.key(self.asked.seed), 0))

    def cohort(self) -> Any:
        """Return a cohort of the size used in a round."""
        return self.task.train.sample(jax.random.key(self.asked.seed), self.asked.cohort)

    def __call__(self, rounds: int, out: Path, options: argparse.Namespace) -> None:
        """Train. The clients of a round do not depend on the algorithm."""
        who = "train" if self.task.test is None else "test"
        evaluation = Evaluation(
            {"loss": self.task.loss, **self.task.metrics},
            getattr(self.task, who),
            every=options.eval_every or max(1, rounds // EVALUATIONS),
        )
        config = {**asdict(self.asked), "command": self.command}
        fit(
            self.algorithm,
            self.task.train,
            params=self.first(),
            rounds=rounds,
            cohort_size=self.asked.cohort,
            key=jax.random.key(self.asked.seed),
            evaluate={who: evaluation},
            out=run_folder(
                out,
                resume="other data" if options.other_data else not options.restart,
                config={self.asked.word: config},
                open=options.open and out.name != "fixed",  # the other report shows it
            ),
            progress=watched(options),
        )


def watched(options: argparse.Namespace) -> bool:
    """Return whether to show progress."""
    return not (options.quiet or options.json)


def introduce(options: argparse.Namespace, asked: Asked, made: Task) -> None:
    """Print what the task is."""
    if watched(options) and made.about:
        print(f"{asked.task}: {made.about}.", file=sys.stderr)


@contextmanager
def reporting(folder: Path, keep: Callable[[], None]) -> Iterator[None]:
    """Call `keep` after training; if training is interrupted, also write the report so far."""
    try:
        yield
    except RunFolderError as error:
        error.add_note(
            "(On the command line, out= is --out, resume=False is --restart and "
            'resume="other data" is --other-data.)'
        )
        raise
    except KeyboardInterrupt as stopped:
        with suppress(FederatedError):  # there may be nothing to report yet
            keep()
            stopped.add_note(f"What there is so far: {write_run_report(folder)[0]}")
        raise
    keep()


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_word(v)}" for name, v in value.items())
    if isinstance(value, tuple):
        return ":".join(map(_word, value))
    return ",".join(value) if isinstance(value, list) else str(value)
