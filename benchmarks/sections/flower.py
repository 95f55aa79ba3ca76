"""Rounds on a real federation on loopback, against Flower's own FedAvg; bytes against the plan."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from report import table

import fedgrad as fg

NODES = 3
SIZES = {"4 kB": 1_000, "1 MB": 250_000, "10 MB": 2_500_000}
PEER = Path(__file__).resolve().parents[1] / "peers" / "flower_fedavg"


def data(context: Any) -> Any:
    """The data of a node: its number."""
    return {"number": np.float32(context.index)}


@fg.program(own=fg.CLIENTS)
def fed_avg(w: Any, own: Any) -> Any:
    """What the app of the peer does."""
    return fg.mean(fg.broadcast(w) + own["number"])


@fg.program(own=fg.CLIENTS)
def moments(w: Any, own: Any) -> Any:
    """Few sums of a large broadcast, so that modes differ in what they send."""
    v = fg.broadcast(w)
    return jnp.sum(jnp.stack([fg.mean(jnp.mean(v**k) * own["number"]) for k in (1, 2)]) ** 2)


def run(quick: bool) -> dict[str, Any]:
    """Seconds per round by size of the model, and bytes per client by mode."""
    sizes = dict(list(SIZES.items())[: 1 if quick else None])
    rounds = 3 if quick else 12
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # nodes find this module
        ours = _ours(Path(folder) / "agents", sizes, rounds)
        theirs = _theirs(Path(folder) / "stock", sizes, 2 if quick else 5)
        return {"seconds": {"fedgrad": ours[0], "flower": theirs}, "bytes": ours[1]}


def _ours(folder: Path, sizes: dict[str, int], rounds: int) -> tuple[Any, Any]:
    from fedgrad.federation.flower.connection import secured
    from fedgrad.federation.flower.control import traffic
    from fedgrad.federation.flower.driver import connect
    from fedgrad.federation.operate.local_federation import local_federation

    with (
        local_federation(folder, "sections.flower:data", NODES) as federation,
        connect(federation.address) as transport,
    ):
        executor = fg.executors.flower(transport, deadline=600)
        own, step = executor.clients(), fed_avg.on(executor)
        seconds: dict[str, Any] = {}
        for name, size in sizes.items():
            w, times = jnp.zeros(size, jnp.float32), []
            for _ in range(rounds + 1):
                start = time.perf_counter()
                w = step(w, own).block_until_ready()
                times.append(time.perf_counter() - start)
            assert abs(float(w[0]) - (rounds + 1) * (NODES - 1) / 2) < 1e-3
            seconds[name] = _summary(times[1:])  # the first one sends the program
            print(f"[flower] fedgrad, {name}: {seconds[name]['median']:.2f} s", flush=True)
        counted = []
        connection = secured(federation.address)
        for mode, size in (("forward", 300), ("reverse", 50_000), ("mixed", 50_000)):
            gradient, w = fg.grad(moments, mode=mode), jnp.linspace(0, 1, size)
            gradient.on(executor)(w, own)
            before = traffic(connection, transport.run)
            gradient.on(executor)(w, own)
            after = traffic(connection, transport.run)
            stacked = {"number": jnp.arange(NODES, dtype=jnp.float32)}
            planned = fg.plan(gradient, w, stacked).traffic
            wanted = [sum(t.down_bytes for t in planned), sum(t.up_bytes for t in planned)]
            spent = [(b - a) / NODES for a, b in zip(before, after, strict=True)]
            counted.append({"mode": mode, "rounds": len(planned), "plan": wanted, "wire": spent})
        return seconds, counted


def _theirs(folder: Path, sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    from fedgrad.federation.operate.local_federation import QUIET, local_federation

    seconds: dict[str, Any] = {}
    with local_federation(folder, "sections.flower:data", NODES, stock=True) as federation:
        env = {**os.environ, **QUIET, "FLWR_HOME": str(federation.folder / "flwr")}
        flwr = Path(sys.executable).with_name("flwr")
        for name, size in sizes.items():
            config = f"scalars={size} rounds={rounds + 1} nodes={NODES}"
            command = [flwr, "run", PEER, "local", "--stream", "--run-config", config]
            ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                raise RuntimeError(f"Flower's FedAvg failed: {ran.stdout} {ran.stderr}")
            found = json.loads(lines[-1].removeprefix("RESULT "))
            assert abs(found["first"] - (rounds + 1) * (NODES - 1) / 2) < 1e-3
            seconds[name] = _summary(found["seconds"][1:])
            print(f"[flower] Flower's FedAvg, {name}: {seconds[name]['median']:.2f} s", flush=True)
    return seconds


def _summary(times: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(times), "least": min(times), "rounds": len(times)}


def report(data: dict[str, Any]) -> str:
    """Both tables."""
    ours, theirs = data["seconds"]["fedgrad"], data["seconds"]["flower"]
    rows = [
        [
            name,
            f"{ours[name]['median']:.2f} s",
            f"{theirs[name]['median']:.2f} s",
            f"**{ours[name]['median'] / theirs[name]['median']:.2f}**",
        ]
        for name in ours
    ]
    counted = [
        [
            f"{found['mode']}, {found['rounds']} rounds",
            *(f"{n:,.0f}" for pair in zip(found["plan"], found["wire"], strict=True) for n in pair),
            f"{max(_excess(found)):,.0f}",
        ]
        for found in data["bytes"]
    ]
    return "\n\n".join(
        [
            f"A SuperLink and {NODES} nodes on loopback. One round sends the model to the nodes, "
            "adds a number there and takes the mean. `fedgrad` on its resident nodes, Flower's "
            "FedAvg strategy on Flower's own SuperNodes, which start a process for each message.",
            table(["model", "fedgrad", "Flower's FedAvg", "ratio"], rows),
            "Bytes per client of one gradient: `plan.traffic` against what the SuperLink counted, "
            "which includes the headers of Flower's messages and of ours.",
            table(
                ["mode", "down, plan", "down, wire", "up, plan", "up, wire", "excess per message"],
                counted,
            ),
        ]
    )


def _excess(found: dict[str, Any]) -> list[float]:
    return [
        (wire - plan) / found["rounds"]
        for plan, wire in zip(found["plan"], found["wire"], strict=True)
    ]
