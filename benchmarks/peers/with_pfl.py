"""pfl-research 0.6 on PyTorch, in one process or in several as under `torchrun`."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Round = Callable[[int], Any]


def build(workload: str, threads: int = 1, processes: int = 1, **size: Any) -> Round:
    """A round of `ragged`, `cnn`, or of a task of the paper in this size."""
    task = {"dropout": size.get("dropout", True), "file": _written(workload, size)} if size else {}
    others = _start(workload, threads, processes, task) if processes > 1 else []
    # Only now: pfl joins the process group when it is imported.
    from pfl_round import build_round

    own = build_round(workload, threads, **task)

    def play(i: int) -> Any:
        for other in others:
            assert other.stdin is not None
            other.stdin.write(f"{i}\n")
            other.stdin.flush()
        return own(i)

    return play


def _written(workload: str, size: dict[str, Any]) -> str:
    """The task as a file: only the project's own Python can make it."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = str(Path(folder) / "task.npz")
    script = str(Path(__file__).with_name("paper_tasks.py"))
    python = os.environ["PROJECT_PYTHON"]
    subprocess.run([python, script, workload, json.dumps(size), file], check=True)
    return file


def _start(
    workload: str, threads: int, processes: int, task: dict[str, Any]
) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What torchrun sets, and what pfl looks for.
    common = {
        "TORCHELASTIC_RUN_ID": "benchmark",
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PFL_PYTORCH_DEVICE": "cpu",
    }
    os.environ.update(common, RANK="0", LOCAL_RANK="0")
    command = [sys.executable, str(Path(__file__).with_name("pfl_round.py"))]
    others = [
        subprocess.Popen(
            [*command, workload, str(threads), json.dumps(task)],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, processes)
    ]
    for other in others:
        # They end by themselves when their input does; this is for an end in the middle of a round.
        atexit.register(other.kill)
    return others
