"""Memory of the derivative by the client learning rate against the number of local steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hyper_round
import jax
import plots
from report import table
from timing import isolated

import fedgrad as fg

CLIENTS = 50
STEPS = (1, 3, 10, 30, 100, 300, 1000)
# curve: (mode of fedgrad, or of plain JAX; chunk of fedgrad)
CURVES: dict[str, tuple[str, int | None]] = {
    "fedgrad forward": ("forward", None),
    "fedgrad reverse": ("reverse", None),
    "fedgrad reverse, chunk=5": ("reverse", hyper_round.BLOCK),
    "jax forward": ("forward", None),
    "jax reverse": ("reverse", None),
}


def run(quick: bool) -> dict[str, Any]:
    """Temporary bytes of the compiled program, by curve and number of steps."""
    steps = STEPS[:-1:2] if quick else STEPS
    print(f"[memory] {len(CURVES)} curves of {len(steps)} points", flush=True)
    found = isolated("sections.memory", "measure", steps=list(steps))
    return {"clients": CLIENTS, "steps": list(steps), "bytes": found}


def measure(steps: list[int]) -> dict[str, list[int]]:
    """What XLA says each compiled program needs beside its arguments and results."""
    args = hyper_round.arguments(CLIENTS)
    argnum = hyper_round.HYPER["client lr"]
    way = {"forward": hyper_round.forward, "reverse": hyper_round.reverse}

    def temporary(curve: str, steps: int) -> int:
        mode, chunk = CURVES[curve]
        if curve.startswith("fedgrad"):
            program = hyper_round.with_fedgrad(steps, chunk)
            function = fg.value_and_grad(program, argnum, mode=mode)
        else:
            function = way[mode](hyper_round.by_hand(steps), argnum)
        compiled = jax.jit(lambda *a: function(*a)).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    return {curve: [temporary(curve, n) for n in steps] for curve in CURVES}


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = [
        [curve, *(f"{size / 2**20:.2f}" for size in sizes)]
        for curve, sizes in data["bytes"].items()
    ]
    return "\n\n".join(
        [
            f"{data['clients']} clients. MiB that the compiled program needs beside its arguments "
            "and results, by the number of local steps. Forward mode is constant, reverse mode "
            "is linear: it remembers every step. With `chunk` only one chunk of clients "
            "remembers at a time.",
            table(["derivative by the client lr", *map(str, data["steps"])], rows),
            "![Memory](memory.svg)",
        ]
    )


def plot(data: dict[str, Any], folder: Path) -> None:
    """Bytes against steps."""
    curves = {
        curve: (data["steps"], [size / 2**20 for size in sizes])
        for curve, sizes in data["bytes"].items()
    }
    plots.lines(folder / "memory", [("local steps", "temporary memory, MiB", curves)])
