"""The app as it is and tuned, from some learning rates: the loss after each round, as a table.

`python compare.py` starts a SuperLink and SuperNodes on this machine and has `flwr run` run the app
on them; `python compare.py --in-process` runs the same app in this process, which is quick.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

APP = Path(__file__).parent
SAID = re.compile(r"^round (\d+) loss (\S+)", re.MULTILINE)  # server_app.py

Losses = Callable[[int, float, bool], list[float]]  # of rounds, a first rate, and whether tuned


def in_process(nodes: int) -> Losses:
    """Nodes in this process, one after the other."""
    from digits import client_app, server_app

    from fedgrad.federation import InProcessGrid

    def losses(rounds: int, lr: float, tuned: bool) -> list[float]:
        grid = InProcessGrid(client_app.app, nodes)
        result = server_app.train(grid, rounds, lr, tuned, fraction=1.0)
        found = result.evaluate_metrics_serverapp
        return [float(found[number]["loss"]) for number in range(rounds + 1)]

    return losses


@contextmanager
def on_nodes(nodes: int) -> Iterator[Losses]:
    """Flower's own nodes, and `flwr run`, as `fedgrad federation` starts them and ends them."""
    bin = Path(sys.executable).parent
    path = os.pathsep.join([str(APP), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "FLWR_TELEMETRY_ENABLED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        federation = [bin / "fedgrad", "federation"]
        up = ["up", "--stock", "--nodes", str(nodes), "--data", "digits.task:site"]
        where = ["--folder", folder]
        subprocess.run([*federation, *up, *where], env=env, check=True, stdout=sys.stderr)
        home = {"FLWR_HOME": str(Path(folder) / "flwr")}

        def losses(rounds: int, lr: float, tuned: bool) -> list[float]:
            settings = f"rounds={rounds} lr={lr} tuned={str(tuned).lower()}"
            flwr = [bin / "flwr", "run", APP, "local", "--stream", "--run-config", settings]
            ran = subprocess.run(
                flwr, env={**env, **home}, capture_output=True, text=True, timeout=120 + 60 * rounds
            )
            found = {int(number): float(loss) for number, loss in SAID.findall(ran.stdout)}
            if sorted(found) != [*range(rounds + 1)]:
                raise RuntimeError(ran.stdout + ran.stderr)
            return [found[number] for number in range(rounds + 1)]

        try:
            yield losses
        finally:
            subprocess.run([*federation, "down", *where], env=env, check=True, stdout=sys.stderr)


def table(losses: Losses, rounds: int, rates: Sequence[float]) -> str:
    """A row for each round; from each rate, the app as it is and tuned."""
    runs = [(lr, tuned) for lr in rates for tuned in (False, True)]
    columns = [losses(rounds, *run) for run in runs]
    heads = [f"{lr:g}, {'tuned' if tuned else 'as it is'}" for lr, tuned in runs]
    rows = [["after round", *heads], ["---"] * (len(runs) + 1)]
    for number, found in enumerate(zip(*columns, strict=True)):
        rows.append([str(number), *(f"{loss:.3f}" for loss in found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.1])
    asked = parser.parse_args()
    if asked.in_process:
        torch.set_num_threads(1)  # a model this small gains nothing by more
        print(table(in_process(asked.nodes), asked.rounds, asked.rates))
        return
    with on_nodes(asked.nodes) as losses:
        print(table(losses, asked.rounds, asked.rates))


if __name__ == "__main__":
    main()
