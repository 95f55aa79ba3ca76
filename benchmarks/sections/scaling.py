"""50 to 50,000 clients at a fixed chunk: time grows with the clients, memory does not.

The clients are views of one small store, chosen again and again, so that the data do not grow
either and what is measured is what fedgrad itself needs.
"""

from __future__ import annotations

import re
import resource
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plots
import softmax
from report import table
from timing import isolated, timed
from workloads import first_weights, population, unflatten

import fedgrad as fg

SIZES = (50, 500, 5000, 50_000)
CHUNK, STORED, BATCH = 25, 50, 10
MODES = {"round": None, "client lr, forward": "forward", "client lr, reverse": "reverse"}


def run(quick: bool) -> dict[str, Any]:
    """By program and number of clients: seconds, temporary bytes, growth of the peak memory."""
    results: dict[str, Any] = {name: {} for name in MODES}
    for clients in SIZES[:2] if quick else SIZES:
        for name in MODES:
            print(f"[scaling] {name}, {clients} clients", flush=True)
            results[name][str(clients)] = isolated(
                "sections.scaling", "measure", name=name, clients=clients
            )
    return {"chunk": CHUNK, "programs": results}


def measure(name: str, clients: int) -> dict[str, float]:
    """One program at one size; alone in its process, because a peak is a process's."""
    data = population("logistic", STORED)
    everyone = fg.population([data.client(c) for c in range(STORED)])
    cohort = everyone.select(np.arange(clients) % STORED)
    args = jax.device_put(
        (jnp.float32(0.1), unflatten("logistic", first_weights("logistic")), cohort)
    )
    program: Any = _program()
    if MODES[name]:
        program = fg.value_and_grad(program, "lr", mode=MODES[name])
    compiled = jax.jit(lambda *a: program(*a)).lower(*args).compile()
    _forget_peak()
    before, times = _resident("VmRSS"), []
    while len(times) < 3 or (sum(times) < 1.0 and len(times) < 15):
        times.append(timed(lambda: jax.block_until_ready(compiled(*args)))[0])
    return {
        "seconds": statistics.median(times),
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "growth": max(0, _resident("VmHWM") - before),
    }


def _program() -> fg.Program:
    @fg.program(mine=fg.CLIENTS)
    def after_a_round(lr: jax.Array, weights: Any, mine: fg.Examples) -> jax.Array:
        rate, start = fg.broadcast((lr, weights))

        def step(w: Any, batch: Any, mask: jax.Array) -> Any:
            return softmax.step(w, *batch, rate)

        new = fg.mean(mine.fold(step, start, BATCH))
        return sum(jnp.vdot(w, w) for w in jax.tree.leaves(new))

    return after_a_round.on(fg.executors.local(chunk=CHUNK))


def _resident(field: str) -> int:
    """A field of /proc/self/status in bytes; elsewhere than on Linux, the peak of the process."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = re.search(rf"{field}:\s+(\d+) kB", status.read_text())
    return int(found.group(1)) * 1024 if found else 0


def _forget_peak() -> None:
    # Linux starts VmHWM again at what is in use now; where that is not allowed, the peak of the
    # compilation may hide that of the run, and the growth is then understated.
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def report(data: dict[str, Any]) -> str:
    """The section of the results, in Markdown."""
    rows = []
    for name, sizes in data["programs"].items():
        smallest = next(iter(sizes.values()))
        for clients, found in sizes.items():
            micro = found["seconds"] / int(clients) * 1e6
            rows.append(
                [
                    name,
                    clients,
                    f"{found['seconds'] * 1e3:.1f}",
                    f"{micro:.1f}",
                    f"{found['temporary'] / 2**20:.2f}",
                    f"{(found['temporary'] - smallest['temporary']) / int(clients):.0f}",
                    f"{found['growth'] / 2**20:.1f}",
                ]
            )
    head = ["program", "clients", "ms", "µs a client", "temporary MiB"]
    head += ["more bytes a client", "peak growth MiB"]
    return "\n\n".join(
        [
            f"{data['chunk']} clients at a time, one epoch of 10 batches each. Temporary: what the "
            "compiled program needs beside its arguments. Peak growth: how far the process's "
            "memory rose while it ran. A cohort itself is three integers a client.",
            table(head, rows),
            "![Scaling](scaling.svg)",
        ]
    )


def plot(data: dict[str, Any], folder: Path) -> None:
    """Time and memory against clients."""
    programs = data["programs"].items()
    clients = {name: [int(n) for n in sizes] for name, sizes in programs}

    def curves(field: str, unit: float) -> plots.Curves:
        return {
            name: (clients[name], [found[field] / unit for found in sizes.values()])
            for name, sizes in programs
        }

    panels: list[plots.Panel] = [
        ("clients", "seconds", curves("seconds", 1)),
        ("clients", "temporary memory, MiB", curves("temporary", 2**20)),
    ]
    plots.lines(folder / "scaling", panels)
