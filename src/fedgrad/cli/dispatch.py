"""Entry point: dispatches the command and maps its outcome to an exit code.

A command is a parser that sets `run`, a function of the options that returns an exit code.
"""

import argparse
import difflib
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fedgrad.cli import (
    data_command,
    explain_command,
    report_command,
    reproduce_command,
    train_command,
    tune_command,
)
from fedgrad.core.errors import ArgumentError, FederatedError, caller, nearest

FEDGRAD = """\
Federated automatic differentiation on JAX: training that tunes itself.

  fedgrad train mymodule:task                  train a task of your own, with no rate to choose
  fedgrad train synthetic --algorithm fedexp   or one that comes with it, with any algorithm
  fedgrad tune synthetic --rounds 100          FedAvgM that learns its own learning rate
  fedgrad reproduce client-weighting --quick   an experiment of the paper, its claims checked
  fedgrad report out/synthetic-fedavgm         make the report of a run again
  fedgrad explain examples.class_one:loss      what differentiating a program costs
  fedgrad data prepare emnist --from F --out D   convert the data of a task once

`fedgrad COMMAND --help` tells more.
"""
EXIT_CODES = """\
exit codes:
  0    it went well
  1    it failed on the way
  2    it was called in a way that cannot work
  3    a claim does not hold (reproduce --check)
  130  it was interrupted; the same command goes on from there
"""
COMMANDS = (
    train_command,
    tune_command,
    reproduce_command,
    report_command,
    explain_command,
    data_command,
)
WELL, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command given by these words, and return its exit code."""
    options = parse(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show
        try:
            return int(options.run(options))
        except ArgumentError as error:
            _say(error, _words(error))
            return MISUSED
        except FederatedError as error:
            _say(error, f"{type(error).__name__}: {_words(error)}")
            return FAILED
        except KeyboardInterrupt as error:
            _say(error, "interrupted.")
            return INTERRUPTED


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the words to options, whose `run` is the command; invalid words exit, as in
    argparse."""
    parser, commands = _parser()
    first = next((word for word in words if not word.startswith("-")), None)
    if first is not None and first not in commands:
        parser.error(f"There is no command {first!r}.{nearest(first, list(commands))}")
    options, unknown = parser.parse_known_args(list(words))
    if unknown:
        chosen = commands[options.command]
        chosen.error(_unknown(unknown[0], chosen))
    return options


class Parser(argparse.ArgumentParser):
    """A parser that keeps the formatting of descriptions and allows no abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, "allow_abbrev": False, **options})


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


def _parser() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(prog="fedgrad", description=FEDGRAD, epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    for module in COMMANDS:
        module.add_command(commands)
    _add_federation(commands)
    return parser, commands.choices


def _version() -> str:
    """Return the versions that a bug report needs."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"fedgrad {version('fedgrad')} (JAX {version('jax')}, Python {python})"


def _add_federation(commands: Any) -> None:
    """Add the commands of the federation, if that part is installed."""
    try:
        from fedgrad.federation.operate.commands import add_commands
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith("fedgrad.federation"):
            raise
        return
    add_commands(commands)


def _unknown(word: str, command: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"What is {word!r}? Nothing more is expected. Values with blanks go in quotes."
    flags = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", command.format_help())))
    close = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
    return f"There is no option {word!r}." + (f" Did you mean {close[0]!r}?" if close else "")


def _words(error: FederatedError) -> str:
    """Return the message without its line of user code, which here is only the entry point."""
    return str(error).removeprefix(f"{caller()}: ")


def _say(error: BaseException, message: str) -> None:
    print(f"fedgrad: {message}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(f"fedgrad: {note}", file=sys.stderr)


def _show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    print(f"fedgrad: {category.__name__}: {message}", file=sys.stderr)
