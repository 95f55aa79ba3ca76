"""Times of functions that take turns in one process, and functions in a process of their own."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Times:
    """Seconds of every repetition, by the clock and of the processor (all threads)."""

    wall: list[float]
    cpu: list[float]

    def summary(self) -> dict[str, float]:
        """Medians in milliseconds."""
        middle = {"ms": self.wall, "cpu_ms": self.cpu}
        return {name: statistics.median(seconds) * 1e3 for name, seconds in middle.items()}

    def minus(self, other: Times) -> Times:
        """Repetition by repetition."""
        wall = [a - b for a, b in zip(self.wall, other.wall, strict=True)]
        return Times(wall, [a - b for a, b in zip(self.cpu, other.cpu, strict=True)])

    def ratio(self, other: Times) -> dict[str, float]:
        """The median over repetitions of this / other: neighbors in time share their noise."""
        return {"wall": _paired(self.wall, other.wall), "cpu": _paired(self.cpu, other.cpu)}


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds by the clock, seconds of the processor, and the result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def take_turns(
    calls: dict[str, Callable[[], Any]],
    repetitions: int,
    warmup: int = 2,
    before: Callable[[], None] = lambda: None,
    turn: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Every function in turn, again and again, each time in another order. A call must not return
    before its work is done; `before` runs before each call, `turn` before all of them are called
    once more, and neither is timed."""
    times = {name: Times([], []) for name in calls}
    names = list(calls)
    gc.collect()
    for i in range(warmup + repetitions):
        turn()
        first = i % len(names)
        for name in names[first:] + names[:first]:
            before()
            wall, cpu, _ = timed(calls[name])
            if i >= warmup:
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
    return times


def isolated(module: str, function: str, **arguments: Any) -> Any:
    """The result of a section's function, computed in a new process; all of it as JSON."""
    code = (
        "import json, sys; sys.path[:0] = sys.argv[1:3]; import importlib; "
        "f = getattr(importlib.import_module(sys.argv[3]), sys.argv[4]); "
        "out = json.dumps(f(**json.loads(sys.argv[5]))); print('\\n' + out)"
    )
    command = [sys.executable, "-c", code, str(HERE), str(HERE / "peers")]
    command += [module, function, json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    if done.returncode != 0:
        raise RuntimeError(f"{module}.{function}({arguments}) failed; see its error above")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _paired(mine: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, others, strict=True))
