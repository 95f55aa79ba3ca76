"""`fedgrad tune`: train on a task with learned hyperparameters, and again with fixed ones."""

import argparse
import sys
from typing import Any

from fedgrad.ad.rules import MODES
from fedgrad.algorithms.parametrization import FORMS
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.cli import options as read
from fedgrad.cli.summary import of_each, show
from fedgrad.cli.training_options import (
    add_asked,
    add_run,
    introduce,
    listed_names,
    reporting,
    watched,
)
from fedgrad.cli.tuning_options import OPTIMIZERS, Tuning, prepare
from fedgrad.reports.run_source import FIXED, LEARNED
from fedgrad.reports.write import write_run_report

TUNE = f"""\
Train on a task with an algorithm that learns some of its own hyperparameters while it trains, by
their federated hypergradients; then train again with the same hyperparameters held fixed, on the
same clients in the same order, and compare. (fedgrad train trains once, and learns no rates.)

  fedgrad tune synthetic
  fedgrad tune mymodule:task --rounds 200
  fedgrad tune synthetic --rounds 100 --learn server.learning_rate --set server.learning_rate=0.3
  fedgrad tune digits --algorithm fedavg --learn client.learning_rate --schedule serial
  fedgrad tune synthetic --algorithm fedavg --weighting power --learn weight_exponent \\
      --hyper-optimizer adam

{listed_names(ALGORITHMS)}

The folder --out gets config.json, history.jsonl, a checkpoint, the same of the fixed run in fixed/,
and report.html. The same command goes on where it was interrupted; with more --rounds it continues.
"""


def add_command(commands: Any) -> None:
    """Add the command `tune`."""
    words = "train with hyperparameters that are learned, and with them fixed"
    command = commands.add_parser(
        "tune", help=words, description=TUNE, usage="fedgrad tune TASK [options]"
    )
    add_asked(command, ALGORITHMS, usual=Tuning.algorithm)
    add = command.add_argument_group("how it is learned").add_argument
    # fmt: off
    add("--learn", metavar="NAMES", type=read.names,
        help="hyperparameters to learn, like server.learning_rate,client; a branch means all "
        "below it (default: the server's learning rate and momentum)")
    add("--schedule", metavar="NAME", type=read.one_of("schedule", ("parallel", "serial")),
        help="parallel (default): in the round that trains; serial: in a second one after it")
    add("--gradient-from", metavar="WHO",
        type=read.one_of("gradient cohort", ("fresh", "same", "validation")),
        help="whose loss counts: fresh clients' (default), those that train (same), or those of "
        "the task's validation")
    add("--parametrization", metavar="FORM", type=read.forms,
        help=f"{', '.join(FORMS)}, for all or NAME=FORM,... (default: log for rates, linear for "
        "others; with --hyper-optimizer linear for all)")
    add("--bounds", metavar="NAME=LOW:HIGH", type=read.ranges, action=read.Merge,
        help="of a learned hyperparameter")
    add("--hyper-optimizer", metavar="NAME", type=read.one_of("optimizer", OPTIMIZERS),
        help=f"{' or '.join(OPTIMIZERS)} (default: adam)")
    add("--hyper-learning-rate", type=float, metavar="RATE", help="default: 0.01")
    add("--clip", type=float, metavar="NORM", help="the largest norm of the hypergradients")
    add("--normalize", action="store_true", help="each hypergradient to norm 1")
    add("--mode", metavar="NAME",
        type=read.one_of("mode", ("auto", *MODES)),
        help="of differentiation: auto (default, the cheapest), forward, reverse, mixed")
    add_run(command).add_argument(
        "--compare", action=argparse.BooleanOptionalAction, default=True,
        help="also train with everything fixed")
    # fmt: on
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train, write the report, and print a summary."""
    asked = Tuning.of(options)
    prepared = prepare(asked)
    folder = options.out or asked.folder
    rounds = options.rounds or prepared.task.defaults.rounds
    introduce(options, asked, prepared.task)
    with reporting(folder, lambda: prepared.keep_plans(folder)):
        for name in (LEARNED, FIXED) if options.compare else (LEARNED,):
            out = folder if name == LEARNED else folder / FIXED
            if watched(options):
                print(f"{name}, in {out}", file=sys.stderr)
            prepared.runs[name](rounds, out, options)
    path, found = write_run_report(folder)
    if not options.compare:
        found = found.alone()
    read.tell(options, path, of_each(found), lambda: show(found))
    return 0
