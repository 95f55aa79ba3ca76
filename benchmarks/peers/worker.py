"""One competitor as a live process: a JSON command per line in, a JSON answer per line out.

    python worker.py <peer> <workload> '<size and options as JSON>'

    (start)        ->  {"ready": true, "build_seconds": 1.9, "versions": {"jax": "0.10.2"}}
    {"round": 3}   ->  {"seconds": 0.0065, "checksum": -1.25, "norm": 3.5}

The peer is the module of that name beside this file; its `build(workload, **size)` gives `round`.
What a round returns are the weights, or a function that gives them, which is not timed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time

import numpy as np
from workloads import checksum

REPORTED = ("jax", "drjax", "fedjax", "pfl", "torch", "fedgrad", "numpy")


def main(peer: str, workload: str, size: str) -> None:
    """Build the competitor, then answer one command per line until the input ends."""
    # Whatever a peer prints must not end up in the protocol: it goes to the error stream.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    start = time.perf_counter()
    play = importlib.import_module(peer).build(workload, **json.loads(size))
    answer(ready=True, build_seconds=time.perf_counter() - start, versions=_versions())
    for line in sys.stdin:
        command = json.loads(line)
        start = time.perf_counter()
        weights = play(command["round"])
        seconds = time.perf_counter() - start
        weights = weights() if callable(weights) else weights
        norm = float(np.linalg.norm(np.asarray(weights, np.float64)))
        answer(seconds=seconds, checksum=checksum(weights), norm=norm)


def _versions() -> dict[str, str]:
    found = {}
    for package in REPORTED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
