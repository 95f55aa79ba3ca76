"""`fedgrad explain`: the cost of differentiating a program."""

import argparse
from typing import Any

from rich.console import Console
from rich.text import Text

from fedgrad.ad.planner import CostModel
from fedgrad.core.errors import ArgumentError
from fedgrad.core.imported import attribute_of, imported
from fedgrad.core.program import Program
from fedgrad.show.explain import explain

EXPLAIN = """\
Show what differentiating a program costs, mode by mode, before anything runs.

PROGRAM is module:name of a program (the current folder is searched too). Its arguments come from a
function or tuple in the same module, by default called `arguments`; arrays, cohorts and
jax.ShapeDtypeStruct will do.

  fedgrad explain examples.class_one:loss
  fedgrad explain examples.distillation:loss --argnums x --up 5 --readdress
"""


def add_command(commands: Any) -> None:
    """Add the command `explain`."""
    command = commands.add_parser(
        "explain", help="what differentiating a program costs in each mode", description=EXPLAIN
    )
    command.add_argument("program", metavar="PROGRAM", help="module:name")
    command.add_argument("--arguments", default="arguments", help="name in the module")
    command.add_argument("--argnums", default="0", help="argument to differentiate by: 0, or x,y")
    command.add_argument("--down", type=float, default=1.0, help="price of a byte down")
    command.add_argument("--up", type=float, default=1.0, help="price of a byte up")
    command.add_argument("--round-trip", type=float, default=0.0, help="price of a round")
    command.add_argument("--readdress", action="store_true", help="clients can be asked again")
    command.add_argument("--client-memory", type=int, help="bytes a client can keep")
    command.add_argument("--draw", metavar="FILE", help="also write the program's graph as SVG")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan of the program and the table of modes."""
    module, program = imported(options.program, "a program as module:name")
    if not isinstance(program, Program):
        raise ArgumentError(f"{options.program} is not a program but {type(program).__name__}.")
    arguments = attribute_of(module, options.arguments)
    arguments = arguments() if callable(arguments) else arguments
    if not isinstance(arguments, tuple | list):
        kind = type(arguments).__name__
        raise ArgumentError(f"{options.arguments} gives {kind}; make it a tuple of arguments.")
    argnums: list[Any] = [
        int(a) if a.lstrip("-").isdigit() else a for a in options.argnums.split(",")
    ]
    cost = CostModel(
        options.down, options.up, options.round_trip, options.readdress, options.client_memory
    )
    explanation = explain(
        program, *arguments, argnums=argnums[0] if len(argnums) == 1 else argnums, cost=cost
    )
    console = Console()
    console.print(Text(str(explanation.program)))
    console.print(explanation)
    if options.draw:
        explanation.program.draw(options.draw)
    return 0
