"""pfl-research 0.6 on PyTorch, in one process or in several as under `torchrun`."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

Round = Callable[[int], np.ndarray]


def build(workload: str, threads: int = 1, processes: int = 1) -> Round:
    """A round of `ragged` or `cnn`."""
    others = _start(workload, threads, processes) if processes > 1 else []
    # Only now: pfl joins the process group when it is imported.
    from pfl_round import build_round

    own = build_round(workload, threads)

    def play(i: int) -> np.ndarray:
        for other in others:
            assert other.stdin is not None
            other.stdin.write(f"{i}\n")
            other.stdin.flush()
        return own(i)

    return play


def _start(workload: str, threads: int, processes: int) -> list[subprocess.Popen[str]]:
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
            [*command, workload, str(threads)],
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
