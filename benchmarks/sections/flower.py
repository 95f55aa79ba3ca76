"""Rounds on a real federation on loopback, by the resident node and by Flower's own nodes; bytes
against the plan."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from report import table

import fedgrad as fg

NODES = 3
DATA = "sections.flower:data"
SIZES = {"4 kB": 1_000, "400 kB": 100_000, "10 MB": 2_500_000}
PEERS = Path(__file__).resolve().parents[1] / "peers"
TURNS = 2  # resident nodes and the socket take turns, for the same noise


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
    """Seconds per round by size of the model and kind of node, and bytes per client by mode."""
    sizes = dict(list(SIZES.items())[: 1 if quick else None])
    rounds = 1 if quick else 5
    times: dict[str, dict[str, list[float]]] = {"resident": {}, "socket": {}, "flower": {}}
    with tempfile.TemporaryDirectory() as folder:
        socket = PEERS / "flower_socket"
        os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path, str(socket)])  # nodes find this
        for turn in range(TURNS):
            counted = _resident(Path(folder) / f"resident-{turn}", sizes, rounds, times["resident"])
            with _warm_nodes(f"{folder}/socket-{turn}") as config:
                own = Path(folder) / f"handover-{turn}"
                _app(own, socket, sizes, rounds, times["socket"], config)
        _app(Path(folder) / "stock", PEERS / "flower_fedavg", sizes, rounds, times["flower"])
    seconds = {kind: {n: _summary(t) for n, t in of.items()} for kind, of in times.items()}
    return {"seconds": seconds, "bytes": counted}


def _resident(
    folder: Path, sizes: dict[str, int], rounds: int, times: dict[str, list[float]]
) -> list[dict[str, Any]]:
    from fedgrad.federation.flower.connection import secured
    from fedgrad.federation.flower.control_api import traffic
    from fedgrad.federation.flower.driver import connect
    from fedgrad.federation.operate.local_federation import local_federation

    with (
        local_federation(folder, DATA, NODES) as federation,
        connect(federation.address) as transport,
    ):
        executor = fg.executors.flower(transport, deadline=600)
        own, step = executor.clients(), fed_avg.on(executor)
        for name, size in sizes.items():
            w, seconds = jnp.zeros(size, jnp.float32), []
            for _ in range(rounds + 1):
                start = time.perf_counter()
                w = step(w, own).block_until_ready()
                seconds.append(time.perf_counter() - start)
            _note("resident", name, rounds, float(w[0]), seconds, times)
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
        return counted


@contextmanager
def _warm_nodes(sockets: str) -> Iterator[list[str]]:
    """Processes to which the ClientApp of `flower_socket` hands envelopes; how it finds them."""
    command = [sys.executable, "-m", "handover.warm_node", DATA, sockets]
    nodes = [subprocess.Popen([*command, str(i)]) for i in range(NODES)]
    try:
        while not all(Path(f"{sockets}-{i}").exists() for i in range(NODES)):
            assert all(node.poll() is None for node in nodes)
            time.sleep(0.1)
        yield [f'sockets="{sockets}"']
    finally:
        for node in nodes:
            node.terminate()
            node.wait()


def _app(
    folder: Path,
    app: Path,
    sizes: dict[str, int],
    rounds: int,
    times: dict[str, list[float]],
    config: list[str] | None = None,
) -> None:
    """`flwr run` on Flower's own nodes, configured so; the app prints how long its rounds took."""
    from fedgrad.federation.operate.local_federation import QUIET, local_federation

    with local_federation(folder, DATA, NODES, stock=True, config=config or []) as federation:
        env = {**os.environ, **QUIET, "FLWR_HOME": str(federation.folder / "flwr")}
        flwr = Path(sys.executable).with_name("flwr")
        for name, size in sizes.items():
            settings = f"scalars={size} rounds={rounds + 1}"
            command = [flwr, "run", app, "local", "--stream", "--run-config", settings]
            ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                raise RuntimeError(f"{app.name} failed: {ran.stdout} {ran.stderr}")
            found = json.loads(lines[-1].removeprefix("RESULT "))
            _note(app.name, name, rounds, found["first"], found["seconds"], times)


def _note(
    kind: str,
    name: str,
    rounds: int,
    first: float,
    seconds: list[float],
    times: dict[str, list[float]],
) -> None:
    """The result is right; all rounds count but the first, which sends the program."""
    assert abs(first - (rounds + 1) * (NODES - 1) / 2) < 1e-3
    times.setdefault(name, []).extend(seconds[1:])
    print(f"[flower] {kind}, {name}: {statistics.median(times[name]):.2f} s", flush=True)


def _summary(times: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(times), "least": min(times), "rounds": len(times)}


def report(data: dict[str, Any]) -> str:
    """Both tables."""
    of = {kind: data["seconds"][kind] for kind in ("resident", "socket", "flower")}
    rows = [
        [
            name,
            *(f"{of[kind][name]['median']:.2f} s" for kind in of),
            f"**{of['socket'][name]['median'] / of['resident'][name]['median']:.1f}**",
        ]
        for name in of["resident"]
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
            "adds a number there and takes the mean. fedgrad's resident node, which uses parts of "
            "Flower that are not public; the same program by Flower's public API only, where a "
            "ClientApp without JAX hands each message over a Unix socket to a process that stays; "
            "Flower's FedAvg strategy. The last two are on Flower's own SuperNodes, which ask for "
            "messages every 3 s and start a process for each. The ratio is that of the socket to "
            f"the resident node, which take turns; medians of {_rounds(of)} rounds.",
            table(["model", "resident node", "socket", "Flower's FedAvg", "ratio"], rows),
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


def _rounds(of: dict[str, Any]) -> int:
    return min(found["rounds"] for found in of["resident"].values())
