"""`fedgrad data prepare`: convert the data of a task once to a folder that opens instantly."""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedgrad.cli import options as read
from fedgrad.tasks.preparing import PREPARED, prepare

DATA = """\
Convert the data of a task to a folder of clients that opens at once and is read from disk, a
round's clients at a time. It is given to the task as its data.

  fedgrad data prepare emnist --from emnist_all.sqlite.lzma --out data/emnist
  fedgrad tune emnist --task-option data=data/emnist

FILE is one of TFF's (sqlite, also lzma-compressed), LEAF's JSON or a folder of it, npz, or
`huggingface`. If this is interrupted, there is no folder.
"""


def add_command(commands: Any) -> None:
    """Add the command `data`."""
    command = commands.add_parser(
        "data",
        help="convert the data of a task once",
        description=DATA,
        usage="fedgrad data prepare NAME --from FILE --out FOLDER [options]",
    )
    add = command.add_argument
    # fmt: off
    add("action", metavar="prepare", type=read.one_of("action", ("prepare",)))
    add("name", metavar="NAME", type=read.one_of("task with files", PREPARED),
        help=", ".join(sorted(PREPARED)))
    add("--from", dest="source", metavar="FILE", required=True, help="what is converted")
    add("--out", type=Path, metavar="FOLDER", required=True, help="must not exist")
    add("--clients", type=read.whole, help="at most so many (of each part)")
    add("--validation", type=float, default=0.0, metavar="SHARE",
        help="of the training clients, set aside as validation clients (default: none)")
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    group = command.add_mutually_exclusive_group()
    group.add_argument("--quiet", action="store_true", help="print the folder only")
    group.add_argument("--json", action="store_true", help="print a summary as JSON only")
    # fmt: on
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert the data, and print the number of clients."""
    with _progress(shown=not (options.quiet or options.json)) as tick, _ending_cleanly():
        counts = prepare(
            options.name,
            options.source,
            options.out,
            clients=options.clients,
            validation=options.validation,
            seed=options.seed,
            tick=tick,
        )
    if options.json:
        read.print_json({"command": options.command, "out": options.out, "clients": counts})
    elif options.quiet:
        print(options.out)
    else:
        parts = ", ".join(f"{count:,} to {part}" for part, count in counts.items())
        read.console().print(f"{options.out}: {parts}", highlight=False, soft_wrap=True)
    return 0


@contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Turn SIGTERM into an interrupt, so that incomplete files of many gigabytes are removed."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals need the main thread
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(shown: bool) -> Iterator[Any]:
    """Show a progress bar of clients for each pass over them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bars = Progress(
        *columns, TimeElapsedColumn(), console=Console(file=sys.stderr), disable=not shown
    )
    known: dict[str, Any] = {}

    def tick(what: str, done: int, total: int | None) -> None:
        if what not in known:
            known[what] = bars.add_task(what, total=total)
        bars.update(known[what], completed=done, total=total)

    with bars:
        yield tick
