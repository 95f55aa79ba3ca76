"""`fedgrad reproduce`: a command of fedgrad-experiments, or a hint to install it."""

import argparse
from typing import Any

from fedgrad.core.errors import MissingExtra
from fedgrad.reports.write import from_experiments


def add_command(commands: Any) -> None:
    """Add the command `reproduce`."""
    try:
        add = from_experiments("command")
    except MissingExtra:
        # With a prefix that no word has, even --help is answered with the hint.
        command = commands.add_parser(
            "reproduce",
            help="run an experiment of the paper (not installed)",
            prefix_chars="\0",
            add_help=False,
        )
        command.add_argument("words", nargs="*")
        command.set_defaults(run=refuse)
    else:
        add(commands)


def refuse(options: argparse.Namespace) -> int:
    """Raise the error that says what to install."""
    from_experiments("command")
    return 0  # it was installed in the meantime
