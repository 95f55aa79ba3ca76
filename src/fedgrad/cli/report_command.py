"""`fedgrad report`: write the report of a folder again."""

import argparse
from pathlib import Path
from typing import Any

from fedgrad.cli import options as read
from fedgrad.reports.write import write_report

REPORT = """\
Write report.html for a folder that was made by `fedgrad tune`, `fedgrad reproduce` or
fg.fit(..., out=DIR), also while the run goes on or after it was interrupted. It is one file that
works offline in any browser.

  fedgrad report out/synthetic-fedavgm
"""


def add_command(commands: Any) -> None:
    """Add the command `report`."""
    command = commands.add_parser(
        "report", help="make the report of a run or an experiment again", description=REPORT
    )
    command.add_argument("folder", metavar="DIR", type=Path, help="the folder of the run")
    command.add_argument("--open", action="store_true", help="show it in a browser")
    read.add_output(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the report, and print its path."""
    path = write_report(options.folder, options.open)
    read.tell(options, path, {"folder": options.folder}, lambda: None)
    return 0
