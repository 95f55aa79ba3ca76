"""`fedgrad reproduce`: runs an experiment of the paper and reports figures, tables and claims."""

import argparse
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fedgrad.cli import options as read
from fedgrad.training.files import RunFolderError
from fedgrad_experiments import EXPERIMENTS, Reproduction, reproduce
from fedgrad_experiments import experiment as find
from fedgrad_experiments.page import write_page
from fedgrad_experiments.results import score


def _listed() -> str:
    """List every experiment with its subject."""
    return "\n".join(
        textwrap.fill(
            experiment.description.partition(":")[0],
            width=98,
            initial_indent=f"  {name:20} ",
            subsequent_indent=" " * 23,
        )
        for name, experiment in EXPERIMENTS.items()
    )


REPRODUCE = f"""\
Run an experiment of the paper, check each of its claims against what is measured here, and write
figures, tables and a report. Nothing is downloaded.

{chr(10).join(f"  fedgrad reproduce {name} --quick" for name in EXPERIMENTS)}
  fedgrad reproduce server-optimizer --task emnist --task-option data=emnist_all.sqlite
  fedgrad reproduce no-tuning --task digits,wine_x1

experiments:
{_listed()}

The folder --out gets results.json and results.npz, the figures, results.txt and report.html. The
same command goes on where it was interrupted.
"""
DOES_NOT_HOLD = 3
EVIDENCE = 240  # characters of evidence shown in a terminal
COLORS = {True: "green", False: "bold red", None: "dim"}


def add_command(commands: Any) -> None:
    """Add the command `reproduce`."""
    command = commands.add_parser(
        "reproduce",
        help="run an experiment of the paper and check its claims",
        description=REPRODUCE,
    )
    add = command.add_argument
    # fmt: off
    add("name", metavar="NAME", type=read.one_of("experiment", EXPERIMENTS), help="see above")
    group = command.add_mutually_exclusive_group()
    group.add_argument("--quick", dest="size", action="store_const", const="quick",
                       default="default", help="small: to see that it works")
    group.add_argument("--full", dest="size", action="store_const", const="full",
                       help="large: more seeds, more trials")
    group.add_argument("--paper", dest="size", action="store_const", const="paper",
                       help="on a task: the paper's models, trials and rounds (days)")
    add("--task", metavar="TASK", type=_task,
        help="on this task, of those of `fedgrad tune`, or module:name; of no-tuning, some of its "
        "own (a,b), which share a folder")
    add("--task-option", metavar="NAME=VALUE", type=read.pairs, action=read.Merge, default={},
        dest="task_options", help="of the task, like data=FILE or clients=100; repeatable")
    add("--out", type=Path, metavar="DIR", help="default: out/NAME, out/NAME-TASK-quick, ...")
    add("--check", action="store_true",
        help=f"exit with {DOES_NOT_HOLD} if a claim that was tested does not hold")
    # fmt: on
    read.add_output(command)
    command.set_defaults(run=run)


def _task(word: str) -> str:
    """Parse the name of a task, or of several of an experiment's own tasks."""
    own = [name for experiment in EXPERIMENTS.values() for name in experiment.tasks]
    return word if word and all(name in own for name in word.split(",")) else read.task(word)


def run(options: argparse.Namespace) -> int:
    """Run the experiment, write its report, and say which claims hold."""
    experiment, size = find(options.name, options.task, options.task_options), options.size
    named = None if experiment.tasks else options.task
    words = [experiment.name, named and named.replace(":", ".")]
    words.append(None if size == "default" else size)
    folder = options.out or Path("out") / "-".join(word for word in words if word)
    watched = not (options.quiet or options.json)
    try:
        shown = reproduce(experiment, folder, experiment.settings(size), progress=watched)
    except RunFolderError as error:
        error.add_note("(On the command line, out= is --out; remove the folder to start again.)")
        raise
    path = write_page(folder, experiment, shown)
    said = {
        "experiment": experiment.name,
        "task": options.task,
        "size": size,
        "folder": folder,
        "claims": [asdict(claim) for claim in shown.claims],
        "tables": [asdict(table) for table in shown.tables],
    }
    read.tell(options, path, said, lambda: _show(shown))
    failed = any(claim.holds is False for claim in shown.claims)
    return DOES_NOT_HOLD if options.check and failed else 0


def _show(shown: Reproduction) -> None:
    console = read.console()
    for one in shown.tables:
        table = _table(one.title)
        for i, name in enumerate(one.header):
            table.add_column(Text(name), justify="right" if i else "left", no_wrap=i == 0)
        for row in one.rows:
            table.add_row(*map(Text, row))
        console.print(table)
    claims = _table(score(shown.claims))
    claims.add_column("claim")
    claims.add_column("", no_wrap=True)
    for claim in shown.claims:
        verdict = Text(claim.verdict, style=COLORS[claim.holds])
        evidence = textwrap.shorten(claim.evidence, EVIDENCE, placeholder=" … (see the report)")
        claims.add_row(Text.assemble(claim.statement, (f"\n{evidence}", "dim")), verdict)
    console.print(claims)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
