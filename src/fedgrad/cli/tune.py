"""`fedgrad tune`: train on a task with hyperparameters that are learned, and with them fixed."""

import argparse
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedgrad.ad.rules import MODES
from fedgrad.algorithms.fed_opt import WEIGHTINGS
from fedgrad.algorithms.parametrization import FORMS
from fedgrad.algorithms.variants import ALGORITHMS
from fedgrad.cli import options as read
from fedgrad.cli.summary import show, summary
from fedgrad.cli.tuning import OPTIMIZERS, Tuning, prepare
from fedgrad.core.errors import FederatedError
from fedgrad.report import plans
from fedgrad.report.run import FIXED, LEARNED
from fedgrad.report.write import write_run_report
from fedgrad.tasks import TASKS
from fedgrad.training.files import RunFolderError

TUNE = f"""\
Train on a task with an algorithm that learns some of its own hyperparameters while it trains, by
their federated hypergradients; then train again with the same hyperparameters held fixed, on the
same clients in the same order, and compare.

  fedgrad tune synthetic
  fedgrad tune synthetic --rounds 100 --learn server.learning_rate --set server.learning_rate=0.3
  fedgrad tune digits --algorithm fedavg --learn client.learning_rate --schedule serial
  fedgrad tune synthetic --algorithm fedavg --weighting power --learn weight_exponent \\
      --hyper-optimizer adam

tasks:       {", ".join(sorted(TASKS)[:5])},
             {", ".join(sorted(TASKS)[5:])},
             or module:name of a fg.tasks.Task of your own
algorithms:  {", ".join(sorted(ALGORITHMS)[:8])},
             {", ".join(sorted(ALGORITHMS)[8:])}

The folder --out gets config.json, history.jsonl, a checkpoint, the same of the fixed run in fixed/,
and report.html. The same command goes on where it was interrupted; with more --rounds it continues.
"""


def add_command(commands: Any) -> None:
    """Add `tune`."""
    words = "train with hyperparameters that are learned, and with them fixed"
    command = commands.add_parser(
        "tune", help=words, description=TUNE, usage="fedgrad tune TASK [options]"
    )
    add = command.add_argument
    # fmt: off
    add("task", metavar="TASK", type=read.task, help="what to learn")
    add("--algorithm", metavar="NAME", type=read.one_of("algorithm", ALGORITHMS),
        help="default: fedavgm")
    add("--learn", metavar="NAMES", type=read.names,
        help="hyperparameters to learn, like server.learning_rate,client; a branch means all "
        "below it (default: the server's learning rate and momentum)")
    add("--set", metavar="NAME=VALUE", type=read.numbers, action=read.Merge,
        help="where hyperparameters start; those that are not learned stay there")
    add("--rounds", type=read.whole, help="training rounds (default: the task's)")
    add("--cohort", type=read.whole, metavar="CLIENTS", help="in a round (default: the task's)")
    add("--seed", type=int, help="of clients, shuffling and the first model (default: 0)")
    add("--out", type=Path, metavar="DIR", help="run folder (default: out/TASK-ALGORITHM)")

    add = command.add_argument_group("local training").add_argument
    add("--batch-size", type=read.whole, metavar="EXAMPLES", help="default: the task's")
    add("--epochs", type=read.whole, help="of a client in a round (default: 1)")
    add("--weighting", metavar="NAME", type=read.one_of("weighting", WEIGHTINGS),
        help="of clients by their examples (default), uniform, or power: examples to a learnable "
        "weight_exponent")
    add("--task-option", metavar="NAME=VALUE", type=read.pairs, action=read.Merge,
        help="of the task, like clients=50 or seed=1")

    add = command.add_argument_group("how it is learned").add_argument
    add("--schedule", metavar="NAME", type=read.one_of("schedule", ("parallel", "serial")),
        help="parallel (default): in the round that trains; serial: in a second one after it")
    add("--gradient-from", metavar="WHO",
        type=read.one_of("gradient cohort", ("fresh", "same", "validation")),
        help="whose loss counts: fresh clients' (default), those that train (same), or those of "
        "the task's validation")
    add("--parametrization", metavar="FORM", type=read.forms,
        help=f"{', '.join(FORMS)} (default: linear), for all or NAME=FORM,...")
    add("--bounds", metavar="NAME=LOW:HIGH", type=read.ranges, action=read.Merge,
        help="of a learned hyperparameter")
    add("--hyper-optimizer", metavar="NAME", type=read.one_of("optimizer", OPTIMIZERS),
        help=f"{' or '.join(OPTIMIZERS)} (default: sgd)")
    add("--hyper-learning-rate", type=float, metavar="RATE", help="default: 0.01")
    add("--clip", type=float, metavar="NORM", help="the largest norm of the hypergradients")
    add("--normalize", action="store_true", help="each hypergradient to norm 1")
    add("--mode", metavar="NAME",
        type=read.one_of("mode", ("auto", *MODES)),
        help="of differentiation: auto (default, the cheapest), forward, reverse, mixed")

    add = command.add_argument_group("the run").add_argument
    add("--compare", action=argparse.BooleanOptionalAction, default=True,
        help="also train with everything fixed")
    add("--eval-every", type=read.whole, metavar="ROUNDS", help="default: 20 times in a run")
    add("--restart", action="store_true", help="do not go on with what is in --out")
    # fmt: on
    read.add_output(command)
    command.set_defaults(run=run)


def tuning(options: argparse.Namespace) -> Tuning:
    """What is asked for; what is not said is left to its default."""
    given = {f.name: getattr(options, f.name) for f in fields(Tuning)}
    return Tuning(**{name: value for name, value in given.items() if value is not None})


def run(options: argparse.Namespace) -> int:
    """Train, report, and say how it went."""
    asked = tuning(options)
    prepared = prepare(asked)
    folder = options.out or Path("out") / f"{asked.task.replace(':', '.')}-{asked.algorithm}"
    rounds = options.rounds or prepared.task.defaults.rounds
    watched = not (options.quiet or options.json)
    if watched and prepared.task.about:
        print(f"{asked.task}: {prepared.task.about}.", file=sys.stderr)
    try:
        for name in (LEARNED, FIXED) if options.compare else (LEARNED,):
            out = folder if name == LEARNED else folder / FIXED
            if watched:
                print(f"{name}, in {out}", file=sys.stderr)
            prepared.train(
                name, rounds, out, options.eval_every, resume=not options.restart, progress=watched
            )
    except RunFolderError as error:
        error.add_note("(On the command line, out= is --out and resume=False is --restart.)")
        raise
    except KeyboardInterrupt as stopped:
        with suppress(FederatedError):  # perhaps there is nothing to report yet
            plans.keep(folder, prepared.plans())
            stopped.add_note(f"What there is so far: {write_run_report(folder)[0]}")
        raise
    plans.keep(folder, prepared.plans())
    path, found = write_run_report(folder)
    if not options.compare:
        found = found.alone()
    read.tell(options, path, summary(found), lambda: show(found))
    return 0
