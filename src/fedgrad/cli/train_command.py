"""`fedgrad train`: train on a task with an algorithm, without learning hyperparameters."""

import argparse
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedgrad.cli import options as read
from fedgrad.cli.summary import Sent, of_one, show
from fedgrad.cli.training_options import (
    AUTO,
    TRAINED,
    Asked,
    Trained,
    add_asked,
    add_run,
    decided,
    introduce,
    listed_names,
    reporting,
    watched,
)
from fedgrad.reports import plans_section
from fedgrad.reports.run_source import FIXED
from fedgrad.reports.words import algorithm
from fedgrad.reports.write import write_run_report
from fedgrad.show.phases import Phases, phases

TRAIN = f"""\
Train on a task. With nothing more said the algorithm is {AUTO}, which finds its own learning rates;
the others train with the rates that they are given.

  fedgrad train synthetic
  fedgrad train mymodule:task --rounds 200
  fedgrad train synthetic --algorithm fedexp --rounds 50
  fedgrad train digits --algorithm fedadam --set server.learning_rate=0.03 --out runs/adam

{listed_names(TRAINED)}

The folder --out gets config.json, history.jsonl, a checkpoint and report.html. The same command
goes on where it was interrupted; with more --rounds it continues.
"""


@dataclass(frozen=True)
class Training(Asked):
    """The options of `fedgrad train`."""

    word: ClassVar[str] = "train"


def add_command(commands: Any) -> None:
    """Add the command `train`."""
    command = commands.add_parser(
        "train",
        help="train with any algorithm; by default with one that finds its own rates",
        description=TRAIN,
        usage="fedgrad train TASK [options]",
    )
    add_asked(command, TRAINED, usual=f"{AUTO}, which needs no rates")
    add_run(command)
    command.set_defaults(run=run)


def prepare(training: Training) -> Trained:
    """Build the training from its options; raise `ArgumentError` if they do not fit."""
    asked, made, algorithm = decided(training)
    return Trained(asked, made, algorithm, training.command())


def run(options: argparse.Namespace) -> int:
    """Train, write the report, and print a summary."""
    asked = Training.of(options)
    trained = prepare(asked)
    folder = options.out or asked.folder
    rounds = options.rounds or trained.task.defaults.rounds
    introduce(options, asked, trained.task)
    if watched(options):
        print(f"{algorithm(asked.algorithm)}, in {folder}", file=sys.stderr)

    @functools.cache  # computed only after training, because it takes a while for large models
    def planned() -> Phases:
        return phases(trained.algorithm, trained.first(), trained.cohort(), rounds)

    with reporting(folder, lambda: _keep(folder, planned())):
        trained(rounds, folder, options)
    path, found = write_run_report(folder)
    sent = Sent.of(planned())
    read.tell(options, path, of_one(found, sent), lambda: show(found, sent))
    return 0


def _keep(folder: Path, planned: Phases) -> None:
    """Write the plan of a round if all rounds share one; the rounds of a race differ."""
    if len(planned.phases) == 1:
        plans_section.keep(folder, {FIXED: planned.phases[0].plan})
